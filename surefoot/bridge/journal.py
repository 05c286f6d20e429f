"""What the worker is doing, written where its death does not reach: the rows of every plan that is in flight.

One page of memory that both processes map. The worker notes a plan before it launches and strikes it out when it has
been collected; whoever reads it after a death finds the plans that were running then, and so who may have caused it.

    slot (one per plan in flight)   [ rows, <q ][ request, <q ][ position, <q ][ request …
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Self

from surefoot.types import Executor, StepDone, StepFailed, StepPlan, Ticket, Vocabulary

PLANS = 2
"""Most plans in flight at once (`Limits.depth`)."""
MAX_ROWS = 4096
"""Rows of a plan that are noted; more than any server runs."""
_COUNT = struct.Struct("<q")
_ROW = struct.Struct("<qq")
_SLOT = _COUNT.size + MAX_ROWS * _ROW.size


class Journal:
    """The shared memory behind a file descriptor, which the worker inherits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, PLANS * _SLOT)

    @classmethod
    def create(cls) -> Self:
        """New and empty; the descriptor is closed with the object's `close`."""
        fd = os.memfd_create("surefoot-journal")
        os.ftruncate(fd, PLANS * _SLOT)
        return cls(fd)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    def begin(self, plan: StepPlan) -> None:
        """Note a plan that is about to be launched. The count comes last: a slot is whole or empty."""
        start = plan.id % PLANS * _SLOT
        works = plan.works[:MAX_ROWS]
        for row, work in enumerate(works):
            _ROW.pack_into(self._memory, start + _COUNT.size + row * _ROW.size, work.request, work.start)
        _COUNT.pack_into(self._memory, start, len(works))

    def end(self, plan: int) -> None:
        """The plan with this id is over."""
        _COUNT.pack_into(self._memory, plan % PLANS * _SLOT, 0)

    def in_flight(self) -> dict[int, int]:
        """Requests of the plans that have begun and not ended, and the least position each was computing."""
        found: dict[int, int] = {}
        for start in range(0, PLANS * _SLOT, _SLOT):
            (count,) = _COUNT.unpack_from(self._memory, start)
            for row in range(min(max(count, 0), MAX_ROWS)):
                request, position = _ROW.unpack_from(self._memory, start + _COUNT.size + row * _ROW.size)
                found[request] = min(position, found.get(request, position))
        return found


class Journaled:
    """An executor that notes what it is doing."""

    def __init__(self, inner: Executor, journal: Journal) -> None:
        self._inner = inner
        self._journal = journal

    def launch(self, plan: StepPlan) -> Ticket:
        self._journal.begin(plan)
        return self._inner.launch(plan)

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        outcome = self._inner.collect(ticket)
        self._journal.end(ticket.plan)
        return outcome

    def free_memory(self) -> int:
        return self._inner.free_memory()

    def move(self, pairs: Sequence[tuple[int, int]]) -> str | None:
        return self._inner.move(pairs)

    def hold(self, blocks: int) -> str | None:
        return self._inner.hold(blocks)

    def learn(self, vocabulary: Vocabulary) -> None:
        self._inner.learn(vocabulary)
