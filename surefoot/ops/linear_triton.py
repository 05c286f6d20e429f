"""Products of a few rows with a large weight, on NVIDIA GPUs; the plain twin is `torch.nn.functional.linear`.

One decoding row reads every weight once for two operations each: the time is the weight's bytes over the bandwidth, and
a library's tiles for many rows do not reach it. For one row a program holds some rows of the weight and the whole
input; what precedes and follows in a layer costs nothing there and saves a kernel and a trip through memory:

    hidden ─ norm_linear ─▸ qkv …attention… ─ linear_add ─▸ hidden ─ norm_gate_up ─▸ gated ─ linear_add ─▸ hidden

For 2 to 16 rows the input is the narrow side of a matrix product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SKINNY_ROWS = 16
"""Rows that `linear_skinny` takes at most."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`x` [1, in] times `weight` [out, in] (contiguous), plus `bias` [out], into `out` [1, out]."""
    _launch(x, None, 0.0, weight, bias, None, out)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """As `linear` of the RMS norm of `x` times `norm` [in]. The normed row stays float32 and is never stored."""
    _launch(x, norm, eps, weight, bias, None, out)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> None:
    """`hidden` [1, out] `+= x @ weight.T (+ bias)`; the product is rounded to the dtype before it is added."""
    _launch(x, None, 0.0, weight, bias, hidden, hidden)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Tensor, out: Tensor) -> None:
    """`silu(gate) · up` of the normed `x` [1, in] into `out` [1, width]; `weight` [2·width, in], gates first."""
    _launch(x, norm, eps, weight, None, None, out, gated=True)


def _launch(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    size = x.shape[-1]
    width = out.shape[-1]
    rows, block, warps = tile_of(width, size, gated=gated)
    _row_product[(triton.cdiv(width, rows),)](
        x,
        norm,
        weight,
        bias,
        residual,
        out,
        eps,
        OUT=width,
        IN=size,
        GATED=gated,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )


def tile_of(width: int, size: int, *, gated: bool) -> tuple[int, int, int]:
    """Weight rows a program, their columns a step, and warps: enough programs for every multiprocessor, long reads."""
    block = min(triton.next_power_of_2(size), 2048 if size % 2048 == 0 else 1024)
    rows = 1 if gated or width < 8192 else 2
    return rows, block, 4


@triton.jit
def _row_product(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS outputs: products are summed lane by lane and across lanes only at the end.

    The norm's scale is one number for the whole row, so it is found along the way and applied to the sum. Weights are
    read once: they are the first to leave the L2 cache, which keeps `x` and `norm`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < OUT
    base = weight + row.to(tl.int64)[:, None] * IN
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    up_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, IN, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < IN
        mask = there[:, None] & inside[None, :]
        w = tl.load(base + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += a * a
            a *= tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        sums += w * a[None, :]
        if GATED:
            up = tl.load(base + OUT * IN + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            up_sums += up.to(tl.float32) * a[None, :]
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    y = tl.sum(sums, 1) * scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(up_sums, 1) * scale)
    if bias is not None:
        y += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        y = y.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=there)


def linear_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`x` [rows ≤ SKINNY_ROWS, in] times `weight` [out, in], plus `bias`, into `out` [rows, out]; all contiguous."""
    rows, size = x.shape
    width = out.shape[-1]
    step = 16 if width < 8192 else 32
    _skinny_product[(triton.cdiv(width, step),)](
        x,
        weight,
        bias,
        out,
        rows,
        OUT=width,
        IN=size,
        TOKENS=SKINNY_ROWS,
        ROWS=step,
        BLOCK=256,
        num_warps=4,
        num_stages=4,
    )


@triton.jit(do_not_specialize=["count"])
def _skinny_product(
    x,
    weight,
    bias,
    out,
    count,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS outputs of all tokens: weight rows are the rows of the product, tokens its columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    there = row < OUT
    base = weight + row.to(tl.int64)[:, None] * IN
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, IN, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < IN
        mask = there[:, None] & inside[None, :]
        w = tl.load(base + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        mask = (token < count)[:, None] & inside[None, :]
        a = tl.load(x + token[:, None] * IN + at[None, :], mask=mask, other=0.0)
        sums = tl.dot(w, tl.trans(a), sums)
    if bias is not None:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[:, None]
    mask = there[:, None] & (token < count)[None, :]
    tl.store(out + token[None, :] * OUT + row[:, None], sums.to(out.dtype.element_ty), mask=mask)
