"""The engine over a FakeExecutor: who gets which tokens, who fails, and what it costs the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec
import pytest

from surefoot.core.engine import DeviceLost, Engine
from surefoot.core.sequence import child_seed
from surefoot.testing import FakeExecutor, expected_tokens, out_of_memory, request_of
from surefoot.types import Emitted, Failed, FailureKind, Limits, StepFailed, StepPlan, StepTime, Work

LIMITS = Limits(
    max_model_len=8192, max_num_batched_tokens=512, max_num_seqs=16, block_size=16, num_blocks=2000, eos_token_ids=(7,)
)


class Bench:
    """An engine, its fake executor and a clock; `run` steps until nothing is left to do."""

    def __init__(self, limits: Limits = LIMITS, **changes: object) -> None:
        self.limits = msgspec.structs.replace(limits, **changes)
        self.executor = FakeExecutor(self.limits)
        self.engine = Engine(self.executor, self.limits)
        self.now = 0.0
        self.texts: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finish: dict[tuple[int, int], str] = {}
        self.failed: dict[int, Failed] = {}

    def add(self, id: int, length: int, **params: object) -> None:
        self.engine.add(request_of(id, [(id * 31 + i) % 997 for i in range(length)], **params), self.now)

    def step(self) -> list[Emitted | Failed]:
        self.now = max(self.now + 0.01, self.engine.idle_until(self.now) or 0.0)
        events = self.engine.step(self.now)
        assert self.engine.faults() == []
        for event in events:
            if isinstance(event, Failed):
                self.failed[event.request] = event
            else:
                self.texts[event.request, event.child].append(event.sampled.token)
                if event.finish:
                    self.finish[event.request, event.child] = event.finish
        return events

    def run(self, most: int = 5000) -> int:
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < most, "no end"
        return steps

    def expected(self, id: int, length: int, count: int, child: int = 0) -> list[int]:
        prompt = [(id * 31 + i) % 997 for i in range(length)]
        return expected_tokens(prompt, child_seed(id, child), count, self.executor.vocabulary)


def when(condition: Callable[[StepPlan], bool]) -> Callable[[StepPlan], StepFailed | None]:
    return lambda plan: out_of_memory(plan, needed=3 << 30, free=1 << 30) if condition(plan) else None


def holds(request: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(work.request == request for work in plan.works)


def decoded(plans: Iterable[StepPlan], request: int) -> list[int]:
    """Indices of the plans that gave this request a token."""
    return [i for i, plan in enumerate(plans) if any(w.request == request and w.samples for w in plan.works)]


def gaps(indices: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(indices)]


def test_a_request_is_served() -> None:
    """A prompt longer than a step is computed in chunks, and its tokens come out in order up to max_tokens."""
    bench = Bench()
    bench.add(1, 1300, max_tokens=5)
    bench.run()
    assert bench.texts[1, 0] == bench.expected(1, 1300, 5)
    assert bench.finish == {(1, 0): "length"}
    assert [plan.tokens for plan in bench.executor.plans] == [512, 512, 276, 1, 1, 1, 1]


def test_a_long_prompt_delays_no_decoder_by_more_than_a_step() -> None:
    """While a 4,000-token prompt is computed, four decoders get a token in every step."""
    bench = Bench()
    for id in range(4):
        bench.add(id, 20, max_tokens=100)
    bench.step()
    bench.add(9, 4000, max_tokens=2)
    bench.run()
    for id in range(4):
        served = decoded(bench.executor.plans, id)
        assert served == list(range(served[0], served[0] + 100))


def test_steps_are_sized_by_time_while_others_wait() -> None:
    """A long prompt is cut into steps of at most 100 ms beside a decoder, ever smaller ones, and not at all alone."""
    time = StepTime(fixed=0.005, token=1e-4, pair=1e-8)
    bench = Bench(step_time=time, max_step_seconds=0.1, max_num_batched_tokens=4096)
    bench.add(1, 10, max_tokens=60)
    bench.step()
    bench.add(9, 8000, max_tokens=1)
    bench.run()
    beside = [w for plan in bench.executor.plans if len(plan.works) == 2 for w in plan.works if w.request == 9]
    seconds = [time.fixed + time.seconds(len(work.tokens), work.start) for work in beside]
    assert max(seconds) < 0.101
    assert len(beside[0].tokens) > len(beside[-2].tokens) > 16
    bench = Bench(step_time=time, max_step_seconds=0.1, max_num_batched_tokens=4096)
    bench.add(9, 8000, max_tokens=1)
    bench.run()
    assert [plan.tokens for plan in bench.executor.plans] == [4096, 3904]


def test_decoders_never_starve_a_prefill() -> None:
    """With more decoders than the budget, a prefill still gets tokens in each step, and decoders take turns."""
    bench = Bench(max_num_batched_tokens=32, max_num_seqs=64)
    for id in range(40):
        bench.add(id, 4, max_tokens=40)
    for _ in range(12):
        bench.step()
    bench.add(99, 200, max_tokens=1)
    bench.run()
    chunks = [w for plan in bench.executor.plans for w in plan.works if w.request == 99]
    assert min(len(work.tokens) for work in chunks[:-1]) >= 16
    assert max(plan.tokens for plan in bench.executor.plans) <= 32
    assert max(gap for id in range(40) for gap in gaps(decoded(bench.executor.plans, id))) <= 6


def test_forty_long_decodes_in_a_cache_for_three() -> None:
    """When KV runs out rows are preempted and computed again: all finish with exact text, and nobody livelocks."""
    bench = Bench(num_blocks=40, max_model_len=256)
    for id in range(40):
        bench.add(id, 20, max_tokens=180)
    bench.run()
    assert bench.engine.snapshot().preemptions > 0
    assert all(bench.texts[id, 0] == bench.expected(id, 20, 180) for id in range(40))


def test_children_share_the_prompt() -> None:
    """n samples are one prefill: the prompt is computed once, full blocks are shared, the partial one is copied."""
    bench = Bench()
    bench.add(1, 100, n=8, max_tokens=10)
    bench.run()
    assert all(bench.texts[1, child] == bench.expected(1, 100, 10, child) for child in range(8))
    assert sum(plan.tokens for plan in bench.executor.plans) == 100 + 8 * 9
    assert sum(len(plan.copies) for plan in bench.executor.plans) == 8


def test_more_children_than_rows_wait_their_turn() -> None:
    """n may exceed max_num_seqs: the children without a row wait, and end with the text they would have had."""
    bench = Bench(max_num_seqs=4)
    bench.add(1, 50, n=20, max_tokens=6)
    bench.run()
    assert all(bench.texts[1, child] == bench.expected(1, 50, 6, child) for child in range(20))


def test_priority_goes_first() -> None:
    """Among waiting requests the lowest priority number is served first, arrival breaking ties."""
    bench = Bench(max_num_seqs=1)
    for id, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        bench.add(id, 4, max_tokens=2, priority=priority)
    bench.run()
    assert list(bench.finish) == [(4, 0), (2, 0), (1, 0), (3, 0)]


def test_cancel_gives_blocks_back_at_once() -> None:
    """After cancelling a request in prefill or decode, its blocks are free before the next step."""
    bench = Bench()
    bench.add(1, 2000, max_tokens=50)
    bench.add(2, 10, max_tokens=50)
    for _ in range(3):
        bench.step()
    bench.engine.cancel(1)
    bench.engine.cancel(2)
    assert bench.engine.snapshot().blocks_used == 0
    assert not bench.engine.has_work


def test_a_step_that_does_not_fit_is_retried_smaller_and_succeeds() -> None:
    """Steps over 100 tokens run out of memory: the long prompt is computed in smaller ones and nobody fails."""
    bench = Bench()
    bench.executor.fails = when(lambda plan: plan.tokens > 100)
    for id in range(4):
        bench.add(id, 10, max_tokens=60)
    bench.step()
    bench.add(9, 1000, max_tokens=3)
    bench.run()
    assert bench.failed == {}
    assert bench.texts[9, 0] == bench.expected(9, 1000, 3)
    assert all(bench.texts[id, 0] == bench.expected(id, 10, 60) for id in range(4))
    assert bench.engine.snapshot().steps_oom <= 4


def test_the_impossible_request_fails_alone() -> None:
    """1 impossible and 15 fitting requests: 15 succeed, one fails with the numbers after five strikes."""
    bench = Bench()
    bench.executor.fails = when(holds(5))
    for id in range(16):
        bench.add(id, 30, max_tokens=40)
    bench.run()
    assert set(bench.failed) == {5}
    assert bench.failed[5].kind == "insufficient_memory"
    assert "Needed: 3.00 GiB. Free: 1.00 GiB." in bench.failed[5].message
    assert all(bench.texts[id, 0] == bench.expected(id, 30, 40) for id in range(16) if id != 5)
    assert bench.engine.snapshot().control_steps == 5


def test_no_decoder_waits_for_more_than_one_failed_step_at_a_time() -> None:
    """While a culprit is being found, steps of the others come in between."""
    bench = Bench()
    for id in range(8):
        bench.add(id, 10, max_tokens=60)
    for _ in range(3):
        bench.step()
    bench.executor.fails = when(holds(99))
    bench.add(99, 400, max_tokens=4)
    bench.run()
    plans = [plan for plan in bench.executor.plans if not plan.control]
    for id in range(8):
        served = [i for i, plan in enumerate(plans) if holds(id)(plan) and not holds(99)(plan)]
        assert max(gaps(served)) <= 2


def test_a_decoder_that_turns_bad_is_found_among_decoders() -> None:
    """A row that fails from its 20th position on is isolated although it has decoded before."""
    bench = Bench()
    bench.executor.fails = when(lambda plan: any(w.request == 3 and w.end > 20 for w in plan.works))
    for id in range(8):
        bench.add(id, 10, max_tokens=40)
    bench.run()
    assert set(bench.failed) == {3}
    assert all(bench.texts[id, 0] == bench.expected(id, 10, 40) for id in range(8) if id != 3)


def test_a_full_card_fails_nobody() -> None:
    """While every step fails, the control step too, requests wait; when it is over all of them finish."""
    bench = Bench()
    bench.executor.fails = when(lambda plan: 0.05 < bench.now < 30)
    for id in range(8):
        bench.add(id, 10, max_tokens=40)
    bench.run()
    assert bench.failed == {}
    assert all(bench.texts[id, 0] == bench.expected(id, 10, 40) for id in range(8))
    assert bench.engine.snapshot().steps_oom < 30, "it waits between tries"


def test_a_bad_row_fails_alone() -> None:
    """A non-finite row ends that request; the others of its step commit."""
    bench = Bench()

    def bad_row(work: Work) -> str | None:
        return "non-finite" if work.request == 2 and work.samples else None

    bench.executor.bad_row = bad_row
    for id in range(4):
        bench.add(id, 10, max_tokens=5)
    bench.run()
    assert set(bench.failed) == {2}
    assert bench.failed[2].kind == "engine_failure"
    assert bench.engine.snapshot().steps_oom == 0


def test_an_exception_is_blamed_like_an_oom_but_leaves_the_budget() -> None:
    """A request that raises in every step fails alone with the reason, and steps stay as large as before."""
    bench = Bench()

    def fails(plan: StepPlan) -> StepFailed | None:
        reason = "index out of range"
        return StepFailed(plan=plan.id, kind=FailureKind.FAULT, reason=reason) if holds(1)(plan) else None

    bench.executor.fails = fails
    bench.add(1, 600, max_tokens=2)
    bench.add(2, 600, max_tokens=2)
    bench.run()
    assert bench.failed[1].kind == "engine_failure"
    assert "index out of range" in bench.failed[1].message
    assert bench.texts[2, 0] == bench.expected(2, 600, 2)
    assert bench.engine.snapshot().token_budget == 512


def test_a_lost_device_is_raised() -> None:
    """A failure after which the probe fails ends the engine: the process must be replaced."""
    bench = Bench()
    bench.executor.fails = lambda plan: StepFailed(plan=plan.id, kind=FailureKind.LOST, reason="no answer")
    bench.add(1, 10)
    with pytest.raises(DeviceLost, match="no answer"):
        bench.step()


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    """An empty prompt, and one that fills the context, end in an error event that names both numbers."""
    bench = Bench(num_blocks=16)
    bench.add(1, length)
    bench.step()
    assert bench.failed[1].kind == "invalid_request"
    assert "256" in bench.failed[1].message and str(length) in bench.failed[1].message


def test_stop_tokens_end_a_sequence() -> None:
    """A stop token ends with reason stop and its id; min_tokens suppresses it up to that length."""
    bench = Bench()
    tokens = bench.expected(1, 10, 30)
    stop = tokens[4]
    bench.add(1, 10, max_tokens=30, stop_token_ids=(stop,))
    events = []
    while bench.engine.has_work:
        events += bench.step()
    assert bench.texts[1, 0] == tokens[: tokens.index(stop) + 1]
    assert isinstance(events[-1], Emitted)
    assert (events[-1].finish, events[-1].stop_token) == ("stop", stop)


def test_two_plans_in_flight_give_the_same_text() -> None:
    """At depth 2 the next step is planned before tokens are known; texts and ends are those of depth 1."""
    texts = []
    for depth in (1, 2):
        bench = Bench(depth=depth)
        for id in range(6):
            bench.add(id, 50 + id, max_tokens=30, ignore_eos=False, n=1 + id % 2)
        bench.run()
        texts.append(dict(bench.texts))
    assert texts[0] == texts[1]


def test_a_leak_is_repaired_when_idle() -> None:
    """Blocks that nobody holds any more are found, freed and counted; serving goes on."""
    bench = Bench()
    bench.engine._scheduler.pool.take(5)
    assert len(bench.engine.check_when_idle()) == 5
    assert bench.engine.check_when_idle() == []
    assert bench.engine.snapshot().leaks_repaired == 1


def test_a_repeated_prompt_is_computed_once() -> None:
    """The second request with a prompt computes only its last, partial block, and says how much was cached."""
    bench = Bench()
    bench.add(1, 1000, max_tokens=3)
    bench.run()
    before = bench.engine.snapshot().tokens_computed
    bench.engine.add(request_of(2, [(31 + i) % 997 for i in range(1000)], max_tokens=3, seed=1), bench.now)
    events = [event for _ in range(5) for event in bench.step()]
    assert bench.texts[2, 0] == bench.texts[1, 0]
    assert bench.engine.snapshot().tokens_computed - before == 1000 - 992 + 2
    assert {event.cached for event in events if isinstance(event, Emitted)} == {992}
    assert bench.engine.snapshot().prefix_hits == 992


def test_another_salt_finds_nothing() -> None:
    """Requests of different salts never share blocks, though their prompts are the same."""
    bench = Bench()
    for id, salt in ((1, "a"), (2, "b")):
        bench.engine.add(request_of(id, list(range(100)), max_tokens=1, salt=salt), bench.now)
        bench.run()
    assert bench.engine.snapshot().prefix_hits == 0


def test_a_full_cache_is_evicted_for_new_work() -> None:
    """Cached prefixes never keep a request waiting: they leave as blocks are needed."""
    bench = Bench(num_blocks=40, max_model_len=512)
    for id in range(12):
        bench.add(id, 300, max_tokens=20)
    bench.run()
    assert bench.failed == {}
    assert bench.engine.snapshot().preemptions == 0
    assert all(bench.texts[id, 0] == bench.expected(id, 300, 20) for id in range(12))


def test_blocks_of_a_bad_row_are_not_found_again() -> None:
    """After a non-finite row none of its blocks serves another request, also those that were published before."""
    bench = Bench()
    bench.executor.bad_row = lambda work: "non-finite" if work.request == 1 and work.end > 600 else None
    bench.add(1, 1000, max_tokens=1)
    bench.run()
    bench.engine.add(request_of(2, [(31 + i) % 997 for i in range(1000)], max_tokens=1), bench.now)
    bench.run()
    assert bench.failed.keys() == {1}
    assert bench.engine.snapshot().prefix_hits == 0
