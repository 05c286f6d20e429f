"""The executor, driven by hand-made plans: exact, and the same whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from surefoot.types import FailureKind, Sample, SamplingParams, StepDone, StepFailed, StepPlan

if TYPE_CHECKING:
    from tests.device.driver import Driver

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 300, 511)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 320), k=length)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunking_changes_no_bit(tiny: Driver, chunk: int) -> None:
    """A prompt cut anywhere yields bit for bit the log-probabilities of the whole one."""
    whole = tiny.sequence(prompt(300))
    cut = tiny.sequence(prompt(300))
    assert tiny.generate([whole], 4) == tiny.generate([cut], 4, chunk)


def test_only_what_is_sampled_meets_the_output_projection(tiny: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a prompt, the logits of its steps have no row for tokens that are not sampled."""
    runner, rows = tiny.device.executor.runner, []  # type: ignore[attr-defined]
    project = runner.network.logits
    monkeypatch.setattr(runner.network, "logits", lambda hidden: rows.append(len(hidden)) or project(hidden))
    tiny.generate([tiny.sequence(prompt(511)), tiny.sequence(prompt(300))], 3, 100)
    assert rows
    assert max(rows) <= 2


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


@pytest.mark.parametrize("fault", ["row:nan:step=3"])
def test_a_nan_row_fails_alone_and_leaves_zeros(open_tiny: Callable[..., Driver], fault: str) -> None:
    """A row that computes NaN says so; its neighbours keep their bits, and its blocks hold zeros afterwards."""
    healthy = open_tiny()
    expected = healthy.generate([healthy.sequence(prompt(50, 1))], 4)[0]
    driver = open_tiny(allow_fault_injection=True, faults=fault)
    bad, good = driver.sequence(prompt(50)), driver.sequence(prompt(50, 1))
    driver.step([bad, good])
    driver.step([bad, good])
    outcome = driver.run(driver.work(bad), driver.work(good, request=1))
    assert isinstance(outcome, StepDone)
    assert outcome.rows[0].samples == ()
    assert "positions 51 to 51" in str(outcome.rows[0].error)
    assert outcome.rows[1].samples == (expected[2],)
    cache = driver.device.executor.runner.cache.data
    assert not cache[bad.blocks[51 // 16]].any()
    assert cache.isfinite().all()
    reuser = driver.sequence(prompt(50, 1))
    reuser.blocks = bad.blocks
    assert driver.generate([reuser], 4)[0] == expected


def test_a_control_step_succeeds_and_touches_no_block_of_a_sequence(tiny: Driver) -> None:
    """A control step runs the same code on the sink block alone."""
    cache = tiny.device.executor.runner.cache
    before = cache.data[: cache.num_blocks].clone()
    outcome = tiny.run(control=True)
    assert isinstance(outcome, StepDone)
    assert outcome.rows == ()
    assert torch.equal(cache.data[: cache.num_blocks], before)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("execute:oom:step=2", FailureKind.OOM), ("execute:raise:step=2", FailureKind.FAULT)],
)
def test_an_injected_failure_is_an_outcome_and_the_next_step_runs(
    open_tiny: Callable[..., Driver], fault: str, kind: FailureKind
) -> None:
    """A failed step comes back as a value of its kind; the same work then yields what it would have yielded."""
    driver = open_tiny(allow_fault_injection=True, faults=fault)
    sequence = driver.sequence(prompt(40))
    driver.step([sequence])
    outcome = driver.run(driver.work(sequence))
    assert isinstance(outcome, StepFailed)
    assert outcome.kind is kind
    assert "injected" in outcome.reason
    healthy = open_tiny()
    assert driver.generate([sequence], 4) == healthy.generate([healthy.sequence(prompt(40))], 4)


def test_faults_need_permission(open_tiny: Callable[..., Driver]) -> None:
    """Without allow_fault_injection the rules are not obeyed."""
    driver = open_tiny(faults="execute:oom:p=1")
    assert isinstance(driver.run(control=True), StepDone)


def test_a_step_predicted_not_to_fit_is_not_tried(tiny: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that needs more than is free fails at once with both numbers; a control step is tried all the same."""
    monkeypatch.setattr("surefoot.device.memory.free_memory", lambda **_: 1000)
    outcome = tiny.run(tiny.work(tiny.sequence(prompt(40))))
    assert isinstance(outcome, StepFailed)
    assert outcome.kind is FailureKind.OOM
    assert outcome.free == 1000
    assert outcome.needed is not None
    assert outcome.needed > 1000
    assert isinstance(tiny.run(control=True), StepDone)


def test_a_fork_draws_a_token_per_child_and_goes_on_from_copied_blocks(tiny: Driver) -> None:
    """Several samples of one row equal what sequences with those seeds draw; a child goes on from a block's copy."""
    params = SamplingParams(temperature=1.0, n=2)
    parent = tiny.sequence(prompt(40), params=params, seed=1)
    alone = [tiny.sequence(prompt(40), params=params, seed=seed) for seed in (1, 2)]
    expected = tiny.generate(alone, 3)
    work = tiny.work(parent)
    fork = type(work)(
        **{name: getattr(work, name) for name in work.__struct_fields__}
        | {"samples": (Sample(0, 1, 0), Sample(1, 2, 0))}
    )
    outcome = tiny.run(fork)
    assert isinstance(outcome, StepDone)
    drawn = outcome.rows[0].samples
    assert list(drawn) == [expected[0][0], expected[1][0]]
    child = tiny.sequence([*prompt(40), drawn[1].token], params=params, seed=2)
    own = child.blocks
    child.blocks = [*parent.blocks[:2], *own[2:]]
    child.computed, child.outputs = 40, [drawn[1]]
    outcome = tiny.run(tiny.work(child), copies=((parent.blocks[2], own[2]),))
    assert isinstance(outcome, StepDone)
    assert outcome.rows[0].samples == (expected[1][1],)


def test_a_pending_input_is_what_the_plan_before_drew(tiny: Driver) -> None:
    """An input given as PENDING is read from the token pool, at the position where the last draw was put."""
    sequence = tiny.sequence(prompt(40))
    expected = tiny.generate([tiny.sequence(prompt(40))], 2)[0]
    tiny.step([sequence])
    sequence.tokens[-1] = -1
    outcome = tiny.run(tiny.work(sequence))
    assert isinstance(outcome, StepDone)
    assert outcome.rows[0].samples == (expected[1],)


def test_tickets_are_collected_in_order(tiny: Driver) -> None:
    """Collecting another plan than the oldest in flight is a caller's mistake and says so."""
    executor = tiny.device.executor
    first, second = (executor.launch(StepPlan(id=number, works=(), control=True)) for number in (9001, 9002))
    with pytest.raises(ValueError, match="9002"):
        executor.collect(second)
    assert executor.collect(first).plan == 9001
    assert executor.collect(second).plan == 9002
    with pytest.raises(ValueError, match="9002"):
        executor.collect(second)
