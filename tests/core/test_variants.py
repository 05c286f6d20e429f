"""Trials that cannot fail prove nothing: for each law, an engine that breaks it on purpose must be caught by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surefoot.core import blame as blame_module
from surefoot.core.engine import Engine
from surefoot.core.planner import Planned
from surefoot.core.policy import order
from surefoot.core.prefix import block_hash
from surefoot.core.sequence import Sequence
from surefoot.types import StepPlan
from tests.core.trials import Trial

Break = Callable[[Engine], None]


def advances_in_plan(engine: Engine) -> None:
    """Law 1: `computed` moves when a step is planned, not when it has run."""
    scheduler = engine._scheduler
    plan = scheduler.plan

    def broken(*args: Any) -> Any:
        planned = plan(*args)
        for sequence, work in zip(planned.sequences, planned.plan.works, strict=True) if planned else ():
            sequence.computed = work.end
        return planned

    scheduler.plan = broken  # type: ignore[method-assign]


def forgets_the_lease(engine: Engine) -> None:
    """Law 1: a failed plan keeps its blocks."""
    engine._scheduler.rollback = lambda planned: None  # type: ignore[method-assign]


def keeps_blocks_of_dead_rows(engine: Engine) -> None:
    """Law 1: a commit hands blocks to rows that are gone."""
    scheduler = engine._scheduler
    commit = scheduler.commit

    def broken(planned: Planned, rows: Any) -> None:
        keep = planned.lease.keep
        planned.lease.keep = lambda keys=None: keep()  # type: ignore[method-assign]
        commit(planned, rows)

    scheduler.commit = broken  # type: ignore[method-assign]


def has_no_limbo(engine: Engine) -> None:
    """Law 2: blocks that a plan in flight names are handed out again at once."""
    engine._scheduler.pool.launched = lambda plan: None  # type: ignore[method-assign]
    engine._scheduler.pool.retired = lambda plan: None  # type: ignore[method-assign]


def shares_without_counting(engine: Engine) -> None:
    """Law 2: children hold their parent's blocks without being counted."""
    engine._scheduler.pool.share = lambda blocks: None  # type: ignore[method-assign]


def writes_in_shared_blocks(engine: Engine) -> None:
    """Law 4: a fork writes in its parent's half full block."""
    engine._scheduler.planner.must_copy = lambda sequence, start, table: False  # type: ignore[method-assign]


def trusts_an_empty_pool_row(engine: Engine) -> None:
    """Law 4: a child's row of the token pool is taken to hold what its parent's does."""
    engine._scheduler.planner.is_new_fork = lambda sequence, start: False  # type: ignore[method-assign]


def preempts_the_oldest(engine: Engine) -> None:
    """Law 3: the victim is the oldest, so that nobody is sure to advance."""
    scheduler = engine._scheduler
    scheduler.preempt_newest = lambda: scheduler.preempt(  # type: ignore[method-assign]
        min(scheduler.running.values(), key=order)
    )


def never_preempts(engine: Engine) -> None:
    """Law 3: rows that cannot grow wait for each other."""
    engine._scheduler._short = lambda ahead: False  # type: ignore[method-assign]


def never_parks(engine: Engine) -> None:
    """Law 3: a request that does not fit now fails, although it would at full capacity."""
    scheduler = engine._scheduler
    head = scheduler._head

    def broken() -> Any:
        sequence = head()
        for parked in scheduler._parked:
            scheduler._outgrown(parked)
        return sequence

    scheduler._head = broken  # type: ignore[method-assign]


def redraws_after_preemption(engine: Engine) -> None:
    """Law 5: the noise depends on what else happened, not on the output index."""
    scheduler = engine._scheduler
    preempt = scheduler.preempt

    def broken(sequence: Any) -> None:
        preempt(sequence)
        sequence.seed += 1

    scheduler.preempt = broken  # type: ignore[method-assign]


def ignores_later_plans(engine: Engine) -> None:
    """Law 6: a failure rolls back its own plan and commits the one that was built on it."""
    rollback = engine._rollback

    def broken(flight: Any, failure: Any, now: float) -> None:
        later, engine._in_flight = engine._in_flight, []
        rollback(flight, failure, now)
        engine._in_flight = later

    engine._rollback = broken  # type: ignore[method-assign]


def forgets_what_failed(engine: Engine) -> None:
    """Law 7: the budget goes straight back to the size that just failed."""
    budget = engine._scheduler.budget
    failed = budget.failed

    def broken(size: int, **memory: Any) -> None:
        failed(size, **memory)
        budget._retry_at = 0.0

    budget.failed = broken  # type: ignore[method-assign]
    budget.grow = lambda **memory: budget.forget()  # type: ignore[method-assign]


def strikes_without_control(engine: Engine) -> None:
    """Law 8: five failures alone are enough to convict, whatever the state of the card."""
    engine._blame._control_failed = lambda now: engine._blame._control_passed() or False  # type: ignore[method-assign, func-returns-value]


def blames_the_batch(engine: Engine) -> None:
    """Law 8: whoever was in a failed step fails."""
    blame = engine._blame
    failed = blame.failed

    def broken(turn: Any, plan: StepPlan, now: float) -> bool:
        for work in plan.works:
            engine._scheduler.fail(work.request, "insufficient_memory", "it was there")
        return failed(turn, plan, now)

    blame.failed = broken  # type: ignore[method-assign]


