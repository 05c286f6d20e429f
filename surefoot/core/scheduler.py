"""Who computes what in the next step. One rule: each sequence has `computed` of its `tokens`, and a step gives it more.

State changes in transitions only, each whole and each leaving a valid state: `add`, `cancel`, `make_room`, `preempt`,
`resize`, `commit`. `plan` writes nothing but its lease, and `rollback` only ends that lease, since nothing else
changed: that is what makes a failed step harmless (law 1).

    waiting ──make_room──▶ running ──commit──▶ finished
       ▲                      │
       └──── preempt ─────────┘          (blocks dropped, tokens kept: it can always be computed again)
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from surefoot.core.blame import Turn
from surefoot.core.blocks import BlockPool, Key, Lease
from surefoot.core.budget import TokenBudget
from surefoot.core.policy import order
from surefoot.core.sequence import Sequence
from surefoot.core.stats import Counters
from surefoot.types import PENDING, Emitted, Event, Failed, Limits, Request, RowDone, Sampled, StepPlan, Work

Ahead = dict[Key, Work]
"""The newest work in flight of each sequence (of its present epoch): the state that its commit will leave."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a sequence will stand when the plans in flight have committed."""

    start: int
    table: tuple[int, ...]
    pending: int
    """Tokens that are being sampled: 0 or 1."""
    owed: int
    """Tokens to compute before the next one can be sampled; 0: nothing to do yet."""


