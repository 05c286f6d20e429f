"""The test seam: an executor without a device, that can fail on cue.

`FakeExecutor` keeps what a device would keep (KV entries by block and offset, a token pool by slot and position) and
draws tokens that depend on every entry it reads. A scheduler that reads a stale block, advances before it ran, or
forgets a copy therefore produces other text than `expected_tokens`, which computes the same from the tokens alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from surefoot.types import (
    PENDING,
    FailureKind,
    Limits,
    Request,
    RowDone,
    Sampled,
    StepDone,
    StepFailed,
    StepPlan,
    Ticket,
    Vocabulary,
    Work,
)

_SPACE = (1 << 61) - 1


def _entry(before: int, token: int) -> int:
    """KV entry of a position: depends on its token and on everything before it."""
    return hash((before, token, 0x5F)) % _SPACE


def _draw(entries: Sequence[int], history: Sequence[int], seed: int, index: int, vocabulary: int) -> int:
    return hash((sum(entries) % _SPACE, sum(history), seed, index)) % vocabulary


def expected_tokens(
    prompt: Sequence[int], seed: int, count: int, vocabulary: int, stops: Sequence[int] = ()
) -> list[int]:
    """The `count` tokens that a FakeExecutor draws after `prompt`, fewer where one of `stops` comes up."""
    tokens, entries, before = list(prompt), [], 0
    for token in prompt:
        before = _entry(before, token)
        entries.append(before)
    for index in range(count):
        tokens.append(_draw(entries, tokens, seed, index, vocabulary))
        before = _entry(before, tokens[-1])
        entries.append(before)
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class BrokenDiscipline(AssertionError):
    """A plan that a real device could not run safely beside the ones in flight."""


class FakeExecutor:
    """Runs plans on Python lists, at `collect` and in order, as a busy device would.

    `fails(plan)` may return a StepFailed to fail a plan (control steps too); it then leaves garbage in every position
    that the plan was to write. `bad_row(work)` may name an error for one row. `free` is what `free_memory` reports,
    `most_blocks` how many KV blocks there is memory for, and `moves` whether blocks can be moved.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        vocabulary: int = 1000,
        fails: Callable[[StepPlan], StepFailed | None] = lambda plan: None,
        bad_row: Callable[[Work], str | None] = lambda work: None,
    ) -> None:
        self.vocabulary = vocabulary
        self.fails = fails
        self.bad_row = bad_row
        self.free = 1 << 30
        self.plans: list[StepPlan] = []
        self.most_blocks = limits.num_blocks
        self.moves = True
        self._held = limits.num_blocks
        self._size = limits.block_size
        self._depth = limits.depth
        self._kv: dict[tuple[int, int], int] = {}  # (block, offset) → entry
        self._pool: dict[tuple[int, int], int] = {}  # (slot, position) → token
        self._queue: deque[StepPlan] = deque()

    def free_memory(self) -> int:
        return self.free

    def move(self, pairs: Sequence[tuple[int, int]]) -> str | None:
        if self._queue:
            raise BrokenDiscipline("blocks move under a plan in flight")
        if {source for source, _ in pairs} & {destination for _, destination in pairs}:
            raise BrokenDiscipline("a block is moved and overwritten at once")
        if not self.moves:
            return "blocks cannot be moved (injected)"
        for source, destination in pairs:
            for offset in range(self._size):
                self._kv[destination, offset] = self._kv.get((source, offset), -1)
        return None

    def hold(self, blocks: int) -> str | None:
        if self._queue:
            raise BrokenDiscipline("memory changes under a plan in flight")
        if blocks > self.most_blocks:
            return f"there is memory for {self.most_blocks} blocks"
        self._held = blocks
        self._kv = {place: entry for place, entry in self._kv.items() if place[0] < blocks}
        return None

    def learn(self, vocabulary: Vocabulary) -> None:
        """Its tokens stand for nothing."""

    def launch(self, plan: StepPlan) -> Ticket:
        self._check(plan)
        self.plans.append(plan)
        self._queue.append(plan)
        return Ticket(plan.id)

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        plan = self._queue.popleft()
        if plan.id != ticket.plan:
            raise BrokenDiscipline(f"plan {ticket.plan} collected before plan {plan.id}")
        failure = self.fails(plan)
        if failure is not None:
            self._scribble(plan)
            return failure
        for source, destination in plan.copies:
            for offset in range(self._size):
                self._kv[destination, offset] = self._kv.get((source, offset), -1)
        return StepDone(plan=plan.id, rows=tuple(self._row(work) for work in plan.works))

    def _row(self, work: Work) -> RowDone:
        for position, token in enumerate(work.known or ()):
            self._pool[work.slot, position] = token
        before = self._read(work.table, work.start - 1) if work.start else 0
        for position, given in enumerate(work.tokens, work.start):
            token = self._pool.get((work.slot, position), 0) if given == PENDING else given
            self._pool[work.slot, position] = token
            before = _entry(before, token)
            self._kv[work.table[position // self._size], position % self._size] = before
        error = self.bad_row(work)
        if error is not None:
            return RowDone(error=error)
        if not work.samples:
            return RowDone()
        entries = [self._read(work.table, position) for position in range(work.end)]
        history = [self._pool.get((work.slot, position), 0) for position in range(work.end)]
        drawn = [_draw(entries, history, sample.seed, sample.index, self.vocabulary) for sample in work.samples]
        self._pool[work.slot, work.end] = drawn[0]
        return RowDone(samples=tuple(Sampled(token) for token in drawn))

    def _read(self, table: tuple[int, ...], position: int) -> int:
        return self._kv.get((table[position // self._size], position % self._size), -1)

    def _scribble(self, plan: StepPlan) -> None:
        """What a failed plan was to write is scratch: leave garbage there (law 4)."""
        for work in plan.works:
            for position in range(work.start, len(work.table) * self._size):
                self._kv[work.table[position // self._size], position % self._size] = -plan.id - 2

    def _check(self, plan: StepPlan) -> None:
        """What every plan must respect beside the plans in flight."""
        if len(self._queue) >= self._depth:
            raise BrokenDiscipline(f"plan {plan.id} is one too many in flight")
        rows = Counter(work.key for work in plan.works)
        slots = Counter(work.slot for work in plan.works)
        if max([*rows.values(), *slots.values()], default=0) > 1:
            raise BrokenDiscipline(f"plan {plan.id} names a row or a slot twice")
        named = {block: work.key for other in self._queue for work in other.works for block in work.table}
        written: set[int] = set()
        for work in plan.works:
            blocks = work.table[work.start // self._size :]
            if max(work.table, default=0) >= self._held:
                raise BrokenDiscipline(f"plan {plan.id}: row {work.key} names a block that has no memory")
            if len(work.table) * self._size < work.end or written & set(blocks):
                raise BrokenDiscipline(f"plan {plan.id}: row {work.key} writes where it must not")
            written.update(blocks)
            for block in blocks:
                if named.get(block, work.key) != work.key:
                    raise BrokenDiscipline(f"plan {plan.id} writes block {block}, which a plan in flight names")


def request_of(id: int, prompt: Sequence[int], **params: object) -> Request:
    """A Request for tests: greedy, seeded with its id, eight tokens, unless `params` say otherwise."""
    from array import array

    from surefoot.types import SamplingParams

    settings: dict[str, object] = {"temperature": 0.0, "seed": id, "max_tokens": 8, "ignore_eos": True}
    priority, salt = params.pop("priority", 0), params.pop("salt", "")
    assert isinstance(priority, int)
    assert isinstance(salt, str)
    sampling = SamplingParams(**(settings | params))  # type: ignore[arg-type]
    return Request(id=id, prompt=array("i", prompt).tobytes(), params=sampling, priority=priority, salt=salt)


def out_of_memory(plan: StepPlan, *, needed: int | None = None, free: int | None = None) -> StepFailed:
    """The failure of a step that could not be allocated."""
    return StepFailed(plan=plan.id, kind=FailureKind.OOM, reason="out of memory (injected)", needed=needed, free=free)
