"""Weights of 8 bits with a scale per output channel."""

from __future__ import annotations

import pytest
import torch

from surefoot.ops import scaled_linear
from surefoot.ops.scaled_linear import Kind, ScaledLinear, quantize

BOTH: tuple[Kind, ...] = ("int8", "fp8")
STEP = {"int8": 0.5, "fp8": 16.0}
"""Half of the largest step between codes, of which the largest is 127, or 448."""


def weight_of(out: int, size: int) -> torch.Tensor:
    weight = torch.randn(out, size, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] *= 1e-3
    return weight


@pytest.mark.parametrize("kind", BOTH)
def test_codes_stay_within_half_a_step(kind: Kind) -> None:
    """No weight moves by more than half a step of its own channel's codes, small channels and zeros included."""
    weight = weight_of(64, 48)
    codes, scales = quantize(weight, kind)
    error = (codes.float() * scales[:, None] - weight).abs()
    assert codes.element_size() == 1
    assert (error <= 1.001 * STEP[kind] * scales[:, None]).all()
    largest = codes.float().abs().amax(1)
    assert (largest[weight.abs().amax(1) > 0] == {"int8": 127, "fp8": 448}[kind]).all()


@pytest.mark.parametrize("kind", BOTH)
def test_slices_make_no_difference(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many channels are unpacked at a time, codes and scales are the same, and each channel's product."""
    weight, bias, x = weight_of(50, 32), torch.randn(50), torch.randn(7, 32)
    whole = ScaledLinear(weight, bias, kind=kind)
    monkeypatch.setattr(scaled_linear, "SLICE", 3 * 32 * 4)
    sliced = ScaledLinear(weight, bias, kind=kind)
    assert torch.equal(whole.codes.float(), sliced.codes.float())
    assert torch.equal(whole.scales, sliced.scales)
    exact = x @ (whole.codes.float() * whole.scales[:, None]).t() + bias
    torch.testing.assert_close(whole(x), exact)
    torch.testing.assert_close(sliced(x), exact)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.012), ("fp8", 0.04)])
def test_a_product_is_close_to_the_unquantized_one(kind: Kind, most: float) -> None:
    """About a percent for int8, which has finer steps for a whole channel than fp8."""
    weight, x = weight_of(96, 256), torch.randn(20, 256)
    exact = x @ weight.t()
    out = torch.empty(20, 96)
    assert ScaledLinear(weight, kind=kind)(x, out) is out
    assert (out - exact).norm() < most * exact.norm()
