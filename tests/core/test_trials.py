"""Randomized trials of the real engine: every culprit isolated, no innocent failed, no block lost."""

from __future__ import annotations

import pytest

from tests.core.trials import Trial

TRIALS = 2000
SHARES = 8


@pytest.mark.parametrize("share", range(SHARES))
def test_trials(share: int) -> None:
    """Under random load and trouble, texts are exact, blocks add up after each step, and only culprits fail."""
    for seed in range(share, TRIALS, SHARES):
        try:
            Trial(seed).run()
        except AssertionError as error:
            raise AssertionError(f"trial {seed}: {error}") from error
