"""Who computes what in the next step. One rule: each sequence has `computed` of its `tokens`, and a step gives it more.

State changes in transitions only, each whole and each leaving a valid state: `add`, `cancel`, `make_room`, `preempt`,
`shed`, `rename`, `resize`, `commit`. The planner writes nothing but its lease, and `rollback` only ends that lease,
since nothing else changed: that is what makes a failed step harmless (law 1).

    waiting ──make_room──▶ running ──commit──▶ finished
       ▲                      │
       └──── preempt ─────────┘          (blocks dropped, tokens kept: it can always be computed again)
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Several

from surefoot.core.blame import Turn
from surefoot.core.blocks import BlockPool, Key, Lease
from surefoot.core.budget import TokenBudget
from surefoot.core.planner import Ahead, Planned, Planner, ahead_of, position_of
from surefoot.core.policy import order
from surefoot.core.sequence import Sequence
from surefoot.core.stats import Counters
from surefoot.types import Emitted, Event, Failed, Limits, Request, RowDone, Sampled, Work


class Scheduler:
    """Sequences, the queue and the block pool. `core.engine` calls it; nobody else does."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.planner = Planner(self.pool, limits)
        self.budget = TokenBudget(limits.max_num_batched_tokens, limits.block_size)
        self.running: dict[Key, Sequence] = {}
        self._sequences: dict[Key, Sequence] = {}
        self._children: dict[int, set[int]] = {}  # request → its children that still live
        self._queue: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; those that left are skipped
        self._parked: list[Sequence] = []  # too long for the present capacity, not for the full one
        self._slots = list(range(limits.max_num_seqs))  # free rows of the token pool, a heap
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

    @property
    def least_blocks(self) -> int:
        """Blocks without which the longest sequence that has begun cannot go on."""
        begun = (each for each in self._sequences.values() if each.running or each.emitted)
        return max((self._blocks(len(each.tokens)) for each in begun), default=0)

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---- transitions -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; one that could not run even alone fails at once, with the numbers."""
        sequences = Sequence.rest_of(request, self._arrivals, self.limits)
        self._arrivals += 1
        self._sequences |= {sequence.key: sequence for sequence in sequences}
        self._children[request.id] = {sequence.child for sequence in sequences}
        room = min(self.limits.num_blocks * self.limits.block_size, self.limits.max_model_len)
        longest = max(len(sequence.tokens) for sequence in sequences)
        if not 0 < longest < room:
            message = f"This model's maximum context length is {room} tokens, and the prompt has {longest}."
            self.fail(request.id, "invalid_request", message)
            return
        for sequence in sequences:
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
        """Preempt until each running row can grow by what it needs next, admit from the queue, evict for the next plan.

        The victim is the newest of the lowest priority and never the oldest, which therefore always advances; the
        last one leaves only where the capacity itself has become too small for it.
        """
        while len(self.running) > 1 and self._short(ahead):
            self.preempt_newest()
        for last in [*self.running.values()] if len(self.running) == 1 else []:
            if self._blocks(len(last.tokens)) > self.pool.capacity:
                self.preempt(last)
        while (head := self._head()) is not None and self._fits(head):
            heapq.heappop(self._queue)
            self._admit(head)
        if self.pool.cached and (short := self._planned_blocks(ahead) - self.pool.free) > 0:
            self.pool.evict(short)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in its old place: tokens stay, blocks go (law 3)."""
        self._stop(sequence)
        self._counters.preemptions += 1
        self._enqueue(sequence)

    def preempt_newest(self) -> None:
        """Give the card some room, but never at the cost of the oldest."""
        if len(self.running) > 1:
            self.preempt(max(self.running.values(), key=order))

    def shed(self, capacity: int) -> None:
        """Preempt the newest until all that is held could be held in `capacity` blocks; with nothing in flight."""
        while self.running and self.pool.used > capacity:
            self.preempt(max(self.running.values(), key=order))

    def rename(self, moved: Several[tuple[int, int]]) -> None:
        """Blocks (from, to) were copied: whoever held the first holds the second."""
        names = dict(moved)
        for sequence in self.running.values():
            if not names.keys().isdisjoint(sequence.table):
                sequence.table = tuple(names.get(block, block) for block in sequence.table)
        self.pool.rename(moved)
        self._counters.blocks_moved += len(moved)

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

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan(self, plan_id: int, turn: Turn, in_flight: Iterable[Planned]) -> Planned | None:
        """Make room, then the next step of this turn; None where nothing can run."""
        ahead = ahead_of(in_flight)
        self.make_room(ahead)
        return self.planner.plan(plan_id, self.running.values(), turn, ahead, self.budget.tokens)

    # ---- commit and rollback -----------------------------------------------------------------------------------------

    def commit(self, planned: Planned, rows: Several[RowDone]) -> None:
        """Advance every row that is still of the epoch it was planned in; what belongs to others is dropped (law 9)."""
        plan, live = planned.plan, []
        for sequence, work, row in zip(planned.sequences, plan.works, rows, strict=True):
            if self._current(sequence, work):
                live.append((sequence, work, row))
        kept = {sequence.key for sequence, _, _ in live} if len(live) < len(rows) else None
        planned.lease.keep(kept)
        for sequence, work, _ in live:
            self._advance(sequence, work, plan.id)
        for sequence, work, row in live:
            if row.error is not None:
                self._counters.rows_failed += 1
                self.pool.unpublish(work.table)
                self.fail(work.request, "engine_failure", f"This request alone could not be computed: {row.error}")
            elif work.samples and self._current(sequence, work):
                self._emit(sequence, work, row.samples)

    def rollback(self, planned: Planned) -> None:
        """A plan that failed leaves nothing behind but its lease."""
        planned.lease.release()

    def _current(self, sequence: Sequence, work: Work) -> bool:
        return sequence.epoch == work.epoch

    def _advance(self, sequence: Sequence, work: Work, plan_id: int) -> None:
        old = sequence.table
        if old is not work.table:
            first = work.start // self.limits.block_size
            if first < len(old) and old[first] != work.table[first]:  # copied on write
                self.pool.drop((old[first],))
            sequence.table = work.table
        count, size = len(work.tokens), self.limits.block_size
        sequence.computed = work.start + count
        if self.limits.prefix_caching and work.start // size < sequence.computed // size:
            self._publish(sequence, work.start // size)
        sequence.loaded = True
        sequence.served = plan_id
        self._counters.tokens_computed += count

    def _publish(self, sequence: Sequence, first: int) -> None:
        """Offer the blocks from `first` on that are full now; only the newest token can be unknown still."""
        last = min(sequence.computed, len(sequence.tokens)) // self.limits.block_size
        for index, name in enumerate(sequence.names_of(last, self.limits.block_size)[first:], first):
            self.pool.index.publish(name, sequence.table[index])

    def _emit(self, sequence: Sequence, work: Work, samples: Several[Sampled]) -> None:
        """Append the row's own token; the others are the first tokens of the children that are split off here."""
        if len(samples) > 1:
            self._fork(sequence, work, samples)
        sequence.tokens.append(samples[0].token)
        self._report(sequence, samples[0])

    def _fork(self, sequence: Sequence, work: Work, samples: Several[Sampled]) -> None:
        children = []
        for sample, sampled in zip(work.samples[1:], samples[1:], strict=True):
            child = sequence.fork(sample.child, sampled.token)
            self._sequences[child.key] = child
            self._children[child.request.id].add(child.child)
            children.append((child, sampled))
        sequence.forks = 0
        for child, sampled in children:
            if not self._report(child, sampled):
                self._place(child, sequence.table[: -(-work.end // self.limits.block_size)], work.end)

    def _report(self, sequence: Sequence, sampled: Sampled) -> bool:
        """Send the newest token of a sequence; True where it was the last."""
        token, emitted = sampled.token, sequence.emitted
        finish = stop_token = None
        if token in sequence.stops and emitted > sequence.params.min_tokens:
            finish, stop_token = "stop", token
        elif len(sequence.tokens) >= sequence.longest:
            finish = "length"
        self._counters.tokens_emitted += 1
        self._events.append(
            Emitted(sequence.key[0], sequence.child, emitted - 1, sampled, finish, stop_token, sequence.cached)
        )
        if finish is not None:
            self._end(sequence)
        return finish is not None

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
        found = self._match(sequence)
        room = self.pool.free + self.pool.cached - self.pool.unheld(found)
        return self._blocks(len(sequence.tokens)) - len(found) + promised <= room

    def _match(self, sequence: Sequence) -> tuple[int, ...]:
        """Cached blocks of its first tokens; the last one is always computed, since its logits are needed."""
        if not self.limits.prefix_caching:
            return ()
        most = (len(sequence.tokens) - 1) // self.limits.block_size
        return self.pool.index.match(sequence.names_of(most, self.limits.block_size))

    def _planned_blocks(self, ahead: Ahead) -> int:
        """Blocks that the next plan may take: of rows in any order, as far as the token budget goes."""
        needed = 0
        for sequence in self.running.values():
            start, table, _, owed = position_of(sequence, ahead)
            if owed:
                end = start + min(owed, self.budget.tokens)
                needed += max(0, self._blocks(end) - len(table)) + self.planner.must_copy(sequence, start, table)
        return needed

    def _short(self, ahead: Ahead) -> bool:
        """Whether some running row cannot advance by one token for want of a block."""
        room = self.pool.free + self.pool.limbo + self.pool.cached
        if room >= len(self.running):
            return False
        size, needed = self.limits.block_size, 0
        for sequence in self.running.values():
            start, table, _, owed = position_of(sequence, ahead)
            needed += owed > 0 and (start >= len(table) * size or self.planner.must_copy(sequence, start, table))
        return needed > room

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _admit(self, sequence: Sequence) -> None:
        """Run a sequence on the cached blocks of its first tokens, which it holds from here on."""
        found = self._match(sequence)
        self._run(sequence)
        if found:
            self.pool.share(found)
            sequence.table, sequence.computed = found, len(found) * self.limits.block_size
            sequence.loaded = False
        if not sequence.emitted:
            sequence.cached = sequence.computed
            self._counters.prefix_queries += sequence.prompt_length
            self._counters.prefix_hits += sequence.computed

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
        self.pool.drop(reversed(sequence.table))  # the end of a prefix is evicted before its beginning
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
