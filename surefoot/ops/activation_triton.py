"""The gate of the feed-forward network on NVIDIA GPUs; the plain twin is `ops.activation`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns of a program."""


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """`silu(gate) · up` of contiguous `gate_up` [n, 2·width] into `out` [n, width]; float32 inside, rounded once."""
    rows, width = out.shape
    _silu_and_mul[(rows, triton.cdiv(width, BLOCK))](gate_up, out, WIDTH=width, BLOCK=BLOCK)


@triton.jit
def _silu_and_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + at, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + at, gate * tl.sigmoid(gate) * up, mask=inside)
