"""Linear layers whose weights are held in 8 bits, with one scale per output channel; for GPUs.

Few rows are bound by reading weights: a kernel multiplies them with the codes as they are and scales the sums. Many
rows are bound by arithmetic: some output channels at a time get their 16 bits back, and go through the library.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 64
"""The kernel takes this many rows at most."""
SLICE = 64 << 20
"""Bytes of the weights that are unpacked at a time."""
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
Kind = Literal["int8", "fp8"]


class ScaledLinear:
    """`x` [n, in] times codes · scales, plus bias; a `linear.Linear`. Accumulates in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, kind: Kind) -> None:
        self.codes, self.scales = quantize(weight, kind)
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(x.shape[0], self.codes.shape[0]) if out is None else out
        if x.is_cuda and x.shape[0] <= FEW_ROWS:
            from surefoot.ops.scaled_linear_triton import scaled_linear

            scaled_linear(x, self.codes, self.scales, self.bias, out)
        else:
            unpacked_linear(x, self.codes, self.scales, self.bias, out)
        return out


def unpacked_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The product in slices of output channels, into `out` [n, out]; also the kernel's plain twin."""
    step = max(1, SLICE // (codes.shape[1] * x.element_size()))
    for begin in range(0, codes.shape[0], step):
        part = slice(begin, begin + step)
        weight = codes[part].to(x.dtype).mul_(scales[part, None].to(x.dtype))
        out[:, part] = F.linear(x, weight, None if bias is None else bias[part])


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Round [out, in] to 8 bits: weight ≈ codes · scales[:, None], scales [out] float32. A slice at a time."""
    codes = torch.empty(weight.shape, dtype=_DTYPES[kind], device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, SLICE // (weight.shape[1] * 4))
    for begin in range(0, weight.shape[0], step):
        part = slice(begin, begin + step)
        exact = weight[part].float()
        tiny = torch.finfo(torch.float32).tiny
        scales[part] = exact.abs().amax(1).div_(_LARGEST[kind]).clamp_min_(tiny)
        exact = exact / scales[part, None]  # not in place: a float32 weight is the caller's
        codes[part] = (exact.round_() if kind == "int8" else exact).to(codes.dtype)
    return codes, scales
