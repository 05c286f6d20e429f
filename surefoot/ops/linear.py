"""Linear layers whose rows do not depend on their neighbours.

On CPU a float32 weight is repacked once into oneDNN's blocked layout. That product is the fastest float path there and
bitwise the same for a row alone and inside any batch, which `torch.nn.functional.linear` is not.

With int8 weights (symmetric, one scale per output channel) the few rows of a decode step are bound by reading weights
and take the int8 kernel; more rows are bound by arithmetic and take the float32 copy of the same rounded weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

INT8_MAX_ROWS = 12
"""Above this many rows the prepacked float32 product is faster than the int8 kernel (measured with AVX2)."""


class Linear(Protocol):
    """`x` [n, in] → [n, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """torch's own product: any device, any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """float32 on CPU, in oneDNN's blocked layout; row-invariant."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


class Int8Linear:
    """int8 weights for a few rows, their float32 value for many; CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.codes, self.scales = quantize_int8(weight)
        self.many = PackedLinear(self.codes.float() * self.scales.float()[:, None], bias)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT8_MAX_ROWS:
            return self.many(x)
        out = torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.scales).float()
        return out if self.bias is None else out.add_(self.bias)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [out, in] to int8 with one scale per output: weight ≈ codes · scales[:, None], codes in -127 … 127.

    The kernel is fast only where scales and activations are bfloat16, so the scales are such numbers from the start.
    """
    scales = (weight.abs().amax(dim=1) / 127).clamp_min_(torch.finfo(torch.float32).tiny).bfloat16()
    codes = (weight / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales


def make_linear(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """The fastest layer for this weight's device and dtype; `quantization` is none or int8 (CPU only)."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return Int8Linear(weight, bias) if quantization == "int8" else PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
