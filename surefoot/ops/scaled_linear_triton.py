"""Few rows times a large weight of 8 bits, on NVIDIA GPUs; the plain twin is `scaled_linear.unpacked_linear`.

A weight is read once, as it lies there, and is exact in 16 bits; its channel's scale multiplies the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LEAST_ROWS = 16
"""Of a tensor core's product."""


def scaled_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`x` [n, in] times codes [out, in] · scales [out], plus bias [out], into `out` [n, out]; all contiguous."""
    rows, size = x.shape
    width = codes.shape[0]
    block_out, block_in, warps = tile_of(rows, size)
    _few_rows[(triton.cdiv(width, block_out),)](
        x,
        codes,
        scales,
        bias,
        out,
        rows,
        OUT=width,
        IN=size,
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(rows)),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=warps,
    )


def tile_of(rows: int, size: int) -> tuple[int, int, int]:
    """Output channels of a program, inputs of a step, and warps."""
    block_in = min(256 if rows <= 16 else 128, max(LEAST_ROWS, triton.next_power_of_2(size)))
    return (16 if rows <= 16 else 32), block_in, 4


@triton.jit
def _few_rows(
    x, codes, scales, bias, out, rows,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_OUT] sums over steps of BLOCK_IN inputs; rows that are not there read as zeros."""
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    there, wanted = channel < OUT, row < rows
    base = codes + channel.to(tl.int64)[:, None] * IN
    sums = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        at = start + tl.arange(0, BLOCK_IN)
        inside = at < IN
        part = tl.load(x + row[:, None] * IN + at[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)
        mask = there[:, None] & inside[None, :]
        code = tl.load(base + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(part, tl.trans(code.to(part.dtype)), sums, input_precision="ieee")
    sums *= tl.load(scales + channel, mask=there, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * OUT + channel[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=wanted[:, None] & there[None, :])
