"""The network and its cache: inputs of one step in, hidden rows and logits out."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.device.inputs import StepInputs
from surefoot.device.kvcache import KVCache
from surefoot.model.layers import Attention, Network
from surefoot.ops.attention import attend
from surefoot.ops.kv_store import store
from surefoot.ops.norm_rope import rms_norm, rotate_
from surefoot.spec import ModelSpec


class Runner:
    """Runs forward passes of `network` over `cache`."""

    def __init__(self, spec: ModelSpec, network: Network, cache: KVCache) -> None:
        self.spec = spec
        self.network = network
        self.cache = cache
        self.group = spec.num_heads // spec.num_kv_heads
        self.windows = tuple(dict.fromkeys(map(spec.window, range(spec.num_layers))))

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden rows [n, hidden]; keys and values of these tokens are in the cache afterwards."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        turned: dict[int, Tensor] = {}  # of each rotation that layers share, at this step's positions

        def attend_layer(layer: int, qkv: Tensor, how: Attention) -> Tensor:
            norm_heads_(qkv, how, heads, kv_heads)
            if how.turns is not None:
                if id(how.turns) not in turned:
                    turned[id(how.turns)] = how.turns[inputs.positions]
                rotate_(qkv[:, : heads + kv_heads], turned[id(how.turns)])
            store(self.cache.token_rows(layer), inputs.store_index, qkv[:, heads:])
            rows = self.cache.head_rows(layer)
            segments = inputs.segments[how.window]
            out = attend(qkv[:, :heads], rows, segments, kv_heads=kv_heads, scale=how.scale, softcap=how.softcap)
            return out.flatten(1)

        return self.network.forward(inputs.tokens, inputs.positions, attend_layer)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), vocabulary]: only rows that are sampled meet the output projection."""
        return self.network.logits(hidden[torch.tensor(rows, device=hidden.device)]).float()


def norm_heads_(qkv: Tensor, how: Attention, heads: int, kv_heads: int) -> None:
    """Norm each head of queries and of keys in place, where the layer does."""
    if how.q_norm is not None and how.k_norm is not None:
        qkv[:, :heads] = rms_norm(qkv[:, :heads], how.q_norm, how.eps)
        keys = qkv[:, heads : heads + kv_heads]
        keys.copy_(rms_norm(keys, how.k_norm, how.eps))
