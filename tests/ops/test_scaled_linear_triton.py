"""Products with weights of 8 bits against their plain twin, in float32 through the interpreter."""

from __future__ import annotations

import pytest
import torch

from surefoot.ops.scaled_linear import Kind, quantize, unpacked_linear
from surefoot.ops.scaled_linear_triton import scaled_linear
from tests.ops.reference import relative


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 40, 64), (5, 33, 300), (17, 64, 272), (64, 16, 48)])
def test_few_rows(rows: int, width: int, size: int, with_bias: bool, kind: Kind) -> None:
    """x·(codes·scales)ᵀ + b, for sizes that do and do not fill tiles; every output is written, and nothing else."""
    x, weight = torch.randn(rows, size), torch.randn(width, size)
    bias = torch.randn(width) if with_bias else None
    codes, scales = quantize(weight, kind)
    out, expected = torch.full((rows + 1, width), torch.nan), torch.empty(rows, width)
    scaled_linear(x, codes, scales, bias, out[:rows])
    unpacked_linear(x, codes, scales, bias, expected)
    assert relative(out[:rows], expected) < 1e-6
    assert out[rows:].isnan().all()
