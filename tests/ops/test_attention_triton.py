"""Paged attention kernels against the plain twin, in float32 through the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.ops.attention_triton import DecodePlan, decode, decode_spread, plan_decode, prefill, prefill_tiles
from tests.ops.reference import attention, paged, relative

CPU = torch.device("cpu")


def plan_for(lengths: list[int], *, spread: int, heads: int = 4, dim: int = 64) -> tuple[Tensor, DecodePlan]:
    plan = DecodePlan.allocate(len(lengths) + 2, spread=spread, heads=heads, head_dim=dim, device=CPU)
    plan.partial.fill_(torch.nan)
    plan.weight.fill_(torch.nan)
    plan.row_of.fill_(77)
    rows = torch.tensor(lengths, dtype=torch.int32)
    plan_decode(rows, plan)
    return rows, plan


@pytest.mark.parametrize("lengths", [[1000, 3, 0, 200], [64], [0, 0], [7, 7, 7]])
def test_plan_covers_each_row_once(lengths: list[int]) -> None:
    """Works of a row are consecutive, hold its length and no more, and those left over belong to no row."""
    _, plan = plan_for(lengths, spread=8)
    chunk = int(plan.chunk)
    counts = [-(-length // chunk) for length in lengths]
    assert chunk % 64 == 0
    assert plan.first[: len(lengths) + 1].tolist() == np.cumsum([0, *counts]).tolist()
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    used = plan.row_of[: 8 + len(lengths)].tolist()
    assert used == owners + [-1] * (len(used) - len(owners))


@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "block_size"),
    [(16, 2, 128, 128), (1, 3, 64, 16), (7, 2, 64, 16), (3, 1, 80, 128), (4, 2, 96, 16)],
)
def test_decode_equals_plain_attention(group: int, kv_heads: int, dim: int, block_size: int) -> None:
    """Rows short, long, ragged and empty give what plain attention gives; an empty row gives zeros."""
    lengths = [1, 300, 0, 129, 64]
    kv, table = paged(lengths, kv_heads=kv_heads, dim=dim, block_size=block_size)
    heads = group * kv_heads
    rows, plan = plan_for(lengths, spread=4, heads=heads, dim=dim)
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, dim)
    out = torch.full((len(lengths), heads, dim), torch.nan)
    decode(qkv[:, :heads], kv, table, rows, plan, scale=dim**-0.5, out=out)
    for row, length in enumerate(lengths):
        if length == 0:
            assert not out[row].any()
            continue
        expected = attention(qkv[row : row + 1, :heads], kv, table[row], length, scale=dim**-0.5)
        assert relative(out[row : row + 1], expected) < 1e-5


@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "block_size"),
    [(16, 2, 128, 128), (1, 2, 64, 16), (7, 2, 64, 16), (3, 1, 80, 128)],
)
def test_prefill_equals_plain_attention(group: int, kv_heads: int, dim: int, block_size: int) -> None:
    """A ragged batch of whole prompts, chunks after a context, and single tokens gives what plain attention gives."""
    queries, lengths = [1, 70, 9, 64], [200, 70, 150, 128]
    kv, table = paged(lengths, kv_heads=kv_heads, dim=dim, block_size=block_size)
    heads = group * kv_heads
    qkv = torch.randn(sum(queries), heads + 2 * kv_heads, dim)
    out = torch.full((sum(queries), heads, dim), torch.nan)
    starts = np.cumsum([0, *queries])
    prefill(
        qkv[:, :heads],
        kv,
        table,
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.from_numpy(prefill_tiles(queries, lengths, group)),
        scale=dim**-0.5,
        out=out,
    )
    for row, length in enumerate(lengths):
        mine = slice(starts[row], starts[row + 1])
        expected = attention(qkv[mine, :heads], kv, table[row], length, scale=dim**-0.5)
        assert relative(out[mine], expected) < 1e-5


def test_tiles_cover_each_query_once_longest_first() -> None:
    """Every token of every row is in one tile, and the tile that looks furthest back comes first."""
    tiles = prefill_tiles([20, 1, 0], [100, 500, 7], 16)
    assert tiles.tolist() == [[1, 0], [0, 16], [0, 8], [0, 0]]
    assert tiles.dtype == np.int32


def test_spread_keeps_every_multiprocessor_busy() -> None:
    """Few key heads are cut into more works than many; there are always some."""
    assert decode_spread(2, 132) == 66
    assert decode_spread(64, 132) == 16
