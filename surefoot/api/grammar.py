"""Grammars are tried out before they are let in: in a helper process, within limits, and only once each."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from surefoot.api.grammar_helper import CPU_SECONDS, MEMORY, Setup, Verdict, receive, send
from surefoot.bridge.supervisor import worker_environment
from surefoot.config import format_bytes
from surefoot.errors import InvalidRequest, Overloaded
from surefoot.types import Grammar, Vocabulary

HELPERS: Final = 2
"""Grammars that are tried at once; one that is too costly holds up one helper for its seconds."""
MAX_WAITING: Final = 64
REMEMBERED: Final = 512
PATIENCE: Final = 30.0
"""Seconds for an answer, on the clock: a helper that takes longer is stuck, or the machine is."""


class Checker:
    """Says whether grammars compile. Helpers start with the first grammar, and end with this object."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], eos: Sequence[int]) -> None:
        self._vocabulary, self._eos = vocabulary, tuple(eos)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._threads = ThreadPoolExecutor(HELPERS, thread_name_prefix="grammar")
        self._local = threading.local()
        self._helpers: set[subprocess.Popen[bytes]] = set()
        self._waiting = 0
        weakref.finalize(self, _end, self._helpers)

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest where the grammar does not compile, or not within the limits."""
        name = hashlib.blake2b(grammar.source.encode()).digest()
        if name not in self._verdicts:
            self._verdicts[name] = await self._tried(grammar)
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        verdict, field = self._verdicts[name], grammar.field
        if verdict.costly:
            raise InvalidRequest(
                f"{field} is too costly: compiling it takes more than {CPU_SECONDS} s of processor time or "
                f"{format_bytes(MEMORY)} of memory. Make it simpler.",
                param=field,
            )
        if verdict.error is not None:
            raise InvalidRequest(f"{field} cannot be used: {verdict.error}", param=field)

    async def _tried(self, grammar: Grammar) -> Verdict:
        if self._waiting >= MAX_WAITING:
            raise Overloaded("Too many grammars wait to be compiled. Try again later.", retry_after=CPU_SECONDS)
        self._waiting += 1
        try:
            verdict = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, grammar)
        finally:
            self._waiting -= 1
        if verdict is None:
            raise Overloaded("No helper answered whether the grammar compiles. Try again.", retry_after=CPU_SECONDS)
        return verdict

    def _ask(self, grammar: Grammar) -> Verdict | None:
        """In a thread that has its own helper: what came of it, None where that died or had to be ended."""
        try:
            helper = self._helper()
        except OSError:
            return None
        assert helper.stdin is not None and helper.stdout is not None
        alarm = threading.Timer(PATIENCE, helper.kill)
        alarm.start()
        try:
            send(helper.stdin, grammar)
            verdict = receive(helper.stdout, Verdict)
        except (OSError, msgspec.MsgspecError):
            verdict = None
        finally:
            alarm.cancel()
        if verdict is None:
            self._helpers.discard(helper)
            _end({helper})
            del self._local.helper
        return verdict

    def _helper(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._local, "helper"):
            helper = subprocess.Popen(
                [sys.executable, "-P", "-m", "surefoot.api.grammar_helper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=worker_environment(os.environ),
                process_group=0,
            )
            self._helpers.add(helper)
            self._local.helper = helper
            assert helper.stdin is not None
            send(helper.stdin, Setup(vocabulary=self._vocabulary(), eos=self._eos))
        found: subprocess.Popen[bytes] = self._local.helper
        return found


def _end(helpers: set[subprocess.Popen[bytes]]) -> None:
    for helper in helpers:
        helper.kill()
        for pipe in (helper.stdin, helper.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it went in the middle of a message
                    pipe.close()
        helper.wait()
    helpers.clear()
