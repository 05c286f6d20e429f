"""Linear layers whose rows do not depend on their neighbours.

On CPU a float32 weight is repacked once into oneDNN's blocked layout. That product is the fastest float path there and
bitwise the same for a row alone and inside any batch, which `torch.nn.functional.linear` is not.

On CPU, int8 weights (symmetric, one scale per output channel) take the int8 kernel for the few rows of a decode step,
which are bound by reading weights; more rows are bound by arithmetic and take the float32 copy of the same rounded
weights. What a GPU does with 8 bits is in `scaled_linear`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.scaled_linear import ScaledLinear

INT8_MAX_ROWS = 12
"""Above this many rows the prepacked float32 product is faster than the int8 kernel (measured with AVX2)."""


class Linear(Protocol):
    """`x` [n, in] → [n, out], written to `out` if given."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class PlainLinear:
    """torch's own product: any device, any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _into(out, F.linear(x, self.weight, self.bias))


class CudaLinear:
    """cuBLAS for many rows; for one, a kernel that reads the weight at the card's bandwidth, as cuBLAS does not."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        from surefoot.ops.linear_triton import linear

        self.weight = weight.contiguous()
        self.bias = bias
        self._one_row = linear

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[0] == 1 and x.dtype != torch.float32:
            out = x.new_empty(1, self.weight.shape[0]) if out is None else out
            self._one_row(x, self.weight, self.bias, out)
            return out
        if out is None:
            return F.linear(x, self.weight, self.bias)
        return (
            torch.addmm(self.bias, x, self.weight.t(), out=out)
            if self.bias is not None
            else torch.mm(x, self.weight.t(), out=out)
        )


def few_sizes(rows: int) -> int:
    """`rows` rounded up to one of few numbers: 1, 2, 3, 4, 6, 8, 12, … 64, 96, 128, 192, … 512, 768, …

    oneDNN makes, and keeps, code and scratch memory for each number of rows it meets. With few of them nearly all are
    there before memory is short, and those of the smallest steps are never dropped for others.
    """
    if rows > 64:
        step = 32 if rows <= 128 else 64 if rows <= 512 else 256
        return -(-rows // step) * step
    if rows < 4:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


class PackedLinear:
    """float32 on CPU, in oneDNN's blocked layout; row-invariant."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if (size := few_sizes(rows)) != rows:
            x = F.pad(x, (0, 0, 0, size - rows))
        product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return _into(out, product[:rows])


class Int8Linear:
    """int8 weights for a few rows, their float32 value for many; CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.codes, self.scales = quantize_int8(weight)
        self.many = PackedLinear(self.codes.float() * self.scales.float()[:, None], bias)
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[0] > INT8_MAX_ROWS:
            return self.many(x, out)
        product = torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.scales).float()
        return _into(out, product if self.bias is None else product.add_(self.bias))


def _into(out: Tensor | None, product: Tensor) -> Tensor:
    return product if out is None else out.copy_(product)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [out, in] to int8 with one scale per output: weight ≈ codes · scales[:, None], codes in -127 … 127.

    The kernel is fast only where scales and activations are bfloat16, so the scales are such numbers from the start,
    rounded up: the largest weight of a channel is never cut.
    """
    exact = (weight.abs().amax(dim=1) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    near = exact.bfloat16()
    scales = torch.where(near.float() < exact, torch.nextafter(near, torch.full_like(near, torch.inf)), near)
    codes = (weight / scales.float()[:, None]).round_().to(torch.int8)
    return codes, scales


def make_linear(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """The fastest layer for this weight's device and dtype; `quantization` is none, int8, or on a GPU fp8."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return Int8Linear(weight, bias) if quantization == "int8" else PackedLinear(weight, bias)
    if weight.is_cuda and quantization in ("int8", "fp8"):
        return ScaledLinear(weight, bias, kind="int8" if quantization == "int8" else "fp8")
    if weight.is_cuda:
        return CudaLinear(weight, bias)
    return PlainLinear(weight, bias)
