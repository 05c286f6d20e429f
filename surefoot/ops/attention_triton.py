"""Paged attention on NVIDIA GPUs; the plain twin is `ops.attention.attend_reference`.

The cache of one layer is a view [block, k|v, token, kv_head, head_dim] of the whole, whose blocks lie far apart (64-bit
offsets). The query heads that share a key head are rows of one matrix product, so a key is read once for all of them.

Decoding reads every key of a row for one query: bandwidth is all. Long rows are cut into chunks, one program each, and
their results joined (split-KV, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). How to cut depends on lengths,
which only the GPU knows when a captured graph is replayed; so a small kernel plans the cuts there, once for all layers:

    lengths       row 0: 5 chunks              row 1: 1   row 2: 0 (padding)   row 3: 2
    works         [0    1    2    3    4   )[5       )                      [6    7   )   8 …  unused: row -1

Prefill packs tokens·group queries into the rows of a product and walks the keys (online softmax, FlashAttention-2,
https://arxiv.org/abs/2307.08691). Exponentials are of base 2, with log2(e) in the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

DECODE_KEYS = 64
"""Keys of a decode tile; chunks are multiples of it."""
DECODE_STAGES = 2
"""Tiles of keys and values on their way at once, and the one in use."""
PREFILL_ROWS = 128
"""Queries·group of a prefill tile."""
PREFILL_KEYS = 128
"""Keys of a prefill tile of 16-bit numbers; a quarter of them in float32, which fills shared memory sooner."""
PREFILL_WARPS = 8
PREFILL_STAGES = 3
MAX_ROWS = 1024
"""Rows whose lengths the planning kernel holds at once."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class DecodePlan:
    """How rows are cut into works, and the room for their results. Addresses are static: graphs keep them.

    `spread` works are there to share out, and one more per row for what does not divide evenly.
    """

    spread: int
    chunk: Tensor
    """[1] int32: keys of a work."""
    first: Tensor
    """[max_rows + 1] int32: the first work of each row."""
    row_of: Tensor
    """[spread + max_rows] int32: the row of each work, or -1."""
    partial: Tensor
    """[spread + max_rows, heads, head_dim] float32: normalised results of works."""
    weight: Tensor
    """[spread + max_rows, heads] float32: base-2 logarithm of the sum of a work's exponentials."""

    @classmethod
    def allocate(cls, max_rows: int, *, spread: int, heads: int, head_dim: int, device: torch.device) -> DecodePlan:
        """Room for up to `max_rows` (≤ MAX_ROWS) rows; `spread` as of `decode_spread`."""
        works = spread + max_rows
        return cls(
            spread,
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            torch.full((works,), -1, dtype=torch.int32, device=device),
            torch.zeros(works, heads, head_dim, dtype=torch.float32, device=device),
            torch.zeros(works, heads, dtype=torch.float32, device=device),
        )


