"""One randomized trial: the real engine over a FakeExecutor, a random load, random trouble, and what must hold."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from surefoot.core.engine import Engine
from surefoot.core.policy import order
from surefoot.core.sequence import Sequence, child_seed
from surefoot.testing import FakeExecutor, expected_tokens, out_of_memory, request_of
from surefoot.types import Emitted, Failed, FailureKind, Limits, Request, StepFailed, StepPlan, Work

VOCABULARY = 50
EOS = 7


@dataclass
class Trouble:
    """What goes wrong in a trial, and when; times are in the trial's own seconds."""

    poisoned: set[int] = field(default_factory=set)  # requests that fail every step they are in
    poisoned_after: dict[int, int] = field(default_factory=dict)  # ... from this position on
    bad_rows: dict[int, int] = field(default_factory=dict)  # request → position at which its row is non-finite
    card_full: tuple[float, float] = (0.0, 0.0)  # everything fails in between
    tight: tuple[float, float] = (0.0, 0.0)  # steps of more than `most` tokens fail in between
    most: int = 1 << 30
    chance: float = 0.0  # of any step but a control step
    fault: bool = False  # failures are exceptions rather than out-of-memory


class Trial:
    """`run` returns normally, or raises AssertionError naming what was violated."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        blocks = rng.choice([6, 10, 24])
        self.limits = Limits(
            max_model_len=min(64, 4 * blocks),
            max_num_batched_tokens=rng.choice([8, 16, 64]),
            max_num_seqs=rng.choice([2, 4, 8]),
            block_size=4,
            num_blocks=blocks,
            eos_token_ids=(EOS,),
            depth=rng.choice([1, 2]),
            prefix_caching=rng.random() < 0.7,
        )
        self.executor = FakeExecutor(self.limits, vocabulary=VOCABULARY, fails=self.fails, bad_row=self.bad_row)
        self.engine = self.make_engine()
        self.now = 0.0
        self.forced = False
        self.watch_preemptions()
        self.requests: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.failed: dict[int, str] = {}
        self.texts: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], str] = {}
        self.failures = 0
        self.limits_move = rng.random() < 0.4
        self.rests = rng.random() < 0.3
        self.trouble = self.make_trouble()
        self.to_add = [self.make_request(id) for id in range(rng.randint(2, 10))]

    def make_engine(self) -> Engine:
        return Engine(self.executor, self.limits)

    def make_trouble(self) -> Trouble:
        rng = self.random
        trouble = Trouble(fault=rng.random() < 0.3)
        kind = rng.choice(["none", "poison", "poison", "late", "bad row", "card", "tight", "chance", "mixed"])
        start = rng.uniform(0, 0.5)
        if kind in ("poison", "mixed"):
            trouble.poisoned = {rng.randrange(4) for _ in range(rng.randint(1, 2))}
        if kind in ("late", "mixed"):
            trouble.poisoned_after = {rng.randrange(4): rng.randint(4, 20)}
        if kind in ("bad row", "mixed"):
            trouble.bad_rows = {rng.randrange(4): rng.randint(0, 12)}
        if kind == "card":
            trouble.card_full = (start, start + rng.uniform(0.05, 3))
        if kind == "tight":
            trouble.tight, trouble.most = (start, start + rng.uniform(0.5, 20)), rng.choice([4, 6, 12])
            trouble.fault = False
        if kind == "chance":
            trouble.chance = 0.1
        return trouble

    def make_request(self, id: int) -> Request:
        rng = self.random
        length = rng.randint(1, self.limits.max_model_len // 2)
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        if rng.random() < 0.5:  # a prefix that others have, too
            begin, end = rng.choice([0, 0, self.limits.block_size]), rng.randint(1, length)  # or a middle
            prompt[begin:end] = random.Random(rng.randint(0, 1)).choices(range(VOCABULARY), k=length)[begin:end]
        most = rng.randint(1, self.limits.max_model_len - length)
        n = rng.choice([1, 1, 1, 2, 5])
        return request_of(
            id, prompt, max_tokens=most, n=n, seed=rng.randrange(1 << 63), priority=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.5, salt=rng.choice(["", "", "other"]),
        )  # fmt: skip

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def fails(self, plan: StepPlan) -> StepFailed | None:
        trouble = self.trouble
        bad = any(
            work.request in trouble.poisoned or work.end > trouble.poisoned_after.get(work.request, 1 << 30)
            for work in plan.works
        )
        bad |= trouble.card_full[0] <= self.now < trouble.card_full[1]
        bad |= trouble.tight[0] <= self.now < trouble.tight[1] and plan.tokens > trouble.most
        bad |= not plan.control and self.random.random() < trouble.chance
        if not bad:
            return None
        self.failures += 1
        if trouble.fault:
            return StepFailed(plan=plan.id, kind=FailureKind.FAULT, reason="injected")
        return out_of_memory(plan, needed=1 << 20, free=self.executor.free)

    def bad_row(self, work: Work) -> str | None:
        position = self.trouble.bad_rows.get(work.request)
        return "non-finite" if position is not None and work.start <= position < work.end else None

    def guilty(self, id: int) -> bool:
        """May this request fail?"""
        trouble = self.trouble
        return id in trouble.poisoned or id in trouble.poisoned_after or id in trouble.bad_rows

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(3000):
            if not (self.to_add or self.engine.has_work):
                break
            self.stir()
            self.take(self.engine.step(self.now))
            assert self.engine.faults() == []
            wait = self.engine.idle_until(self.now)
            self.now = max(self.now + 0.01, wait if wait is not None else 0.0)
        else:
            raise AssertionError("no end: somebody does not advance")
        self.check_end()

    def stir(self) -> None:
        """Arrivals, cancellations, preemptions and moving limits, in any state of the pipeline."""
        rng, running = self.random, list(self.engine._scheduler.running.values())
        self.executor.free = (1 << 20) if self.trouble.tight[0] <= self.now < self.trouble.tight[1] else 1 << 30
        if self.to_add and rng.random() < 0.3:
            request = self.to_add.pop()
            self.requests[request.id] = request
            self.engine.add(request, self.now)
        if len(self.cancelled) < 2 and self.requests and rng.random() < 0.02:
            id = rng.choice(list(self.requests))
            self.engine.cancel(id)
            self.cancelled.add(id)
        if self.rests and not self.engine.has_work:
            self.engine.rest(self.now)
            self.executor.most_blocks = rng.choice([0, 1, self.limits.num_blocks // 2, self.limits.num_blocks])
        elif rng.random() < 0.02:
            self.executor.most_blocks = self.limits.num_blocks
        if self.limits_move and running and rng.random() < 0.02:
            self.forced = True
            self.engine._scheduler.preempt(rng.choice(running))
            self.forced = False
        if self.limits_move and rng.random() < 0.02:
            self.resize(rng.randint(1, self.limits.num_blocks))
        if self.limits_move and not self.to_add and rng.random() < 0.2:
            self.resize(self.limits.num_blocks)

    def watch_preemptions(self) -> None:
        """Law 3: among several running rows the oldest is never preempted, but by the trial itself, or where the
        capacity falls and blocks cannot be moved.
        """
        scheduler = self.engine._scheduler
        preempt = scheduler.preempt

        def watched(sequence: Sequence) -> None:
            running = scheduler.running.values()
            assert self.forced or len(running) == 1 or sequence is not min(running, key=order), (
                "the oldest was preempted"
            )
            preempt(sequence)

        scheduler.preempt = watched  # type: ignore[method-assign]

    def resize(self, capacity: int) -> None:
        self.executor.most_blocks = self.limits.num_blocks
        self.executor.moves = self.random.random() < 0.8
        self.forced = not self.executor.moves
        events, refusal = self.engine.fit(capacity, self.now)
        if refusal is not None:
            assert capacity < self.engine.least_blocks, refusal
            events = self.engine.resize(capacity, self.now)  # as a device does that has no more
        self.take(events)
        self.forced = False

    def take(self, events: list[Emitted | Failed]) -> None:
        for event in events:
            assert event.request not in self.cancelled, "an event after cancel"
            assert event.request not in self.failed, "an event after the error"
            if isinstance(event, Failed):
                self.failed[event.request] = event.kind
                assert self.guilty(event.request), f"innocent request {event.request} failed: {event.message}"
                continue
            key = (event.request, event.child)
            assert key not in self.finished, "a token after the last"
            assert event.index == len(self.texts[key]), "a token lost or doubled"
            self.texts[key].append(event.sampled.token)
            if event.finish:
                self.finished[key] = event.finish

    def check_end(self) -> None:
        pool = self.engine._scheduler.pool
        assert pool.free + pool.cached == pool.capacity, "blocks were lost"
        for id, request in self.requests.items():
            if id in self.cancelled or id in self.failed:
                continue
            assert id not in self.trouble.poisoned, f"poisoned request {id} was served"
            for child in range(request.params.n):
                assert (id, child) in self.finished, f"request {id} child {child} never ended"
                assert self.texts[id, child] == self.expected(request, child), f"request {id} child {child}: wrong text"
        budget = self.allowed_failures()
        assert self.failures <= budget, f"{self.failures} failed steps, {budget} would do"

    def expected(self, request: Request, child: int) -> list[int]:
        prompt = memoryview(request.prompt).cast("i").tolist()
        params = request.params
        assert params.max_tokens is not None and params.seed is not None
        stops = () if params.ignore_eos else (EOS,)
        return expected_tokens(prompt, child_seed(params.seed, child), params.max_tokens, VOCABULARY, stops)

    def allowed_failures(self) -> int:
        """How many steps may fail: a few for each culprit and for each back-off; no oscillation (laws 7 and 8)."""
        trouble = self.trouble
        if trouble.chance:
            return 1 << 30
        culprits = len(trouble.poisoned | set(trouble.poisoned_after)) + len(trouble.bad_rows)
        backoffs = 12 if trouble.card_full[1] or trouble.most < 1 << 30 else 0
        return 60 * culprits + 3 * backoffs
