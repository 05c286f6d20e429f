"""The loop that joins deciding and doing: make_room → plan → launch … collect → commit | rollback.

A step is a transaction. What `launch` does shows up only in what `collect` returns; a failure rolls back that plan and
all later ones, newest first, and becomes a question for `blame`. Time is passed in, and nothing here sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.config import format_bytes
from surefoot.core.blame import STRIKES, Blame, Kind, Turn
from surefoot.core.blocks import Key, Lease
from surefoot.core.planner import Planned
from surefoot.core.scheduler import Scheduler
from surefoot.core.stats import Counters
from surefoot.types import (
    Event,
    Executor,
    FailureKind,
    Limits,
    Request,
    Snapshot,
    StepDone,
    StepFailed,
    StepPlan,
    Ticket,
)

GROW_SECONDS = 1.0
"""Between attempts to get back memory for KV blocks that the device refused."""
STALL_POLL = 0.05
"""Seconds between looks at work that nothing can be done about: sequences parked until capacity comes back."""


class DeviceLost(Exception):
    """The device does not answer any more: this process cannot serve with it (law 11, LOST)."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched plan and what it needs at its end."""

    planned: Planned
    turn: Turn
    ticket: Ticket

    @property
    def plan(self) -> StepPlan:
        return self.planned.plan