def never_convicts(engine: Engine) -> None:
    """Law 8: a request that can never run is retried for ever."""
    blame = engine._blame
    passed = blame._control_passed

    def broken() -> None:
        passed()
        blame.convicted = None

    blame._control_passed = broken  # type: ignore[method-assign]


def lets_the_suspect_stay(engine: Engine) -> None:
    """Law 8: suspects run on with everybody else, who then never get a step."""
    turns = engine._blame.turns
    engine._blame.turns = lambda *args: (  # type: ignore[method-assign, assignment]
        blame_module.EVERYBODY if turn.kind is blame_module.Kind.OTHERS else turn for turn in turns(*args)
    )


def ignores_epochs(engine: Engine) -> None:
    """Law 9: results of a row that was preempted or cancelled meanwhile are committed."""
    scheduler = engine._scheduler
    scheduler._current = lambda sequence, work: sequence.running  # type: ignore[method-assign]


def shows_tokens_after_the_stop(engine: Engine) -> None:
    """Law 9: what was in flight when a row finished is emitted too."""
    scheduler = engine._scheduler
    end = scheduler._end
    scheduler._end = lambda sequence: None if len(engine._in_flight) else end(sequence)  # type: ignore[method-assign]


def fails_the_batch_for_a_row(engine: Engine) -> None:
    """Law 11: a non-finite row fails everybody in its step."""
    scheduler = engine._scheduler
    commit = scheduler.commit

    def broken(planned: Planned, rows: Any) -> None:
        bad = next((row for row in rows if row.error), None)
        commit(planned, [bad] * len(rows) if bad else rows)

    scheduler.commit = broken  # type: ignore[method-assign]


def forgets_what_came_before(engine: Engine) -> None:
    """Prefix cache: a block is named by its own tokens, whatever text stands before it."""
    scheduler = engine._scheduler
    size = scheduler.limits.block_size

    def broken(sequence: Sequence) -> Any:
        most = (len(sequence.tokens) - 1) // size
        names = [block_hash(b"", sequence.tokens[at * size : (at + 1) * size]) for at in range(most)]
        sequence.names = names
        return scheduler.pool.index.match(names) if scheduler.limits.prefix_caching else ()

    scheduler._match = broken  # type: ignore[method-assign]


def finds_evicted_blocks(engine: Engine) -> None:
    """Prefix cache: a block that was evicted, and holds something else by now, is still found."""
    engine._scheduler.pool.index.remove = lambda block: None  # type: ignore[method-assign]


def publishes_before_it_ran(engine: Engine) -> None:
    """Prefix cache: blocks are offered when their step is planned."""
    scheduler = engine._scheduler
    plan = scheduler.plan

    def broken(*args: Any) -> Any:
        planned = plan(*args)
        size = scheduler.limits.block_size
        for sequence, work in zip(planned.sequences, planned.plan.works, strict=True) if planned else ():
            full = min(work.end, len(sequence.tokens)) // size
            for name, block in zip(sequence.names_of(full, size), work.table, strict=False):
                scheduler.pool.index.publish(name, block)
        return planned

    scheduler.plan = broken  # type: ignore[method-assign]


def moves_nothing(engine: Engine) -> None:
    """Moved blocks: tables are renamed, and what the blocks held stays where it was."""
    engine.executor.move = lambda pairs: None  # type: ignore[method-assign]


def moves_without_its_index(engine: Engine) -> None:
    """Moved blocks: a published prefix is still looked for where it was."""
    engine._scheduler.pool.index.rename = lambda old, new: None  # type: ignore[method-assign]


def moves_one_holder(engine: Engine) -> None:
    """Moved blocks: of several rows that share a block only one is told."""
    scheduler = engine._scheduler
    rename = scheduler.rename

    def broken(moved: Any) -> None:
        tables = {sequence.key: sequence.table for sequence in [*scheduler.running.values()][1:]}
        rename(moved)
        for key, table in tables.items():
            scheduler.running[key].table = table

    scheduler.rename = broken  # type: ignore[method-assign]


def never_wakes(engine: Engine) -> None:
    """Idle release: memory that was given back for want of work stays away."""
    engine._grow_back = lambda now: []  # type: ignore[method-assign]


BROKEN: list[Break] = [
    advances_in_plan, forgets_the_lease, keeps_blocks_of_dead_rows, has_no_limbo, shares_without_counting,
    writes_in_shared_blocks, trusts_an_empty_pool_row, preempts_the_oldest, never_preempts, never_parks,
    redraws_after_preemption, ignores_later_plans, forgets_what_failed, strikes_without_control, blames_the_batch,
    never_convicts, lets_the_suspect_stay, ignores_epochs, shows_tokens_after_the_stop, fails_the_batch_for_a_row,
    forgets_what_came_before, finds_evicted_blocks, publishes_before_it_ran, moves_nothing, moves_without_its_index,
    moves_one_holder, never_wakes,
]  # fmt: skip


class BrokenTrial(Trial):
    """A trial whose engine was broken by `damage`."""

    damage: Break

    def make_engine(self) -> Engine:
        engine = super().make_engine()
        type(self).damage(engine)
        return engine


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_broken_variant_is_caught(damage: Break) -> None:
    """An engine without this law is caught by one of a few hundred trials."""
    trial = type("Damaged", (BrokenTrial,), {"damage": staticmethod(damage)})
    for seed in range(400):
        try:
            trial(seed).run()
        except (AssertionError, KeyError, IndexError):
            return
    raise AssertionError(f"400 trials did not notice: {damage.__doc__}")