class Scheduler:
    """Sequences, the queue and the block pool. `core.engine` calls it; nobody else does."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.budget = TokenBudget(limits.max_num_batched_tokens, limits.block_size)
        self.running: dict[Key, Sequence] = {}
        self._sequences: dict[Key, Sequence] = {}
        self._children: dict[int, set[int]] = {}  # request → its children that still live
        self._queue: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; those that left are skipped
        self._parked: list[Sequence] = []  # too long for the present capacity, not for the full one
        self._slots = list(range(limits.max_num_seqs))  # free rows of the token pool, a heap
        self._eos = frozenset(limits.eos_token_ids)
        self._counters = counters
        self._events: list[Event] = []
        self._arrivals = 0

    # ---- what the engine asks ----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._sequences) - len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def lives(self, key: Key) -> bool:
        return key in self._sequences

    def runs(self, key: Key) -> bool:
        return key in self.running

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---- transitions -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; one that could not run even alone fails at once, with the numbers."""
        sequence = Sequence.of(request, self._arrivals)
        self._arrivals += 1
        self._sequences[sequence.key] = sequence
        self._children[request.id] = {0}
        room = min(self.limits.num_blocks * self.limits.block_size, self.limits.max_model_len)
        if not 0 < sequence.prompt_length < room:
            self.fail(
                request.id,
                "invalid_request",
                f"This model's maximum context length is {room} tokens, and the prompt has {sequence.prompt_length}.",
            )
            return
        self._enqueue(sequence)

    def cancel(self, request: int, child: int | None = None) -> None:
        """The caller left, or needs no more of one child: blocks go back, no event is sent."""
        for each in list(self._children.get(request, ())) if child is None else [child]:
            if (request, each) in self._sequences:
                self._end(self._sequences[request, each])

    def fail(self, request: int, kind: str, message: str) -> None:
        """End a request, all children of it, in one error event."""
        if request not in self._children:
            return
        self.cancel(request)
        self._counters.requests_failed += 1
        self._events.append(Failed(request, kind, message))

    def make_room(self, ahead: Ahead) -> None:
        """Preempt until each running row can grow by what it needs next, then admit from the queue.

        The victim is the newest of the lowest priority and never the oldest, which therefore always advances; the
        last one leaves only where the capacity itself has become too small for it.
        """
        while len(self.running) > 1 and self._needed(ahead) > self.pool.free + self.pool.limbo:
            self.preempt_newest()
        for last in [*self.running.values()] if len(self.running) == 1 else []:
            if self._blocks(len(last.tokens)) > self.pool.capacity:
                self.preempt(last)
        while (head := self._head()) is not None and self._fits(head):
            heapq.heappop(self._queue)
            self._run(head)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in its old place: tokens stay, blocks go (law 3)."""
        self._stop(sequence)
        self._counters.preemptions += 1
        self._enqueue(sequence)

    def preempt_newest(self) -> None:
        """Give the card some room, but never at the cost of the oldest."""
        if len(self.running) > 1:
            self.preempt(max(self.running.values(), key=order))

    def resize(self, capacity: int) -> None:
        """Lower or raise the number of blocks; only with nothing in flight. Holders past the new end are preempted."""
        for sequence in sorted(self.running.values(), key=order, reverse=True):
            if any(block >= capacity for block in sequence.table):
                self.preempt(sequence)
        self.pool.resize(capacity)
        parked, self._parked = self._parked, []
        for sequence in parked:
            if self.lives(sequence.key):
                self._enqueue(sequence)

    # ---- plan: writes nothing but its lease --------------------------------------------------------------------------

    def ahead(self, in_flight: Iterable[StepPlan]) -> Ahead:
        """The newest work of each sequence in the plans in flight, oldest first."""
        works = {work.key: work for plan in in_flight for work in plan.works}
        return {
            key: work for key, work in works.items() if key in self.running and self.running[key].epoch == work.epoch
        }

    def plan(self, plan_id: int, turn: Turn, ahead: Ahead) -> tuple[StepPlan, Lease] | None:
        """The next step of this turn, or None where nobody has anything to compute or no block to compute it in."""
        lease = Lease(self.pool)
        works: list[Work] = []
        copies: list[tuple[int, int]] = []
        for sequence, position, count in self._grants(turn, ahead):
            work = self._work(sequence, position, count, lease, copies)
            if work is not None:
                works.append(work)
        if not works:
            lease.release()
            return None
        return StepPlan(id=plan_id, works=tuple(works), copies=tuple(copies)), lease

    def _grants(self, turn: Turn, ahead: Ahead) -> list[tuple[Sequence, Position, int]]:
        """Tokens for each row: decode rows first, then prefills in policy order, at least one block among them."""
        decodes, prefills = self._owing(turn, ahead)
        budget = self.budget.tokens
        quota = max(budget - self.limits.block_size, (budget + 1) // 2) if prefills else budget
        if len(decodes) > quota:  # the least recently served go first
            decodes = sorted(decodes, key=lambda grant: grant[0].served)[:quota]
        left = budget - len(decodes)
        grants = [(sequence, position, 1) for sequence, position in decodes]
        for sequence, position in sorted(prefills, key=lambda grant: order(grant[0])):
            count = min(position.owed, left, turn.caps.get(sequence.key, left))
            if count > 0:
                grants.append((sequence, position, count))
                left -= count
        return grants

    def _owing(
        self, turn: Turn, ahead: Ahead
    ) -> tuple[list[tuple[Sequence, Position]], list[tuple[Sequence, Position]]]:
        """The rows that this turn lets run and that owe tokens: one (decode), more (prefill)."""
        decodes: list[tuple[Sequence, Position]] = []
        prefills: list[tuple[Sequence, Position]] = []
        rows = [self.running[key] for key in turn.caps if key in self.running] if turn.caps else self.running.values()
        for sequence in rows:
            position = self._position(sequence, ahead)
            if position.owed == 0:
                continue
            if sequence.key in turn.held and not (
                position.owed == 1 and sequence.emitted and sequence.key not in turn.unproven
            ):
                continue
            (decodes if position.owed == 1 else prefills).append((sequence, position))
        return decodes, prefills

    def _work(
        self, sequence: Sequence, position: Position, count: int, lease: Lease, copies: list[tuple[int, int]]
    ) -> Work | None:
        """Up to `count` tokens of a row, as far as blocks go; None where not even one has a place."""
        size, table = self.limits.block_size, position.table
        first = position.start // size
        if self._must_copy(sequence, position):
            fresh = lease.take(sequence.key, 1)
            if fresh is None:
                return None
            copies.append((table[first], fresh[0]))
            table = (*table[:first], fresh[0], *table[first + 1 :])
        missing = -(-(position.start + count) // size) - len(table)
        if missing > 0:
            table += lease.take(sequence.key, min(missing, self.pool.free)) or ()
        count = min(count, len(table) * size - position.start)
        if count <= 0:
            return None
        stored = sequence.tokens[position.start : position.start + count]
        tokens = tuple(stored) if len(stored) == count else (*stored, PENDING)
        return Work(
            request=sequence.request.id,
            child=sequence.child,
            epoch=sequence.epoch,
            slot=sequence.slot if sequence.slot is not None else -1,
            start=position.start,
            tokens=tokens,
            table=table,
            known=tuple(sequence.tokens[: position.start]) if self._is_new_fork(sequence, position.start) else None,
            samples=sequence.samples(position.pending) if count == position.owed else (),
            params=sequence.params,
            decoding=count == 1 and position.owed == 1 and sequence.emitted > 0,
        )

    def _must_copy(self, sequence: Sequence, position: Position) -> bool:
        """Whether the block that comes next is half full and a fork's: nobody writes in a block that others hold.

        A new child copies even as the last holder, since a plan of its parent in flight may still write there.
        """
        first = position.start // self.limits.block_size
        return first < len(position.table) and (
            self.pool.shared(position.table[first]) or self._is_new_fork(sequence, position.start)
        )

    def _is_new_fork(self, sequence: Sequence, start: int) -> bool:
        """Whether `start` begins the first work of a child that stands on its parent's blocks."""
        return not sequence.loaded and start == sequence.computed

    def _position(self, sequence: Sequence, ahead: Ahead) -> Position:
        work = ahead.get(sequence.key)
        if work is None:
            return Position(sequence.computed, sequence.table, 0, len(sequence.tokens) - sequence.computed)
        pending = 1 if work.samples else 0
        if pending and sequence.emitted + 1 >= self._most(sequence):
            return Position(work.end, work.table, pending, 0)  # its last token is in flight
        return Position(work.end, work.table, pending, len(sequence.tokens) + pending - work.end)

    # ---- commit and rollback -----------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, lease: Lease, rows: Several[RowDone]) -> None:
        """Advance every row that is still of the epoch it was planned in; what belongs to others is dropped (law 9)."""
        live = [(work, row) for work, row in zip(plan.works, rows, strict=True) if self._current(work)]
        lease.keep({work.key for work, _ in live})
        for work, _ in live:
            self._advance(self.running[work.key], work, plan.id)
        for work, row in live:
            if row.error is not None:
                self._counters.rows_failed += 1
                self.fail(work.request, "engine_failure", f"This request alone could not be computed: {row.error}.")
            elif work.samples and self._current(work):
                self._emit(self.running[work.key], work, row.samples)

    def rollback(self, lease: Lease) -> None:
        """A plan that failed leaves nothing behind but its lease."""
        lease.release()

    def _current(self, work: Work) -> bool:
        sequence = self.running.get(work.key)
        return sequence is not None and sequence.epoch == work.epoch

    def _advance(self, sequence: Sequence, work: Work, plan_id: int) -> None:
        old, first = sequence.table, work.start // self.limits.block_size
        sequence.table = work.table
        if first < len(old) and old[first] != work.table[first]:  # copied on write
            self.pool.drop((old[first],))
        sequence.computed = work.end
        sequence.loaded = True
        sequence.served = plan_id
        self._counters.tokens_computed += len(work.tokens)

    def _emit(self, sequence: Sequence, work: Work, samples: Several[Sampled]) -> None:
        """Append the row's own token; the others are the first tokens of the children that are split off here."""
        own, *others = samples
        children = []
        for sample, sampled in zip(work.samples[1:], others, strict=True):
            child = sequence.fork(sample.child, sampled.token)
            self._sequences[child.key] = child
            self._children[child.request.id].add(child.child)
            children.append((child, sampled))
        sequence.forks = 0
        sequence.tokens.append(own.token)
        for child, sampled in children:
            if not self._report(child, sampled):
                self._place(child, sequence.table[: -(-work.end // self.limits.block_size)], work.end)
        self._report(sequence, own)

    def _report(self, sequence: Sequence, sampled: Sampled) -> bool:
        """Send the newest token of a sequence; True where it was the last."""
        finish, stop_token = self._finish(sequence, sampled.token)
        index = sequence.emitted - 1
        self._counters.tokens_emitted += 1
        self._events.append(Emitted(sequence.request.id, sequence.child, index, sampled, finish, stop_token))
        if finish is not None:
            self._end(sequence)
        return finish is not None

    def _finish(self, sequence: Sequence, token: int) -> tuple[str | None, int | None]:
        params = sequence.params
        stops = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        if stops and sequence.emitted > params.min_tokens:
            return "stop", token
        return ("length", None) if sequence.emitted >= self._most(sequence) else (None, None)

    def _most(self, sequence: Sequence) -> int:
        """The most tokens that this sequence may emit."""
        room = self.limits.max_model_len - sequence.prompt_length
        return room if sequence.params.max_tokens is None else min(room, sequence.params.max_tokens)

    def _place(self, child: Sequence, table: tuple[int, ...], computed: int) -> None:
        """Run a new child on its parent's blocks where a slot is free; else it waits, and computes its own."""
        if self._slots:
            self._run(child)
            self.pool.share(table)
            child.table, child.computed, child.loaded = table, computed, False
        else:
            self._enqueue(child)

    # ---- queue, slots, needs -----------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (order(sequence), sequence))

    def _head(self) -> Sequence | None:
        """The next to be admitted; those that left are forgotten, those that cannot fit for now are parked."""
        while self._queue:
            sequence = self._queue[0][1]
            if not self.lives(sequence.key) or sequence.running:
                heapq.heappop(self._queue)
            elif self._blocks(len(sequence.tokens)) > self.limits.num_blocks:
                heapq.heappop(self._queue)
                self._outgrown(sequence)
            elif self._blocks(len(sequence.tokens)) > self.pool.capacity:
                self._parked.append(heapq.heappop(self._queue)[1])
            else:
                return sequence
        return None

    def _outgrown(self, sequence: Sequence) -> None:
        need, size = self._blocks(len(sequence.tokens)), self.limits.block_size
        self.fail(
            sequence.request.id,
            "insufficient_memory",
            f"This request has grown to {len(sequence.tokens)} tokens, which need {need} KV blocks of {size}; the "
            f"whole cache has {self.limits.num_blocks}. Ask for fewer tokens, or give the server more memory.",
        )

    def _fits(self, sequence: Sequence) -> bool:
        """Room for all its tokens beside what running rows still need, and one block of growth for each of them."""
        if not self._slots:
            return False
        promised = sum(max(0, self._blocks(len(row.tokens)) - len(row.table)) + 1 for row in self.running.values())
        return self._blocks(len(sequence.tokens)) + promised <= self.pool.free

    def _needed(self, ahead: Ahead) -> int:
        """Blocks that running rows must have to advance by one token each."""
        size, needed = self.limits.block_size, 0
        for sequence in self.running.values():
            position = self._position(sequence, ahead)
            if position.owed:
                needed += position.start >= len(position.table) * size or self._must_copy(sequence, position)
        return needed

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _run(self, sequence: Sequence) -> None:
        sequence.slot = heapq.heappop(self._slots)
        sequence.loaded = True
        self.running[sequence.key] = sequence

    def _stop(self, sequence: Sequence) -> None:
        """Out of the running rows: what is in flight of it will be dropped."""
        sequence.epoch += 1
        if sequence.slot is not None:
            heapq.heappush(self._slots, sequence.slot)
            del self.running[sequence.key]
        self.pool.drop(sequence.table)
        sequence.slot, sequence.table, sequence.computed = None, (), 0

    def _end(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self._sequences.pop(sequence.key, None)
        children = self._children[sequence.request.id]
        children.discard(sequence.child)
        if not children:
            del self._children[sequence.request.id]

    def holders(self, leases: Iterable[Lease]) -> Counter[int]:
        """How many sequences and leases hold each block: what the pool's counts must agree with."""
        held = Counter(block for lease in leases for block in lease.held())
        for sequence in self._sequences.values():
            held.update(sequence.table)
        return held
