"""Paged causal attention over a ragged batch, bitwise independent of the batch.

A row's result may not depend on who shares the step or on where its prompt was cut. So every query meets its keys in
the same order and through the same kernels, whatever the shapes around it:

* Scores of a query are dot products over head_dim, one kernel for any number of rows. Matrix libraries switch to
  other kernels below four rows, so rows come in multiples of four.
* The maximum does not depend on an order; the sum of a softmax runs over lanes, to which padding only adds zeros.
* Probabilities meet values in tiles of 128 positions that begin at multiples of 128: products over a longer axis are
  split by the library at places that depend on its length.

    positions   0        128       256   computed     length   padded
    tiles       [--------)[--------)[-----------------)--------)
                                          ^ queries    ^ masked: -inf, probability 0

Decoding rows of about one length form a group and share operations; a chunk of a prompt is a run of query tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

VALUE_TILE = 128
"""Positions whose probability-weighted values are summed by one product. MKL on AVX2 splits this axis from 193 on."""
ROWS = 4
"""Query rows of a product are a multiple of this."""
LANES = 16
"""Key positions are padded to a multiple of this."""


@dataclass(frozen=True)
class Tile:
    """Queries begin … end of the step's rows against `length` padded key positions of each of `sequences`.

    `mask` (bool) is True where a query may not look; it covers positions from `mask_from` on and broadcasts to
    [sequences·kv_heads, rows, length - mask_from]. None where every query may look at everything.
    """

    begin: int
    end: int
    sequences: int
    length: int
    mask: Tensor | None
    mask_from: int = 0


@dataclass(frozen=True)
class Segment:
    """Sequences whose keys and values are gathered together, and the tiles that they serve.

    `index` are rows of `KVCache.head_rows`: the keys of every head of every sequence, then the values likewise.
    """

    index: Tensor
    tiles: Sequence[Tile]


def attend(q: Tensor, rows: Tensor, segments: Sequence[Segment], *, kv_heads: int, scale: float) -> Tensor:
    """Attention of one layer: `q` [n, heads, head_dim] → [n, heads, head_dim].

    `rows` [·, block_size·head_dim] is the cache from this layer's first row on, already holding this step's tokens.
    """
    out = torch.empty_like(q)
    dim = q.shape[-1]
    for segment in segments:
        heads = segment.tiles[0].sequences * kv_heads
        keys, values = F.embedding(segment.index, rows).view(2, heads, -1, dim).unbind()
        for tile in segment.tiles:
            _attend_tile(q, keys, values, tile, out, kv_heads=kv_heads, scale=scale)
    return out


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, tile: Tile, out: Tensor, *, kv_heads: int, scale: float
) -> None:
    queries, rows = _fold(q[tile.begin : tile.end], tile.sequences, kv_heads)
    keys = keys[:, : tile.length]
    scores = queries.new_empty(queries.shape[0], queries.shape[1], tile.length)
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
    if tile.mask is not None:
        scores[..., tile.mask_from :].masked_fill_(tile.mask, -torch.inf)
    torch.softmax(scores, -1, out=scores)
    result = _weighted_values(scores, values)[:, :rows]
    _unfold(result, out[tile.begin : tile.end], tile.sequences, kv_heads)


def _weighted_values(probabilities: Tensor, values: Tensor) -> Tensor:
    """Sum of values by probability, [b, rows, length] · [b, ≥length, dim], tile after tile."""
    length = probabilities.shape[-1]
    result = torch.bmm(probabilities[..., :VALUE_TILE], values[:, : min(length, VALUE_TILE)])
    for begin in range(VALUE_TILE, length, VALUE_TILE):
        end = min(begin + VALUE_TILE, length)
        result.baddbmm_(probabilities[..., begin:end], values[:, begin:end])
    return result


def _fold(q: Tensor, sequences: int, kv_heads: int) -> tuple[Tensor, int]:
    """[sequences·t, heads, dim] → [sequences·kv_heads, t·group (padded to ROWS), dim], and t·group.

    The query heads of one key head are rows of one product: that is what grouped-query attention saves.
    """
    tokens = q.shape[0] // sequences
    dim = q.shape[-1]
    grouped = q.reshape(sequences, tokens, kv_heads, -1, dim).transpose(1, 2).reshape(sequences * kv_heads, -1, dim)
    rows = grouped.shape[1]
    return F.pad(grouped, (0, 0, 0, -rows % ROWS)), rows


def _unfold(result: Tensor, out: Tensor, sequences: int, kv_heads: int) -> None:
    """The inverse of `_fold`, into `out` [sequences·t, heads, dim]."""
    tokens = out.shape[0] // sequences
    dim = out.shape[-1]
    folded = result.reshape(sequences, kv_heads, tokens, -1, dim).transpose(1, 2)
    out.view(sequences, tokens, kv_heads, -1, dim).copy_(folded)


def attend_reference(q: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float) -> Tensor:
    """The plain twin, for one sequence: `q` [t, heads, dim] at positions start …, `keys` and `values` [length, …]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    positions = torch.arange(keys.shape[0], device=q.device)
    future = positions[None, :] > (start + torch.arange(q.shape[0], device=q.device))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), values)
