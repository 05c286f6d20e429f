"""Which tokens a grammar allows next, as a function of what has been emitted.

A matcher follows each sequence. Like all state of the device's (law 4) it is a function of position: whoever asks says
how many tokens have been emitted, and a matcher that is ahead of that, because a step failed or was dropped, is rolled
back; one that is behind, or was forgotten, reads the tokens it lacks. So retry, replay and preemption need no undo.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from surefoot.grammar import Compiler, GrammarError, brief
from surefoot.types import Grammar, Vocabulary, Work

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint8]
"""[token_count / 8, rounded up] bits, the lowest of a byte first: 1 where a token is allowed."""
Tail = Callable[[int], Sequence[int]]
"""The last so many tokens of what a sequence has emitted."""

COMPILED: Final = 64
"""Grammars that are kept compiled."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class DeadEnd(ValueError):
    """No token can follow, and why: this sequence is lost, others are not (law 11, ROW)."""


@dataclass
class Follower:
    """A matcher, and how many emitted tokens it stands behind.

    emitted   [ fed to the matcher ....... )[ end, and after it ... )
                                            fed                      read
    """

    grammar: Grammar
    matcher: LLMatcher
    fed: int = 0
    read: int = 0


class Grammars:
    """The matchers of the sequences that run, and of some that ran lately."""

    def __init__(self, *, eos: Sequence[int], token_count: int, rows: int) -> None:
        """`rows` is how many sequences run at once at most."""
        self._eos = frozenset(eos)
        self._token_count = token_count
        self._vocabulary: Vocabulary | None = None
        self._compiler: Compiler | None = None
        self._compiled: _Recent[Grammar, Future[LLMatcher]] = _Recent(COMPILED)
        self._followers: _Recent[tuple[int, int], Follower] = _Recent(2 * rows)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def learn(self, vocabulary: Vocabulary) -> None:
        """Keep it for the first grammar: a worker that meets none spends no time on it."""
        self._vocabulary, self._compiler = vocabulary, None

    def prepare(self, works: Iterable[Work]) -> None:
        """Begin to compile the grammars of rows that are new, while the step computes."""
        for work in works:
            if work.params.grammar is not None and self._followers.get(work.key) is None:
                self._begin(work.params.grammar)

    def _begin(self, grammar: Grammar) -> Future[LLMatcher]:
        found = self._compiled.get(grammar)
        if found is None:
            found = self._thread.submit(self._compile, grammar)
            self._compiled.put(grammar, found)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._vocabulary is None:
            raise GrammarError("the engine was not told what tokens stand for")
        if self._compiler is None:
            self._compiler = Compiler(self._vocabulary, sorted(self._eos))
        return self._compiler.compile(grammar)

    def allowed(self, work: Work, tail: Tail) -> Mask:
        """Tokens that may be drawn from the last logits of `work`, whose params have a grammar. Raises DeadEnd."""
        assert work.params.grammar is not None
        follower = self._follower(work.key, work.params.grammar)
        self._bring(follower, work.samples[0].index, tail)
        if follower.fed < follower.read:
            return self._only_eos()
        mask = np.frombuffer(follower.matcher.compute_bitmask(), dtype=np.uint8)
        if follower.matcher.is_error():
            raise DeadEnd(f"its grammar cannot go on: {brief(follower.matcher.get_error())}")
        size = -(-self._token_count // 8)
        return mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))

    def _follower(self, key: tuple[int, int], grammar: Grammar) -> Follower:
        found = self._followers.get(key)
        if found is None or found.grammar != grammar:
            try:
                found = Follower(grammar, self._begin(grammar).result().deep_copy())
            except GrammarError as error:
                raise DeadEnd(f"its grammar does not compile: {error}") from None
            self._followers.put(key, found)
        return found

    def _bring(self, follower: Follower, emitted: int, tail: Tail) -> None:
        """Have a follower stand behind exactly the first `emitted` tokens."""
        if follower.fed > emitted:
            if not follower.matcher.rollback(follower.fed - emitted):
                raise DeadEnd("its grammar cannot be taken back")
            follower.fed = emitted
        follower.read = min(follower.read, emitted)
        for token in tail(emitted - follower.read) if follower.read < emitted else ():
            self._read(follower, token)

    def _read(self, follower: Follower, token: int) -> None:
        open_still = follower.fed == follower.read
        if open_still and not (token in self._eos and follower.matcher.is_accepting()):
            if not follower.matcher.try_consume_tokens([token]):
                raise DeadEnd(f"its grammar does not allow token {token}, which was emitted")
            follower.fed += 1
        follower.read += 1

    def _only_eos(self) -> Mask:
        """After its end an output that goes on, since it ignores that, has nothing else to say."""
        bits = np.zeros(-(-self._token_count // 8) * 8, dtype=np.uint8)
        bits[[token for token in self._eos if token < self._token_count]] = 1
        return np.packbits(bits, bitorder="little")


class _Recent(Generic[_K, _V]):
    """The values that were asked for last."""

    def __init__(self, most: int) -> None:
        self._values: OrderedDict[_K, _V] = OrderedDict()
        self._most = most

    def get(self, key: _K) -> _V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: _K, value: _V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
