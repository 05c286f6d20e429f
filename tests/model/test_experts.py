"""Mixture of experts against its definition, row by row."""

from __future__ import annotations

import pytest
import torch

from surefoot.model.experts import MixtureOfExperts
from surefoot.model.layers import FeedForward
from surefoot.ops.linear import make_linear

HIDDEN, INNER, COUNT, ASKED = 32, 24, 6, 2


def random_weights() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The router [COUNT, HIDDEN], and each expert's gate above up, and down."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    experts = [tuple(torch.randn(shape, generator=generator) * 0.3 for shape in shapes) for _ in range(COUNT)]
    return torch.randn(COUNT, HIDDEN, generator=generator), experts  # type: ignore[return-value]


def mixture(*, normalize: bool) -> MixtureOfExperts:
    router, experts = random_weights()
    asked = [FeedForward(make_linear(gate_up), make_linear(down), "silu") for gate_up, down in experts]
    return MixtureOfExperts(make_linear(router), asked, ASKED, normalize)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_row_is_the_weighted_sum_of_its_experts(normalize: bool) -> None:
    """The likeliest experts answer, each weighted by its share among all, or among those asked."""
    router, experts = random_weights()
    rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros_like(rows)
    for at, row in enumerate(rows):
        shares = (router @ row).softmax(0)
        chosen = sorted(range(COUNT), key=lambda number: -shares[number])[:ASKED]
        total = shares[chosen].sum() if normalize else 1.0
        for number in chosen:
            gate, up = (experts[number][0] @ row).chunk(2)
            answer = experts[number][1] @ (gate * torch.sigmoid(gate) * up)
            expected[at] += shares[number] / total * answer
    torch.testing.assert_close(mixture(normalize=normalize)(rows), expected, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone, among others and in another order, a row gets the same bits."""
    experts = mixture(normalize=True)
    rows = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    together = experts(rows)
    assert torch.equal(torch.cat([experts(row[None]) for row in rows]), together)
    assert torch.equal(experts(rows.flip(0)).flip(0), together)
