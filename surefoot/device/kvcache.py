"""The paged KV cache: one mapping, block-major across layers.

    cache [block, layer, k|v, kv_head, token, head_dim]

One block is one contiguous piece over all layers, so copying, zeroing and (later) moving a block is one operation.
Within a block a head's tokens are contiguous: attention gathers whole heads of blocks, and the gathered rows are
already the matrices that it multiplies, whatever the blocks were. Pages are zero until touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.spec import ModelSpec


class KVCache:
    """Keys and values of `num_blocks` blocks, and one more: the sink that padding rows and control steps write to."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sink = num_blocks
        self.kv_heads = spec.num_kv_heads
        self.layers = spec.num_layers
        shape = (num_blocks + 1, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._pages = _zero_pages(torch.Size(shape).numel() * dtype.itemsize)
        self.data = torch.frombuffer(self._pages, dtype=dtype).view(shape)
        self._tokens = self.data.view(-1, spec.head_dim)
        self._heads = self.data.view(-1, block_size * spec.head_dim)

    def token_rows(self, layer: int) -> Tensor:
        """[·, head_dim]: rows of single tokens, from this layer's first on; see `token_index`."""
        return self._tokens[layer * 2 * self.kv_heads * self.block_size :]

    def head_rows(self, layer: int) -> Tensor:
        """[·, block_size·head_dim]: rows of whole heads of a block, from this layer's first on; see `head_index`."""
        return self._heads[layer * 2 * self.kv_heads :]

    def token_index(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Rows in `token_rows` of tokens at `offsets` [n] of `blocks` [n]: [n, 2·kv_heads], keys and then values."""
        heads = torch.arange(2 * self.kv_heads, device=blocks.device)
        return (self._first(blocks)[:, None] + heads) * self.block_size + offsets[:, None]

    def head_index(self, tables: Tensor) -> Tensor:
        """Rows in `head_rows` of the keys and then the values of `tables` [sequences, blocks].

        [2·sequences·kv_heads·blocks], the blocks of one head of one sequence beside each other.
        """
        heads = torch.arange(2 * self.kv_heads, device=tables.device).view(2, 1, self.kv_heads, 1)
        return (self._first(tables)[:, None, :] + heads).reshape(-1)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination); sources are read before destinations are written."""
        if pairs:
            sources, destinations = (torch.tensor(ids, device=self.data.device) for ids in zip(*pairs, strict=True))
            self.data[destinations] = self.data[sources]

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), one after the other: that needs no memory."""
        move_blocks(self.data, pairs)

    def hold(self, blocks: int) -> None:
        """Give the pages of blocks `blocks` … num_blocks-1 back to the system; they are zero when next touched."""
        size = self.data[0].nbytes
        begin = -(-blocks * size // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self.sink * size // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear blocks that a non-finite row wrote: scratch may be stale but never NaN, for 0·NaN is NaN."""
        if blocks:
            self.data[torch.tensor(blocks, device=self.data.device)] = 0

    def _first(self, blocks: Tensor) -> Tensor:
        return blocks * (self.layers * 2 * self.kv_heads)


def move_blocks(data: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `data[from]` to `data[to]` for each pair, without memory in between."""
    for source, destination in pairs:
        data[destination].copy_(data[source])


def _zero_pages(size: int) -> mmap.mmap:
    """Zeros whose pages cost nothing until touched; huge pages, since attention gathers from all over the mapping."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
