"""The paged KV cache on a GPU, block-major across layers: `[block, layer, k|v, token, kv_head, head_dim]`.

One block is one contiguous piece over all layers (5 MiB for GLM-4-9B at 128 tokens), so that copying, zeroing and
giving back a block is one operation. A layer is a strided view of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.device.gpu_range import GpuRange
from surefoot.device.kvcache import move_blocks
from surefoot.spec import ModelSpec


class GpuCache:
    """Keys and values of `num_blocks` blocks, and one more: the sink of control steps and warm-up."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sink = num_blocks
        shape = (num_blocks + 1, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim)
        self._range = GpuRange(torch.Size(shape).numel() * dtype.itemsize, device)
        self.data = self._range.tensor(shape, dtype)
        self.hold(num_blocks)
        self._layers = [self.data[:, layer] for layer in range(spec.num_layers)]

    def hold(self, blocks: int) -> None:
        """Back the first `blocks` blocks, and the sink, with memory; no other block may be used from then on.

        Raises torch.OutOfMemoryError, and changes nothing, where the card has not that much.
        """
        size = self.data[0].numel() * self.data.itemsize
        self._range.hold([(0, blocks * size), (self.sink * size, (self.sink + 1) * size)])

    @property
    def held(self) -> int:
        """Bytes of the card that the cache holds now."""
        return self._range.backed

    def layer(self, index: int) -> Tensor:
        """[block, k|v, token, kv_head, head_dim] of one layer."""
        return self._layers[index]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination); sources are read before destinations are written."""
        if pairs:
            sources, destinations = torch.tensor(pairs, device=self.data.device).unbind(1)
            self.data[destinations] = self.data[sources]

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), one after the other: that needs no memory."""
        move_blocks(self.data, pairs)

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear blocks that a non-finite row wrote: scratch may be stale but never NaN, for 0·NaN is NaN."""
        if blocks:
            self.data[torch.tensor(blocks, device=self.data.device)] = 0