def decode_spread(kv_heads: int, multiprocessors: int) -> int:
    """Works that keep a GPU busy: a program a multiprocessor, over all key heads (measured on an H200)."""
    return max(multiprocessors // kv_heads, 16)


def plan_decode(lengths: Tensor, plan: DecodePlan) -> None:
    """Cut rows of `lengths` [rows] int32 (0: padding) into works of `plan`; once per step, before its layers."""
    rows = lengths.shape[0]
    _plan_decode[(rows,)](
        lengths, plan.chunk, plan.first, plan.row_of, rows, plan.spread, MAX_ROWS=MAX_ROWS, KEYS=DECODE_KEYS
    )


@triton.jit(do_not_specialize=["rows", "spread"], do_not_specialize_on_alignment=["lengths"])
def _plan_decode(lengths, chunk_out, first, row_of, rows, spread, MAX_ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Each program finds the works of its row. With chunk ≥ total/spread, Σ⌈length/chunk⌉ ≤ spread + rows."""
    row = tl.program_id(0)
    at = tl.arange(0, MAX_ROWS)
    length = tl.load(lengths + at, mask=at < rows, other=0)
    share = tl.cdiv(tl.sum(length, 0), spread)
    chunk = tl.maximum(tl.cdiv(share, KEYS), 1) * KEYS
    counts = tl.cdiv(length, chunk)
    begin = tl.sum(tl.where(at < row, counts, 0), 0)
    end = begin + tl.sum(tl.where(at == row, counts, 0), 0)
    tl.store(first + row, begin)
    for work in range(begin, end, MAX_ROWS):
        tl.store(row_of + work + at, row, mask=work + at < end)
    if row == rows - 1:
        tl.store(chunk_out, chunk)
        tl.store(first + rows, end)
        for work in range(end, spread + rows, MAX_ROWS):
            tl.store(row_of + work + at, -1, mask=work + at < spread + rows)


def decode(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    out: Tensor,
    keep_padding: bool = False,
) -> None:
    """One query per row: `q` [rows, heads, head_dim] (rows may be strided) into `out` [rows, heads, head_dim].

    `kv` [blocks, 2, block_size, kv_heads, head_dim] one layer of the cache; `block_table` [rows, blocks] int32;
    `lengths` [rows] int32 with this token; `plan` as left by `plan_decode` for these lengths. Padding rows
    give zeros, or with `keep_padding` leave what is there: in a mixed step it belongs to rows of prefill.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[3]
    group = heads // kv_heads
    _decode[(kv_heads, plan.spread + rows)](
        q,
        kv,
        block_table,
        lengths,
        plan.chunk,
        plan.first,
        plan.row_of,
        plan.partial,
        plan.weight,
        out,
        scale * LOG2_E,
        q.stride(0),
        block_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        TILE_GROUP=max(triton.next_power_of_2(group), 16),
        DIM=dim,
        TILE_DIM=triton.next_power_of_2(dim),
        BLOCK_SIZE=kv.shape[2],
        KEYS=DECODE_KEYS,
        num_warps=4,
        num_stages=DECODE_STAGES,
    )
    _combine[(rows, heads)](
        plan.first,
        plan.partial,
        plan.weight,
        out,
        KEEP=keep_padding,
        DIM=dim,
        TILE_DIM=triton.next_power_of_2(dim),
        TILE=32,
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "lengths"])
def _decode(
    q,
    kv,
    table,
    lengths,
    chunk_in,
    first,
    row_of,
    partial,
    weight,
    out,
    scale,
    q_stride,
    table_stride,
    block_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One chunk of one row against one key head."""
    kv_head = tl.program_id(0)
    work = tl.program_id(1)
    row = tl.load(row_of + work).to(tl.int64)
    if row < 0:
        return
    start = tl.load(first + row)
    chunk = tl.load(chunk_in)
    begin = (work - start) * chunk
    end = tl.minimum(begin + chunk, tl.load(lengths + row))

    member = tl.arange(0, TILE_GROUP)
    column = tl.arange(0, TILE_DIM)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + row * q_stride + head[:, None] * DIM + column[None, :], mask=real, other=0.0)
    best = tl.full([TILE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([TILE_GROUP], tl.float32)
    result = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    pages = table + row * table_stride
    blocks = _blocks_at(pages, begin, end, BLOCK_SIZE, KEYS)
    for at in range(begin, end, KEYS):
        offset = _offsets(blocks, at, block_stride, KV_HEADS * DIM, BLOCK_SIZE, KEYS)
        blocks = _blocks_at(pages, at + KEYS, end, BLOCK_SIZE, KEYS)
        there = at + tl.arange(0, KEYS) < end
        source = kv + kv_head * DIM + offset[:, None] + column[None, :]
        mask = there[:, None] & (column < DIM)[None, :]
        keys = tl.load(source, mask=mask, other=0.0)
        values = tl.load(source + value_stride, mask=mask, other=0.0)
        scores = tl.where(
            there[None, :], tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, float("-inf")
        )
        best, total, result = _absorb(scores, values, best, total, result)

    result = result / total[:, None]
    if tl.load(first + row + 1) - start == 1:
        target = out + (row * (KV_HEADS * GROUP) + head[:, None]) * DIM + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=real)
    else:
        slot = work.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(partial + slot[:, None] * DIM + column[None, :], result, mask=real)
        tl.store(weight + slot, best + tl.log2(total), mask=member < GROUP)


@triton.jit
def _blocks_at(pages, at, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Blocks of the keys at positions `at` …, int64: one for a tile that lies within one block, else [KEYS].

    Asked for one tile ahead and carried around the loop, so that keys are not loaded behind a load: that would cost the
    compiler's pipeline two of its stages.
    """
    if BLOCK_SIZE % KEYS == 0:
        blocks = tl.load(pages + at // BLOCK_SIZE, mask=at < end, other=0)
    else:
        position = at + tl.arange(0, KEYS)
        blocks = tl.load(pages + position // BLOCK_SIZE, mask=position < end, other=0)
    return blocks.to(tl.int64)


@triton.jit
def _offsets(blocks, at, block_stride, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Offsets [KEYS] int64 in a layer of the keys at `at` …; TOKEN elements lie between neighbours in a block."""
    if BLOCK_SIZE % KEYS == 0:
        within = at % BLOCK_SIZE + tl.arange(0, KEYS)
    else:
        within = (at + tl.arange(0, KEYS)) % BLOCK_SIZE
    return blocks * block_stride + within * TOKEN


@triton.jit
def _absorb(scores, values, best, total, result):
    """One step of the online softmax: earlier sums shrink to the new maximum. Some score of each row is finite."""
    top = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - top)
    exponentials = tl.exp2(scores - top[:, None])
    total = total * shrink + tl.sum(exponentials, 1)
    result = tl.dot(exponentials.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return top, total, result


@triton.jit
def _combine(
    first, partial, weight, out, KEEP: tl.constexpr, DIM: tl.constexpr, TILE_DIM: tl.constexpr, TILE: tl.constexpr
):
    """Join the works of one row and head, TILE at a time: a mean weighted by the sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    begin = tl.load(first + row)
    end = tl.load(first + row + 1)
    column = tl.arange(0, TILE_DIM)
    target = out + (row * heads + head) * DIM + column
    if end - begin == 1 or (KEEP and end == begin):
        return
    best = float("-inf")
    total = 0.0
    result = tl.zeros([TILE_DIM], tl.float32)
    for at in range(begin, end, TILE):
        work = at + tl.arange(0, TILE)
        slot = work.to(tl.int64) * heads + head
        logs = tl.load(weight + slot, mask=work < end, other=float("-inf"))
        mask = (work < end)[:, None] & (column < DIM)[None, :]
        rows = tl.load(partial + slot[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        top = tl.maximum(best, tl.max(logs, 0))
        shares = tl.exp2(logs - top)
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(shares, 0)
        result = result * shrink + tl.sum(shares[:, None] * rows, 0)
        best = top
    result = result / tl.where(total > 0, total, 1.0)
    tl.store(target, result.to(out.dtype.element_ty), mask=column < DIM)


def prefill_tiles(queries: Sequence[int], lengths: Sequence[int], group: int) -> npt.NDArray[np.int32]:
    """Tiles [tiles, 2] of a ragged batch: the row of each, and its first token among the row's queries.

    `queries` are tokens to compute per row and `lengths` their contexts with these tokens. Tiles that meet the most
    keys come first, so that the last programs to start are short.
    """
    step = PREFILL_ROWS // triton.next_power_of_2(group)
    firsts = [np.arange(0, count, step, dtype=np.int32) for count in queries]
    rows = np.repeat(np.arange(len(firsts), dtype=np.int32), [len(first) for first in firsts])
    tiles = np.stack([rows, np.concatenate(firsts)], 1)
    start = np.asarray(lengths, dtype=np.int64) - np.asarray(queries, dtype=np.int64)
    return tiles[np.argsort(-(start[rows] + tiles[:, 1]), kind="stable")]


def prefill(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Causal attention of a ragged batch: `q` [n, heads, head_dim] (rows may be strided) into `out`, contiguous.

    `starts` [rows + 1] int32: where each row's queries begin in `q`; they are the last tokens of its context of
    `lengths` [rows] int32. `block_table` [rows, blocks] int32, `kv` as for `decode`, whose keys of this step are
    already stored; `tiles` is `prefill_tiles` on the device. A long context with one query is `decode`'s task.
    """
    _, heads, dim = q.shape
    kv_heads = kv.shape[3]
    group = heads // kv_heads
    _prefill[(kv_heads, tiles.shape[0])](
        q,
        kv,
        block_table,
        lengths,
        starts,
        tiles,
        out,
        scale * LOG2_E,
        q.stride(0),
        block_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        TILE_GROUP=triton.next_power_of_2(group),
        DIM=dim,
        TILE_DIM=triton.next_power_of_2(dim),
        BLOCK_SIZE=kv.shape[2],
        ROWS=PREFILL_ROWS,
        KEYS=PREFILL_KEYS if q.element_size() == 2 else PREFILL_KEYS // 4,
        num_warps=PREFILL_WARPS,
        num_stages=PREFILL_STAGES,
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "lengths", "starts", "tiles"])
def _prefill(
    q,
    kv,
    table,
    lengths,
    starts,
    tiles,
    out,
    scale,
    q_stride,
    table_stride,
    block_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """ROWS/TILE_GROUP tokens of one row against one key head.

    keys of the row   0             shared            end    (positions)
    tile by tile      [ no mask    )[ causal mask    )
    queries                          ^ first token   ^ after the last
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles + 2 * tile).to(tl.int64)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    before = tl.load(lengths + row) - count
    shared = (before + first + 1) // KEYS * KEYS
    end = before + tl.minimum(first + ROWS // TILE_GROUP, count)

    lane = tl.arange(0, ROWS)
    token = first + lane // TILE_GROUP
    member = lane % TILE_GROUP
    column = tl.arange(0, TILE_DIM)
    real = ((token < count) & (member < GROUP))[:, None] & (column < DIM)[None, :]
    index = (start + token).to(tl.int64)
    head = kv_head * GROUP + member
    queries = tl.load(q + (index * q_stride + head * DIM)[:, None] + column[None, :], mask=real, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, TILE_DIM], tl.float32)
    pages = table + row * table_stride
    base = kv + kv_head * DIM
    blocks = _blocks_at(pages, 0, end, BLOCK_SIZE, KEYS)
    for at in range(0, shared, KEYS):
        offset = _offsets(blocks, at, block_stride, KV_HEADS * DIM, BLOCK_SIZE, KEYS)
        blocks = _blocks_at(pages, at + KEYS, end, BLOCK_SIZE, KEYS)
        keys = _load_rows(base, offset, column, DIM, TILE_DIM)
        values = _load_rows(base + value_stride, offset, column, DIM, TILE_DIM)
        best, total, result = _absorb(
            tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, values, best, total, result
        )
    for at in range(shared, end, KEYS):
        offset = _offsets(blocks, at, block_stride, KV_HEADS * DIM, BLOCK_SIZE, KEYS)
        blocks = _blocks_at(pages, at + KEYS, end, BLOCK_SIZE, KEYS)
        position = at + tl.arange(0, KEYS)
        mask = (position < end)[:, None] & (column < DIM)[None, :]
        keys = tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0)
        values = tl.load(base + value_stride + offset[:, None] + column[None, :], mask=mask, other=0.0)
        seen = position[None, :] <= (before + token)[:, None]
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, float("-inf"))
        best, total, result = _absorb(scores, values, best, total, result)

    target = out + (index * (KV_HEADS * GROUP) + head)[:, None] * DIM + column[None, :]
    tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _load_rows(base, offset, column, DIM: tl.constexpr, TILE_DIM: tl.constexpr):
    """Rows at `offset`, all of them there; only columns that pad head_dim need a mask."""
    source = base + offset[:, None] + column[None, :]
    if DIM == TILE_DIM:
        rows = tl.load(source)
    else:
        rows = tl.load(source, mask=(column < DIM)[None, :], other=0.0)
    return rows
