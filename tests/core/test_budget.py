"""The token budget learns from what ran out of memory, and does not oscillate."""

from __future__ import annotations

from surefoot.core.budget import LAST_BACKOFF, TokenBudget


def test_a_failure_halves_down_to_the_floor() -> None:
    """Each failure halves the size that failed; one block always remains."""
    budget = TokenBudget(512, 16)
    sizes = []
    for size in (512, 256, 128, 64, 32, 16):
        budget.failed(size, now=0.0, free=100, needed=50)
        sizes.append(budget.tokens)
    assert sizes == [256, 128, 64, 32, 16, 16]


def test_it_stays_down_while_memory_is_as_short_as_it_was() -> None:
    """Neither success at the smaller size nor a little memory raises the budget before the back-off has passed."""
    budget = TokenBudget(512, 16)
    budget.failed(512, now=0.0, free=100, needed=50)
    for moment in (0.1, 0.5, 0.9):
        budget.committed(256, now=moment)
        budget.grow(now=moment, free=149)
    assert budget.tokens == 256


def test_it_grows_at_once_when_the_missing_memory_is_there() -> None:
    """Free memory that has grown by what was needed lifts the limit before any time has passed."""
    budget = TokenBudget(512, 16)
    budget.failed(512, now=0.0, free=100, needed=50)
    budget.grow(now=0.01, free=150)
    assert budget.tokens == 512


def test_the_back_off_doubles_with_each_failure_up_to_a_minute() -> None:
    """A size that goes on failing is tried ever more rarely: 1, 2, 4 … 60 seconds apart."""
    budget, now, waits = TokenBudget(512, 16), 0.0, []
    for _ in range(9):
        budget.failed(512, now=now, free=100, needed=50)
        start = now
        while budget.tokens < 512:
            now += 0.5
            budget.grow(now=now, free=100)
        waits.append(now - start)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert LAST_BACKOFF == 60


def test_a_step_that_proves_the_new_size_lets_it_grow_on() -> None:
    """After one good step at the doubled size the next doubling does not wait for another back-off."""
    budget = TokenBudget(512, 16)
    for size in (512, 256, 128):
        budget.failed(size, now=0.0, free=None, needed=None)
    budget.grow(now=10.0, free=0)
    assert budget.tokens == 128
    budget.committed(128, now=10.1)
    budget.grow(now=10.1, free=0)
    assert budget.tokens == 256


def test_forget_restores_the_full_size() -> None:
    """When the culprit has failed alone, its lesson is void."""
    budget = TokenBudget(512, 16)
    budget.failed(512, now=0.0, free=None, needed=None)
    budget.forget()
    assert budget.tokens == 512
