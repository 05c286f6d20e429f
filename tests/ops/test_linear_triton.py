"""Products of one row against float64, in float32 through the interpreter."""

from __future__ import annotations

import pytest
import torch

from surefoot.ops import linear_triton
from surefoot.ops.linear_triton import linear
from tests.ops.reference import relative


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("width", "size"), [(5, 64), (48, 1300)])
def test_one_row(width: int, size: int, with_bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x·Wᵀ + b, for sizes that do and do not fill tiles; every output is written."""
    monkeypatch.setattr(linear_triton, "tile_of", lambda *_: (rows, 1024, 4))
    x, weight, bias = torch.randn(1, size), torch.randn(width, size), torch.randn(width)
    out = torch.full((1, width), torch.nan)
    linear(x, weight, bias if with_bias else None, out)
    assert relative(out, x.double() @ weight.double().T + (bias if with_bias else 0)) < 1e-6
