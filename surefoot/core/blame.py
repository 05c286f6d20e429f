"""Who made a step fail: found out by running less, never by who came first (law 8).

The rows of a failed plan become suspects. From then on steps alternate:

    (a) others   everybody else, and suspects in a proven shape: a one-token decode by a row that has decoded before
    (b) trial    half of the suspects with half of their tokens

A commit clears its rows. A suspect alone at the floor of one block is struck only if a control step (one padding row,
same kernels, nobody's tokens) succeeds right after it; five strikes fail it. If (a) fails as well, a control step
decides: passing, the rows of (a) are suspects too, and without a proven shape where all of them were in it; failing,
the fault is the card's, and everybody waits with a back-off while nobody is failed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from surefoot.core.blocks import Key
from surefoot.types import StepPlan

STRIKES = 5
FIRST_WAIT, LAST_WAIT = 0.05, 5.0


class Kind(enum.Enum):
    """What a turn runs."""

    OTHERS = "others"
    TRIAL = "trial"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Turn:
    """Who may run in the next step. `caps` limits each row of a trial; `held` are the suspects left out of (a)."""

    kind: Kind
    caps: dict[Key, int]
    held: frozenset[Key] = frozenset()
    unproven: frozenset[Key] = frozenset()
    """Suspects that may not even decode in (a)."""


EVERYBODY = Turn(Kind.OTHERS, {})
CONTROL = Turn(Kind.CONTROL, {})


@dataclass(slots=True)
class Suspect:
    """A row of a failed plan. `cap` is the most tokens of its next trial."""

    cap: int
    strikes: int = 0
    proven: bool = True


class Blame:
    """Suspects and verdicts. `floor` is one block of tokens."""

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._suspects: dict[Key, Suspect] = {}  # in the order of their trials
        self._size = 1  # rows in the next trial
        self._trial_next = False
        self._alone: Key | None = None  # waits for the control step that decides on a strike
        self._doubtful: StepPlan | None = None  # a failed (a), waiting for the control step that decides on the card
        self._card_full = False
        self._wait = FIRST_WAIT
        self.wait_until = 0.0
        self.convicted: Key | None = None
        """A suspect with five strikes, until the engine has failed it."""

    @property
    def active(self) -> bool:
        """While somebody is suspected the pipeline stays one plan deep."""
        return bool(self._suspects) or self._card_full or self._doubtful is not None

    @property
    def suspects(self) -> int:
        return len(self._suspects)

    def turns(self, lives: Callable[[Key], bool], runs: Callable[[Key], bool]) -> Iterator[Turn]:
        """The next step's turns, best first: the engine takes the first that has work."""
        for key in [key for key in self._suspects if not lives(key)]:
            self._acquit(key)
        if self._alone is not None or self._doubtful is not None or self._card_full:
            yield CONTROL
            return
        if not self._suspects:
            yield EVERYBODY
            return
        keys = [key for key in self._suspects if runs(key)][: self._size]
        trial = Turn(Kind.TRIAL, {key: self._suspects[key].cap for key in keys})
        unproven = frozenset(key for key, suspect in self._suspects.items() if not suspect.proven)
        others = Turn(Kind.OTHERS, {}, held=frozenset(self._suspects), unproven=unproven)
        yield from (trial, others) if self._trial_next else (others, trial)

    def committed(self, turn: Turn, plan: StepPlan, now: float) -> None:
        """A plan of this turn went well: its rows are innocent, the card is."""
        if turn.kind is Kind.CONTROL:
            self._control_passed()
            return
        self._wait = FIRST_WAIT
        for work in plan.works:
            self._acquit(work.key)
        self._alternate(turn)
        if turn.kind is Kind.TRIAL:
            self._size = max(1, min(2 * self._size, (len(self._suspects) + 1) // 2))

    def failed(self, turn: Turn, plan: StepPlan, now: float) -> bool:
        """A plan of this turn failed. True where the card itself is at fault, and room should be made."""
        if turn.kind is Kind.CONTROL:
            return self._control_failed(now)
        self._alternate(turn)
        if turn.kind is Kind.TRIAL:
            self._trial_failed(plan)
        elif self._suspects:
            self._doubtful = plan
        else:
            for work in plan.works:
                self._suspects[work.key] = Suspect(max(self._floor, len(work.tokens) // 2))
            self._size = (len(plan.works) + 1) // 2
        return False

    def _acquit(self, key: Key) -> None:
        self._suspects.pop(key, None)
        if self._alone == key:
            self._alone = None

    def _alternate(self, turn: Turn) -> None:
        self._trial_next = turn.kind is Kind.OTHERS and bool(self._suspects)

    def _trial_failed(self, plan: StepPlan) -> None:
        """Half of the rows next time, with half of their tokens; the failed ones queue again behind the others."""
        for work in plan.works:
            suspect = self._suspects.pop(work.key, None)
            if suspect is None:
                continue  # it ended meanwhile
            suspect.cap = max(self._floor, len(work.tokens) // 2)
            self._suspects[work.key] = suspect
        if len(plan.works) == 1 and plan.tokens <= self._floor and plan.works[0].key in self._suspects:
            self._alone = plan.works[0].key
        self._size = max(1, len(plan.works) // 2)

    def _control_passed(self) -> None:
        self._card_full = False
        self._wait = FIRST_WAIT
        if self._alone is not None:
            suspect = self._suspects[self._alone]
            suspect.strikes += 1
            if suspect.strikes >= STRIKES:
                self.convicted = self._alone
            self._alone = None
        if self._doubtful is not None:
            self._suspect_others(self._doubtful)
            self._doubtful = None

    def _suspect_others(self, plan: StepPlan) -> None:
        """Rows of a failed (a): a prefill among them is the likelier culprit, and leaves the decoders their shape."""
        mixed = any(not work.decoding for work in plan.works)
        for work in plan.works:
            suspect = self._suspects.setdefault(work.key, Suspect(self._floor))
            suspect.cap = max(self._floor, len(work.tokens) // 2)
            suspect.proven = mixed
        self._size = (len(self._suspects) + 1) // 2

    def _control_failed(self, now: float) -> bool:
        """Nobody's tokens failed as well: strike nobody, wait, and let a control step say when it is over."""
        self._alone = None
        self._doubtful = None
        self._card_full = True
        self.wait_until = now + self._wait
        self._wait = min(LAST_WAIT, 2 * self._wait)
        return True
