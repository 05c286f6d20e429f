"""What the next step computes: a pure function of the scheduler's state that writes nothing but its lease (law 1).

A step first gives every row that owes one token its token, then shares the rest of the budget among prefills:

    budget  [ decode rows, one token each )[ prefills, in policy order ............ )
            '- at most quota; the least     '- at least one block of tokens in all,
               recently served go first        where anybody prefills
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from surefoot.core.blame import Turn
from surefoot.core.blocks import BlockPool, Key, Lease
from surefoot.core.policy import order
from surefoot.core.sequence import Sequence
from surefoot.types import PENDING, Limits, StepPlan, Work

MAX_SAMPLES = 128
"""The largest n of a request; a step draws so many tokens besides one for each row."""

Ahead = dict[Key, Work]
"""The newest work in flight of each sequence (of its present epoch): the state that its commit will leave."""

Position = tuple[int, tuple[int, ...], int, int]
"""Where a sequence will stand when the plans in flight have committed: (start, table, pending, owed).

`pending` tokens, 0 or 1, are being sampled; `owed` are to be computed before the next can be. A tuple, and not a class,
because there is one per row and step.
"""

Grant = tuple[Sequence, Position, int]
"""A row, where it stands, and how many tokens it may compute."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the lease of its new blocks, and the sequence of each of its works."""

    plan: StepPlan
    lease: Lease
    sequences: tuple[Sequence, ...]


def ahead_of(in_flight: Iterable[Planned]) -> Ahead:
    """The newest work of each sequence in the plans in flight, oldest first."""
    return {
        sequence.key: work
        for planned in in_flight
        for sequence, work in zip(planned.sequences, planned.plan.works, strict=True)
        if sequence.epoch == work.epoch
    }


def position_of(sequence: Sequence, ahead: Ahead) -> Position:
    """Where `sequence` will stand after the plans in flight."""
    work = ahead.get(sequence.key) if ahead else None
    if work is None:
        return sequence.computed, sequence.table, 0, len(sequence.tokens) - sequence.computed
    start = work.start + len(work.tokens)
    pending = 1 if work.samples else 0
    if pending and len(sequence.tokens) + 1 >= sequence.longest:
        return start, work.table, pending, 0  # its last token is in flight
    return start, work.table, pending, len(sequence.tokens) + pending - start


class Planner:
    """Reads the running rows and the pool; `plan` is called once per step."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool = pool
        self._size = limits.block_size
        self._time = limits.step_time
        self._most_seconds = limits.max_step_seconds
        self._most_draws = limits.max_num_seqs + MAX_SAMPLES

    def plan(self, plan_id: int, rows: Collection[Sequence], turn: Turn, ahead: Ahead, budget: int) -> Planned | None:
        """The next step of this turn, or None where nobody has anything to compute or no block to compute it in."""
        lease = Lease(self._pool)
        works: list[Work] = []
        sequences: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        for sequence, position, count in self._grants(rows, turn, ahead, budget):
            work = self._work(sequence, position, count, lease, copies)
            if work is not None:
                works.append(work)
                sequences.append(sequence)
        if not works:
            lease.release()
            return None
        return Planned(StepPlan(id=plan_id, works=tuple(works), copies=tuple(copies)), lease, tuple(sequences))

    def must_copy(self, sequence: Sequence, start: int, table: tuple[int, ...]) -> bool:
        """Whether the block that comes next is half full and a fork's: nobody writes in a block that others hold.

        A new child copies even as the last holder, since a plan of its parent in flight may still write there.
        """
        first = start // self._size
        return first < len(table) and (self._pool.shared(table[first]) or self.is_new_fork(sequence, start))

    def is_new_fork(self, sequence: Sequence, start: int) -> bool:
        """Whether `start` begins the first work of a child that stands on its parent's blocks."""
        return not sequence.loaded and start == sequence.computed

    def _grants(self, rows: Collection[Sequence], turn: Turn, ahead: Ahead, budget: int) -> list[Grant]:
        decodes, prefills = self._owing(rows, turn, ahead)
        quota = max(budget - self._size, (budget + 1) // 2) if prefills else budget
        if len(decodes) > quota:
            decodes = sorted(decodes, key=lambda grant: grant[0].served)[:quota]
        left = budget - len(decodes)
        seconds = self._seconds_left(decodes, len(prefills))
        draws = most_draws = self._most_draws - len(decodes)  # the first prefill gets a block at any price
        for sequence, position, owed in sorted(prefills, key=lambda grant: order(grant[0])):
            count = min(owed, left, turn.caps.get(sequence.key, left))
            if self._time is not None:
                timely = self._time.tokens_in(seconds, position[0])
                count = min(count, max(timely, self._size if draws == most_draws else 0))
                seconds -= self._time.seconds(count, position[0])
            if count == owed and draws < 1 + sequence.forks:
                count -= 1  # its last token waits until there is room to draw all that follow
            if count > 0:
                decodes.append((sequence, position, count))
                left -= count
                draws -= 1 + sequence.forks
        return decodes

    def _seconds_left(self, decodes: list[Grant], prefills: int) -> float:
        """Time for prefills in this step; without end where nobody else is owed a token."""
        if self._time is None or len(decodes) + prefills < 2:
            return math.inf
        spent = sum(self._time.seconds(1, position[0]) for _, position, _ in decodes)
        return self._most_seconds - self._time.fixed - spent

    def _owing(self, rows: Collection[Sequence], turn: Turn, ahead: Ahead) -> tuple[list[Grant], list[Grant]]:
        """The rows that this turn lets run and that owe tokens: one (decode), more (prefill)."""
        decodes: list[Grant] = []
        prefills: list[Grant] = []
        caps, held = turn.caps, turn.held
        for sequence in rows:
            if caps and sequence.key not in caps:
                continue
            position = position_of(sequence, ahead)
            owed = position[3]
            if not owed or (held and sequence.key in held and not self._proven(sequence, owed, turn)):
                continue
            (decodes if owed == 1 else prefills).append((sequence, position, owed))
        return decodes, prefills

    def _proven(self, sequence: Sequence, owed: int, turn: Turn) -> bool:
        """Whether a suspect may run with the others: one token, by a row that has decoded before."""
        return owed == 1 and sequence.emitted > 0 and sequence.key not in turn.unproven

    def _work(
        self, sequence: Sequence, position: Position, count: int, lease: Lease, copies: list[tuple[int, int]]
    ) -> Work | None:
        """Up to `count` tokens of a row, as far as blocks go; None where not even one has a place."""
        start, table, pending, owed = position
        if self.must_copy(sequence, start, table):
            first = start // self._size
            fresh = lease.take(sequence.key, 1)
            if fresh is None:
                return None
            copies.append((table[first], fresh[0]))
            table = (*table[:first], fresh[0], *table[first + 1 :])
        room = len(table) * self._size - start
        if room < count:
            missing = -(-(count - room) // self._size)
            table += lease.take(sequence.key, min(missing, self._pool.free)) or ()
            count = min(count, len(table) * self._size - start)
            if count <= 0:
                return None
        tokens = tuple(sequence.tokens[start : start + count])
        return Work(
            request=sequence.key[0],
            child=sequence.child,
            epoch=sequence.epoch,
            slot=sequence.slot if sequence.slot is not None else -1,
            start=start,
            tokens=tokens if len(tokens) == count else (*tokens, PENDING),
            table=table,
            known=tuple(sequence.tokens[:start]) if self.is_new_fork(sequence, start) else None,
            samples=sequence.samples(pending) if count == owed else (),
            params=sequence.params,
            decoding=owed == 1 and sequence.emitted > 0,
        )
