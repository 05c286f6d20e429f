"""Linear layers: right, and row by row the same."""

from __future__ import annotations

import pytest
import torch

from surefoot.ops.linear import (
    INT8_MAX_ROWS,
    Int8Linear,
    PackedLinear,
    PlainLinear,
    few_sizes,
    make_linear,
    quantize_int8,
)


@pytest.mark.parametrize("shape", [(96, 48), (48, 112), (960, 576)])
def test_packed_rows_do_not_depend_on_their_neighbours(shape: tuple[int, int]) -> None:
    """A row alone, and the same row in any batch, have the same bits; and they are the product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    x = torch.randn(300, shape[1], generator=generator)
    linear = PackedLinear(weight, bias)
    together = linear(x)
    torch.testing.assert_close(together, PlainLinear(weight, bias)(x), rtol=1e-4, atol=1e-3)
    for rows in (1, 2, 3, 5, 8, 17, 64, 100, 255):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[300 - rows :]), together[300 - rows :])


def test_int8_codes_stay_within_half_a_step() -> None:
    """Rounding moves no weight by more than half of its channel's scale, a zero row included."""
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    codes, scales = quantize_int8(weight)
    assert codes.abs().max() <= 127
    error = (codes.float() * scales.float()[:, None] - weight).abs()
    assert (error <= 0.5001 * scales.float()[:, None]).all()


def test_int8_is_close_for_few_rows_and_for_many() -> None:
    """Both paths of an int8 layer agree with the float32 product within about a percent."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 64, generator=generator), torch.randn(96, generator=generator)
    linear = Int8Linear(weight, bias)
    for rows in (1, INT8_MAX_ROWS, INT8_MAX_ROWS + 1, 64):
        x = torch.randn(rows, 64, generator=generator)
        exact = PlainLinear(weight, bias)(x)
        assert ((linear(x) - exact).norm() / exact.norm()).item() < 0.015


def test_the_layer_fits_the_dtype() -> None:
    """float32 on CPU is packed or int8, anything else torch's own."""
    weight = torch.randn(16, 16)
    assert isinstance(make_linear(weight), PackedLinear)
    assert isinstance(make_linear(weight, quantization="int8"), Int8Linear)
    assert isinstance(make_linear(weight.bfloat16()), PlainLinear)


def test_few_numbers_of_rows_are_ever_met() -> None:
    """Rows are rounded up to one of 26 numbers up to 2,048, by half at most; those numbers stay what they are."""
    sizes = {rows: few_sizes(rows) for rows in range(1, 2049)}
    assert len(set(sizes.values())) == 26
    assert all(rows <= size and few_sizes(size) == size for rows, size in sizes.items())
    assert all(size <= 1.5 * rows for rows, size in sizes.items())
    assert few_sizes(0) == 0


@pytest.mark.parametrize("rows", [5, 7, 9, 17, 33, 65, 100])
def test_rounding_up_changes_no_row(rows: int) -> None:
    """A number of rows that is rounded up gives each row what it gives alone, and no more rows."""
    layer = PackedLinear(torch.randn(48, 96), torch.randn(48))
    x = torch.randn(rows, 96)
    out = layer(x)
    assert out.shape == (rows, 48)
    assert all(torch.equal(out[row : row + 1], layer(x[row : row + 1])) for row in range(rows))