class Engine:
    """One executor, one scheduler, at most `limits.depth` plans in flight. Not thread-safe; one loop owns it."""

    def __init__(self, executor: Executor, limits: Limits) -> None:
        self.executor = executor
        """What runs the plans; the worker puts a journal around it."""
        self._limits = limits
        self._counters = Counters()
        self._scheduler = Scheduler(limits, self._counters)
        self._blame = Blame(limits.block_size)
        self._in_flight: list[InFlight] = []
        self._last_plan = 0
        self._last_failure: StepFailed | None = None
        self._wanted = limits.num_blocks  # KV blocks to have while there is work; fewer where the device refuses some
        self._resting = False
        self._grow_at = 0.0
        self._stalled = False  # the last step found nothing that could run

    # ---- from the bridge ---------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request. It ends in events: one that can never run gets its error from the next `step`."""
        self._scheduler.add(request)

    def cancel(self, request: int, child: int | None = None) -> None:
        """Drop a request, or one child of it. Unknown ids are ignored: it may just have finished."""
        self._scheduler.cancel(request, child)

    @property
    def has_work(self) -> bool:
        """Whether calling `step` can still lead to anything."""
        return self._scheduler.has_work or bool(self._in_flight)

    def idle_until(self, now: float) -> float | None:
        """The time before which `step` need not be called (the card is full, nothing fits), or None for at once."""
        if now < self._blame.wait_until:
            return self._blame.wait_until
        return now + STALL_POLL if self._stalled else None

    def step(self, now: float) -> list[Event]:
        """Launch what may run, collect the oldest plan, return what happened. Raises DeviceLost."""
        events = self._grow_back(now)
        while len(self._in_flight) < self._depth and (launched := self._launch(now)) is not None:
            self._in_flight.append(launched)
        self._stalled = not self._in_flight
        if self._in_flight:
            self._collect(now)
        return events + self._scheduler.take_events()

    def snapshot(self) -> Snapshot:
        """Counts as of now."""
        pool = self._scheduler.pool
        return Snapshot(
            running=len(self._scheduler.running),
            waiting=self._scheduler.waiting,
            suspects=self._blame.suspects,
            blocks_total=pool.capacity,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_idle=self._wanted - pool.capacity if self._resting else 0,
            block_size=self._limits.block_size,
            token_budget=self._scheduler.budget.tokens,
            **self._counters.values(),
        )

    def resize(self, capacity: int, now: float) -> list[Event]:
        """Change the number of KV blocks (ids 0 … capacity-1) and return what happened while the pipeline drained.

        Blocks past the new end are moved below it as far as there is room, cached prefixes and then the newest rows
        making way; where they cannot be moved their rows are computed again.
        """
        while self._in_flight:
            self._collect(now)
        scheduler = self._scheduler
        self._counters.shrinks += capacity < scheduler.pool.capacity
        scheduler.shed(capacity)
        moves = scheduler.pool.moves(capacity)
        if moves and self.executor.move(moves) is None:
            scheduler.rename(moves)
        scheduler.resize(capacity)
        return scheduler.take_events()

    def fit(self, blocks: int, now: float) -> tuple[list[Event], str | None]:
        """Have `blocks` KV blocks, and memory for no more: (what happened meanwhile, why there is not enough for them).

        Going down rows give up blocks before the memory goes; going up the memory has to be there first. What has begun
        is not left without the blocks that it needs (`least_blocks`).
        """
        if blocks < self.least_blocks:
            return [], f"a request that has begun needs {self.least_blocks}"
        events, refusal = self._hold(blocks, now)
        self._wanted, self._resting = self._scheduler.pool.capacity, False
        return events, refusal

    @property
    def least_blocks(self) -> int:
        """The fewest that `fit` takes now."""
        return self._scheduler.least_blocks

    def rest(self, now: float) -> None:
        """With no work: give back the memory of all KV blocks, cached prefixes too. The next work takes it again."""
        self._hold(0, now)
        self._resting = True

    def _grow_back(self, now: float) -> list[Event]:
        """Where there is work and blocks are missing: take all of them, or as many as the device has for now."""
        capacity = self._scheduler.pool.capacity
        missing = self._wanted - capacity if self.has_work and (self._resting or now >= self._grow_at) else 0
        events: list[Event] = []
        while missing > 0:
            found, refusal = self._hold(capacity + missing, now)
            events += found
            missing = missing // 2 if refusal else 0
            self._resting, self._grow_at = False, now + GROW_SECONDS
        return events

    def _hold(self, blocks: int, now: float) -> tuple[list[Event], str | None]:
        if blocks <= self._scheduler.pool.capacity:
            events = self.resize(blocks, now)
            return events, self.executor.hold(blocks)
        events = self.resize(self._scheduler.pool.capacity, now)
        refusal = self.executor.hold(blocks)
        return (events if refusal else events + self.resize(blocks, now)), refusal

    def faults(self) -> list[str]:
        """What does not add up in the block books (law 2); empty when all is well."""
        scheduler = self._scheduler
        return scheduler.pool.faults(scheduler.holders(flight.planned.lease for flight in self._in_flight))

    def check_when_idle(self) -> list[str]:
        """With nothing in flight: repair the block books if they do not add up, count it, say what was found."""
        found = self.faults()
        if found:
            self._scheduler.pool.repair(self._scheduler.holders(()))
            self._counters.leaks_repaired += 1
        return found

    # ---- launch ------------------------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        return 1 if self._blame.active else self._limits.depth

    def _launch(self, now: float) -> InFlight | None:
        if now < self._blame.wait_until:
            return None
        for turn in self._blame.turns(self._scheduler.lives, self._scheduler.runs):
            if (planned := self._plan(turn, now)) is not None:
                self._last_plan = planned.plan.id
                self._scheduler.pool.launched(planned.plan.id)
                return InFlight(planned, turn, self.executor.launch(planned.plan))
        return None

    def _plan(self, turn: Turn, now: float) -> Planned | None:
        plan_id, scheduler = self._last_plan + 1, self._scheduler
        if turn.kind is Kind.CONTROL:
            return Planned(StepPlan(id=plan_id, works=(), control=True), Lease(scheduler.pool), ())
        scheduler.budget.grow(now=now, free=self.executor.free_memory())
        return scheduler.plan(plan_id, turn, [flight.planned for flight in self._in_flight])

    # ---- collect -----------------------------------------------------------------------------------------------------

    def _collect(self, now: float) -> None:
        oldest = self._in_flight.pop(0)
        outcome = self.executor.collect(oldest.ticket)
        self._scheduler.pool.retired(oldest.plan.id)
        if isinstance(outcome, StepDone):
            self._commit(oldest, outcome, now)
        else:
            self._rollback(oldest, outcome, now)

    def _commit(self, flight: InFlight, done: StepDone, now: float) -> None:
        self._count_step(flight.plan)
        self._scheduler.commit(flight.planned, done.rows)
        self._scheduler.budget.committed(flight.plan.tokens, now=now)
        self._blame.committed(flight.turn, flight.plan, now)
        if self._blame.convicted is not None:
            self._fail(self._blame.convicted)
            self._blame.convicted = None

    def _rollback(self, flight: InFlight, failure: StepFailed, now: float) -> None:
        """Undo this plan and every later one, newest first; then ask who it was."""
        for later in self._in_flight:
            self.executor.collect(later.ticket)
            self._scheduler.pool.retired(later.plan.id)
        for each in reversed([flight, *self._in_flight]):
            self._scheduler.rollback(each.planned)
            self._counters.retries += not each.plan.control
        self._in_flight.clear()
        if failure.kind is FailureKind.LOST:
            raise DeviceLost(failure.reason)
        self._count_step(flight.plan, failure)
        if failure.kind is FailureKind.OOM and not flight.plan.control:
            self._scheduler.budget.failed(flight.plan.tokens, now=now, free=failure.free, needed=failure.needed)
        self._last_failure = failure if not flight.plan.control else self._last_failure
        if self._blame.failed(flight.turn, flight.plan, now):
            self._scheduler.preempt_newest()

    def _count_step(self, plan: StepPlan, failure: StepFailed | None = None) -> None:
        counters = self._counters
        counters.steps += 1
        counters.control_steps += plan.control
        if failure is not None:
            if failure.kind is FailureKind.OOM:
                counters.steps_oom += 1
                counters.oom_predicted += failure.cause == "predicted"
                counters.oom_library += failure.cause == "library"
            counters.steps_fault += failure.kind is FailureKind.FAULT

    def _fail(self, key: Key) -> None:
        """A suspect with five strikes: it fails alone, and what it taught the budget is forgotten."""
        failure = self._last_failure
        assert failure is not None
        self._scheduler.budget.forget()
        tried = (
            f"It was tried alone, {STRIKES} times, with the smallest step of {self._limits.block_size} tokens, while"
        )
        if failure.kind is FailureKind.FAULT:
            message = f"This request makes every step fail. {tried} other work ran. The error was: {failure.reason}"
            self._scheduler.fail(key[0], "engine_failure", message)
            return
        numbers = "".join(
            f" {what} {format_bytes(amount)}."
            for what, amount in (("Needed:", failure.needed), ("Free:", failure.free))
            if amount is not None
        )
        message = (
            f"This request does not fit in memory. {tried} other work fitted.{numbers} Send a shorter prompt, ask for "
            "fewer tokens, or give the server more memory."
        )
        self._scheduler.fail(key[0], "insufficient_memory", message)
