"""Drawing kernels against their plain twin, in float32 through the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.ops import sample as plain
from surefoot.ops.sample_triton import Drawn, Rows, draw

TOKENS = 9000
PADDED = 9008
CPU = torch.device("cpu")


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def logits_of(rows: int) -> Tensor:
    """Random rows whose padding would win if it were looked at."""
    logits = torch.randn(rows, PADDED) * 3
    logits[:, TOKENS:] = 100
    return logits


def run(logits: Tensor, rows: Rows, *, limited: bool = False) -> tuple[Drawn, Tensor]:
    drawn = Drawn.allocate(logits.shape[0], TOKENS, CPU)
    drawn.scores.fill_(torch.nan)
    drawn.ids.fill_(-5)
    drawn.token.fill_(-7)
    drawn.logprob.fill_(torch.nan)
    pool = torch.full((4, 50), -9, dtype=torch.int32)
    draw(logits, TOKENS, rows, drawn, pool, limited=limited)
    return drawn, pool


def test_greedy_is_argmax_with_logprob() -> None:
    """The likeliest token below the padding, the lowest of equals, with its log-probability."""
    logits = logits_of(3)
    logits[0, [8000, 17, 4500]] = 50
    drawn, _ = run(logits, Rows.allocate(3, CPU))
    expected = logits[:, :TOKENS].argmax(-1)
    assert drawn.token.tolist() == [17, *expected[1:].tolist()]
    logprobs = logits[:, :TOKENS].log_softmax(-1).gather(1, drawn.token[:, None].long()).squeeze(1)
    torch.testing.assert_close(drawn.logprob, logprobs, rtol=1e-5, atol=1e-5)
    assert drawn.finite.tolist() == [1, 1, 1]


@pytest.mark.parametrize("seed", [0, 1, 12345, (1 << 64) - 1, 1 << 63])
def test_draws_as_the_twin_draws(seed: int) -> None:
    """The same seed and index give the token that plain sampling gives, row by row."""
    rows = Rows.allocate(3, CPU)
    rows.temperature.copy_(torch.tensor([1.0, 0.5, 3.0]))
    rows.seed.fill_(signed(seed))
    rows.index.copy_(torch.tensor([0, 1, 1000]))
    logits = logits_of(3)
    drawn, _ = run(logits, rows)
    scaled = logits[:, :TOKENS] / rows.temperature[:, None]
    expected = [plain.draw(row, None, seed=seed, index=int(at)) for row, at in zip(scaled, rows.index, strict=True)]
    assert drawn.token.tolist() == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.0, 0.0), (0, 1.0, 0.05), (30, 0.8, 0.02)],
)
def test_candidates_are_the_twins(top_k: int, top_p: float, min_p: float) -> None:
    """The threshold lets through exactly the tokens that plain sampling keeps, and the draw is among them."""
    rows = Rows.allocate(2, CPU)
    rows.temperature.copy_(torch.tensor([0.7, 1.3]))
    rows.top_k.fill_(top_k)
    rows.top_p.fill_(top_p)
    rows.min_p.fill_(min_p)
    rows.seed.copy_(torch.tensor([4, 5]))
    logits = logits_of(2)
    drawn, _ = run(logits, rows, limited=True)
    for row in range(2):
        scaled = logits[row, :TOKENS] / rows.temperature[row]
        ids = plain.candidates(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        kept = torch.nonzero(scaled >= drawn.threshold[row]).squeeze(-1)
        assert kept.tolist() == (list(range(TOKENS)) if ids is None else sorted(ids.tolist()))
        assert int(drawn.token[row]) == plain.draw(scaled, ids, seed=row + 4, index=0)


def test_forbidden_tokens_and_broken_rows() -> None:
    """-inf is never drawn; a row with NaN or +inf is reported and leaves its neighbours alone."""
    logits = logits_of(4)
    logits[0, :5000] = -math.inf
    logits[1, 77] = math.nan
    logits[2, 8999] = math.inf
    rows = Rows.allocate(4, CPU)
    rows.temperature.fill_(1.0)
    drawn, _ = run(logits, rows)
    assert drawn.finite.tolist() == [1, 0, 0, 1]
    assert int(drawn.token[0]) >= 5000
    assert bool(((drawn.token >= 0) & (drawn.token < TOKENS)).all())


def test_tokens_reach_the_pool() -> None:
    """A drawn token is written at its slot and position and nowhere else."""
    rows = Rows.allocate(3, CPU)
    rows.slot.copy_(torch.tensor([2, -1, 0]))
    rows.position.copy_(torch.tensor([49, 3, 1]))
    drawn, pool = run(logits_of(3), rows)
    expected = torch.full_like(pool, -9)
    expected[2, 49], expected[0, 1] = drawn.token[0], drawn.token[2]
    assert torch.equal(pool, expected)
