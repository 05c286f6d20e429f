"""The steps of a draw, one by one."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from surefoot.ops import sample as ops

FROZEN = [2450755712, 634408805, 864847014]
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0])


def chi_square(drawn: Counter[int], shares: list[float], draws: int) -> float:
    return sum((drawn[token] - draws * share) ** 2 / (draws * share) for token, share in enumerate(shares))


def test_draws_follow_the_softmax() -> None:
    """Over many output indices tokens come up as often as the softmax says (chi-square, 4 degrees, far tail)."""
    drawn = Counter(ops.draw(LOGITS, None, seed=5, index=index) for index in range(4000))
    assert chi_square(drawn, LOGITS.softmax(-1).tolist(), 4000) < 20


def test_draws_over_seeds_follow_the_softmax() -> None:
    """So they do over seeds at one index, as the children of one request draw."""
    drawn = Counter(ops.draw(LOGITS, None, seed=seed, index=0) for seed in range(4000))
    assert chi_square(drawn, LOGITS.softmax(-1).tolist(), 4000) < 20


def test_noise_is_a_function_of_seed_index_and_token() -> None:
    """The noise of a token does not depend on which other tokens are asked about."""
    everything = ops.gumbel(torch.arange(1000), seed=3, index=7)
    assert torch.equal(everything[[5, 999]], ops.gumbel(torch.tensor([5, 999]), seed=3, index=7))
    assert not torch.equal(everything, ops.gumbel(torch.arange(1000), seed=3, index=8))
    assert not torch.equal(everything, ops.gumbel(torch.arange(1000), seed=4, index=7))


def test_noise_is_gumbel_and_finite() -> None:
    """Mean 0.5772 and variance pi²/6 over half a million tokens, every number finite."""
    noise = ops.gumbel(torch.arange(500_000), seed=1, index=1)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_neighbouring_seeds_share_no_noise() -> None:
    """Noise of one seed and of the next, and of one index and the next, is uncorrelated."""
    ids = torch.arange(50_000)
    rows = torch.stack([ops.gumbel(ids, seed=s, index=i) for s, i in ((0, 0), (1, 0), (0, 1), (2**63, 0), (-1, 0))])
    correlations = torch.corrcoef(rows) - torch.eye(5)
    assert correlations.abs().max() < 0.02


def test_bits_are_frozen() -> None:
    """The hash is part of the interface: the same seed gives the same text in every release."""
    assert ops.splitmix64(0) == 0xE220A8397B1DCDAF
    assert ops.hash_bits(torch.tensor([0, 1, 49151]), seed=42, index=3).tolist() == FROZEN


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, None),
        ({"top_k": 1, "top_p": 1.0, "min_p": 0.0}, {0}),
        ({"top_k": 2, "top_p": 1.0, "min_p": 0.0}, {0, 1, 4}),
        ({"top_k": 9, "top_p": 1.0, "min_p": 0.0}, None),
        ({"top_k": 0, "top_p": 0.5, "min_p": 0.0}, {0}),
        ({"top_k": 0, "top_p": 0.0001, "min_p": 0.0}, {0}),
        ({"top_k": 0, "top_p": 0.9, "min_p": 0.0}, {0, 1, 4}),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.2}, {0, 1, 4}),
        ({"top_k": 0, "top_p": 1.0, "min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.1}, {0, 1}),
    ],
)
def test_candidates(settings: dict[str, float], expected: set[int] | None) -> None:
    """top_k keeps ties with the last, top_p the fewest that reach p, min_p what is near enough to the likeliest."""
    ids = ops.candidates(LOGITS, **settings)  # type: ignore[arg-type]
    assert (None if ids is None else set(ids.tolist())) == expected


def test_a_wide_nucleus_is_found_beyond_the_likely_few() -> None:
    """A flat distribution, whose nucleus is larger than the part that is looked at first, is cut at the right place."""
    ids = ops.candidates(torch.zeros(4000), top_k=0, top_p=0.5, min_p=0.0)
    assert ids is not None
    assert abs(len(ids) - 2000) <= 2


def test_penalties() -> None:
    """Repetition acts on prompt and outputs by sign, presence and frequency on outputs alone."""
    logits = LOGITS.clone()
    history = torch.tensor([0, 3, 3, 4, 4], dtype=torch.int32)
    ops.penalize_(logits, history, 2, repetition=2.0, presence=0.5, frequency=0.25)
    assert logits.tolist() == [1.0, 1.0, 0.0, -2.0, 0.5 - 0.5 - 0.5]


def test_bias_and_ban() -> None:
    """A bias is added to its token, a forbidden token gets -inf, and an id beyond the row is no error."""
    logits = LOGITS.clone()
    ops.bias_(logits, ((1, 5.0), (2, -1.0)))
    ops.forbid_(logits, (0, 77))
    assert logits.tolist() == [-math.inf, 6.0, -1.0, -1.0, 1.0]
