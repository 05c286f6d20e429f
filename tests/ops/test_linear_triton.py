"""Products of few rows against float64, in float32 through the interpreter."""

from __future__ import annotations

import pytest
import torch

from surefoot.ops import linear_triton
from surefoot.ops.linear_triton import linear, linear_add, linear_skinny, norm_gate_up, norm_linear
from tests.ops.reference import relative, rms, swiglu

EPS = 1e-5
SHAPES = [(5, 64), (48, 1300)]


def case(width: int, size: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out = torch.full((rows, width), torch.nan)
    return torch.randn(rows, size), torch.randn(width, size), torch.randn(width), out


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("width", "size"), SHAPES)
def test_one_row(width: int, size: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x·Wᵀ + b, with and without the norm in front, for sizes that do and do not fill tiles."""
    monkeypatch.setattr(linear_triton, "tile_of", lambda *_, **__: (rows, 1024, 4))
    x, weight, bias, out = case(width, size)
    linear(x, weight, bias, out)
    assert relative(out, x.double() @ weight.double().T + bias) < 1e-6
    norm = torch.randn(size)
    out.fill_(torch.nan)
    norm_linear(x, norm, EPS, weight, None, out)
    assert relative(out, rms(x, norm, EPS) @ weight.double().T) < 1e-6


def test_residual_is_added_in_place() -> None:
    """`hidden` gains the product."""
    x, weight, bias, hidden = case(48, 1300)
    hidden.normal_()
    expected = hidden.double() + x.double() @ weight.double().T + bias
    linear_add(x, weight, bias, hidden)
    assert relative(hidden, expected) < 1e-6


@pytest.mark.parametrize(("width", "size"), [(24, 64), (65, 1300)])
def test_gate_and_up_in_one(width: int, size: int) -> None:
    """Row i of the gates meets row i of the ups."""
    x, norm, out = torch.randn(1, size), torch.randn(size), torch.full((1, width), torch.nan)
    weight = torch.randn(2 * width, size) / size**0.5  # gates of a size whose exponential is a float32
    norm_gate_up(x, norm, EPS, weight, out)
    assert relative(out, swiglu(rms(x, norm, EPS) @ weight.double().T)) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("width", "size"), [*SHAPES, (8193, 96)])
def test_few_rows(width: int, size: int, rows: int) -> None:
    """Up to sixteen rows, each with its own result."""
    x, weight, bias, out = case(width, size, rows)
    linear_skinny(x, weight, bias, out)
    assert relative(out, x.double() @ weight.double().T + bias) < 1e-6
