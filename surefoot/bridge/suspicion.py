"""Which request kills workers (law 11): a few deaths tell, and no kill from outside convicts anybody.

    death ──▶ rows of the plans in flight are suspects, and everybody goes on
    death again, suspects that came no further than before ──▶ half of them go on, the others wait
        that half comes PAST tokens further ──▶ cleared; the next half goes on
        death again ──▶ it was among that half: halve it
    one left that has killed alone, CERTAIN deaths in all ──▶ it fails, alone

Pure bookkeeping: the client tells of deaths and progress, and asks who has to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PAST = 16
"""Tokens past the position of death after which a request is no suspect any more."""
CERTAIN = 3
"""Deaths that a request must have been in, the last of them as the only suspect, before it is failed."""


class Suspicion:
    """Requests by id. A request in nobody's mind is neither held nor watched."""

    def __init__(self) -> None:
        self._position: dict[int, int] = {}  # where each suspect was at its last death
        self._deaths: dict[int, int] = {}
        self._trial: list[int] = []
        self._held: list[list[int]] = []  # groups that wait; the killer is likeliest in the last

    @property
    def trial(self) -> tuple[int, ...]:
        """Suspects that run now."""
        return tuple(self._trial)

    @property
    def held(self) -> frozenset[int]:
        """Requests that must wait until those on trial are cleared."""
        return frozenset(request for group in self._held for request in group)

    def died(self, in_flight: Mapping[int, int]) -> int | None:
        """The worker died while it ran these requests at these positions; returns the one that is convicted."""
        stuck = [r for r in self._trial if r in in_flight and in_flight[r] <= self._position[r]]
        again = bool(stuck)
        if not again:  # the first death of these, or one that has nothing to do with the last
            self._clear([*self._trial, *self.held])
            stuck = sorted(in_flight)
        else:
            self._clear(set(self._trial) - set(stuck))
        for request in stuck:
            self._position[request] = in_flight[request]
            self._deaths[request] = self._deaths.get(request, 0) + 1
        if again and len(stuck) == 1 and self._deaths[stuck[0]] >= CERTAIN:
            self.forget(stuck[0])
            return stuck[0]
        self._try(stuck, -(-len(stuck) // 2) if again else len(stuck))
        return None

    def progressed(self, request: int, position: int) -> bool:
        """A request has computed up to `position`; True if others may go on now."""
        if request in self._position and position >= self._position[request] + PAST:
            return self.forget(request)
        return False

    def forget(self, request: int) -> bool:
        """A request came far enough, ended or left; True if others may go on now."""
        if request not in self._position:
            return False
        self._clear([request])
        if self._trial or not self._held:
            return False
        group = self._held.pop()
        self._try(group, -(-len(group) // 2))
        return True

    def _try(self, group: list[int], count: int) -> None:
        """Put the first `count` of a group on trial; the others wait."""
        self._trial = group[:count]
        if group[count:]:
            self._held.append(group[count:])

    def _clear(self, requests: Iterable[int]) -> None:
        gone = set(requests)
        for request in gone:
            self._position.pop(request, None)
            self._deaths.pop(request, None)
        self._trial = [request for request in self._trial if request not in gone]
        groups = ([request for request in group if request not in gone] for group in self._held)
        self._held = [group for group in groups if group]
