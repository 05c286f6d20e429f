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

* Of a layer with a sliding window, only the tiles that the window touches are gathered. Those left out would only have
  added zeros in front, in the same lanes, so that this changes no bit either.

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
class Mask:
    """Some key positions of a tile, from `begin` on, and which of them a query may not look at.

    `hidden` (bool) broadcasts to [sequences·kv_heads, rows, positions].
    """

    begin: int
    hidden: Tensor


@dataclass(frozen=True)
class Tile:
    """Queries begin … end of the step's rows against `length` padded key positions of each of `sequences`.

    Positions count from `first` of those that the segment gathered. Those that no mask covers are seen by every query.
    """

    begin: int
    end: int
    sequences: int
    first: int
    length: int
    masks: Sequence[Mask]


@dataclass(frozen=True)
class Segment:
    """Sequences whose keys and values are gathered together, and the tiles that they serve.

    `index` are rows of `KVCache.head_rows`: the keys of every head of every sequence, then the values likewise.
    """

    index: Tensor
    tiles: Sequence[Tile]


def attend(
    q: Tensor,
    rows: Tensor,
    segments: Sequence[Segment],
    *,
    kv_heads: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one layer: `q` [n, heads, head_dim] → [n, heads, head_dim].

    `rows` [·, block_size·head_dim] is the cache from this layer's first row on, already holding this step's tokens.
    With `softcap` scores become cap · tanh(scores / cap).
    """
    out = torch.empty_like(q)
    dim = q.shape[-1]
    for segment in segments:
        heads = segment.tiles[0].sequences * kv_heads
        keys, values = F.embedding(segment.index, rows).view(2, heads, -1, dim).unbind()
        for tile in segment.tiles:
            queries, count = _fold(q[tile.begin : tile.end], tile.sequences, kv_heads)
            shares = _probabilities(queries, keys, tile, scale, softcap)
            result = _weighted_values(shares, values[:, tile.first :])[:, :count]
            _unfold(result, out[tile.begin : tile.end], tile.sequences, kv_heads)
    return out


def _probabilities(queries: Tensor, keys: Tensor, tile: Tile, scale: float, softcap: float | None) -> Tensor:
    """[b, rows, dim] · [b, ≥length, dim] → [b, rows, tile.length], each row summing to one."""
    keys = keys[:, tile.first : tile.first + tile.length]
    scores = queries.new_empty(queries.shape[0], queries.shape[1], tile.length)
    factor = scale if softcap is None else scale / softcap
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=factor, out=scores)
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    for mask in tile.masks:
        scores[..., mask.begin : mask.begin + mask.hidden.shape[-1]].masked_fill_(mask.hidden, -torch.inf)
    return torch.softmax(scores, -1, out=scores)


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


def attend_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The plain twin, for one sequence: `q` [t, heads, dim] at positions start …, `keys` and `values` [length, …].

    With `window` a query sees that many positions, its own included.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(keys.shape[0], device=q.device)[None, :]
    queries = (start + torch.arange(q.shape[0], device=q.device))[:, None]
    hidden = at > queries if window is None else (at > queries) | (at <= queries - window)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
