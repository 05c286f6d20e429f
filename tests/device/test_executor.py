"""The executor, driven by hand-made plans: exact, and the same whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from surefoot.types import FailureKind, Sample, SamplingParams, StepDone, StepFailed, StepPlan

if TYPE_CHECKING:
    from tests.device.conftest import Driver

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 300, 511)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 320), k=length)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunking_changes_no_bit(tiny: Driver, chunk: int) -> None:
    """A prompt cut anywhere yields bit for bit the log-probabilities of the whole one."""
    whole = tiny.sequence(prompt(300))
    cut = tiny.sequence(prompt(300))
    assert tiny.generate([whole], 4) == tiny.generate([cut], 4, chunk)


def test_batching_changes_no_bit(tiny: Driver) -> None:
    """Sequences of every length, alone and all together, yield the same bits."""
    lengths = LENGTHS
    alone = [tiny.generate([tiny.sequence(prompt(length))], 6)[0] for length in lengths]
    together = tiny.generate([tiny.sequence(prompt(length)) for length in lengths], 6)
    assert together == alone


def test_prompts_beside_decoding_rows_change_no_bit(tiny: Driver) -> None:
    """Chunks of a prompt and decoding rows in one step leave both as they are alone."""
    alone = tiny.generate([tiny.sequence(prompt(40))], 12)[0]
    long = tiny.generate([tiny.sequence(prompt(400))], 2)[0]
    first, second = tiny.sequence(prompt(40)), tiny.sequence(prompt(400))
    tiny.step([first])
    while len(first.outputs) < 12 or len(second.outputs) < 2:
        tiny.step([each for each, count in ((first, 12), (second, 2)) if len(each.outputs) < count], 48)
    assert first.outputs == alone
    assert second.outputs == long


def test_recomputing_after_preemption_changes_no_bit(tiny: Driver) -> None:
    """A sequence thrown out and computed again from its tokens, on other blocks and another slot, goes on the same."""
    params = SamplingParams(temperature=0.9, top_p=0.9, logprobs=1)
    whole = tiny.generate([tiny.sequence(prompt(50), params=params, seed=11)], 12)[0]
    first = tiny.sequence(prompt(50), params=params, seed=11)
    tiny.generate([first], 5)
    again = tiny.sequence(first.tokens, params=params, seed=11)
    again.outputs = first.outputs
    tiny.generate([again], 12, 16)
    assert again.outputs == whole
