"""One row times a large weight, on NVIDIA GPUs; the plain twin is `torch.nn.functional.linear`.

One decoding row reads every weight once for two operations each: the time is the weight's bytes over the bandwidth, and
a library's tiles for many rows do not reach it (4.34 TB/s here against 3.80, over a whole GLM-4-9B on an H200).

Two neighbours of this kernel were measured there and left out. With the norm, the gate or the residual fused in it
takes longer than the small kernels it saves: 110 against 106 us a layer. For 2 to 16 rows a product with the input as
its narrow side takes as long as cuBLAS or longer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`x` [1, in] times `weight` [out, in] (contiguous), plus `bias` [out], into `out` [1, out]."""
    size, width = x.shape[-1], out.shape[-1]
    rows, block, warps = tile_of(width, size)
    _row_product[(triton.cdiv(width, rows),)](
        x, weight, bias, out, OUT=width, IN=size, ROWS=rows, BLOCK=block, num_warps=warps
    )


def tile_of(width: int, size: int) -> tuple[int, int, int]:
    """Weight rows a program, their columns a step, and warps: enough programs for every multiprocessor, long reads."""
    block = min(triton.next_power_of_2(size), 2048 if size % 2048 == 0 else 1024)
    return (1 if width < 8192 else 2), block, 4


@triton.jit
def _row_product(x, weight, bias, out, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS outputs: products are summed lane by lane and across lanes only at the end.

    Weights are read once: they are the first to leave the L2 cache, which keeps `x`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < OUT
    base = weight + row.to(tl.int64)[:, None] * IN
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, IN, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < IN
        mask = there[:, None] & inside[None, :]
        w = tl.load(base + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        sums += w * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(sums, 1)
    if bias is not None:
        y += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=there)
