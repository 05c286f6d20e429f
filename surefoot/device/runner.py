"""The network and its cache: inputs of one step in, hidden rows and logits out."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.device.inputs import StepInputs
from surefoot.device.kvcache import KVCache
from surefoot.model.layers import Network
from surefoot.ops.attention import attend
from surefoot.ops.kv_store import store
from surefoot.spec import ModelSpec


class Runner:
    """Runs forward passes of `network` over `cache`."""

    def __init__(self, spec: ModelSpec, network: Network, cache: KVCache) -> None:
        self.spec = spec
        self.network = network
        self.cache = cache
        self.group = spec.num_heads // spec.num_kv_heads
        self._scale = spec.head_dim**-0.5

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden rows [n, hidden]; keys and values of these tokens are in the cache afterwards."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads

        def attend_layer(layer: int, qkv: Tensor) -> Tensor:
            store(self.cache.token_rows(layer), inputs.store_index, qkv[:, heads:])
            rows = self.cache.head_rows(layer)
            out = attend(qkv[:, :heads], rows, inputs.segments, kv_heads=kv_heads, scale=self._scale)
            return out.flatten(1)

        return self.network.forward(inputs.tokens, inputs.positions, attend_layer)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), vocabulary]: only rows that are sampled meet the output projection."""
        return self.network.logits(hidden[torch.tensor(rows, device=hidden.device)])
