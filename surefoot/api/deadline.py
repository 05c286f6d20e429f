"""Deadlines: a request whose time is up is dropped in the engine and ends in an error, never as if it were done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from surefoot.api.engine import Engine, Handle
from surefoot.errors import Overloaded, TimedOut
from surefoot.types import Value

RETRY_AFTER = 5
"""Seconds after which a request that met no worker may come again."""


class Patience(Value, frozen=True, kw_only=True):
    """Seconds from a request's arrival; None is without end."""

    whole: float | None = None
    """Until its last token."""
    first_token: float | None = None
    """Until its first: queue and prompt."""

    def within(self, seconds: float | None) -> Patience:
        """With the request's own limit, which can only be tighter."""
        if seconds is None or (self.whole is not None and self.whole <= seconds):
            return self
        return Patience(whole=seconds, first_token=self.first_token)


class Deadline:
    """Watches over the handles of one request while it is entered. `waited` seconds of its time are gone already."""

    def __init__(self, patience: Patience, waited: float, handles: Sequence[Handle], engine: Engine) -> None:
        self._patience, self._waited = patience, waited
        self._handles, self._engine = handles, engine
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._verdict: str | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        limits = {"first_token_timeout": self._patience.first_token, "timeout": self._patience.whole}
        for name, seconds in limits.items():
            if seconds is not None:
                self._timers[name] = loop.call_later(max(0.0, seconds - self._waited), self._expire, name, seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def started(self) -> None:
        """The first token is there."""
        if (timer := self._timers.pop("first_token_timeout", None)) is not None:
            timer.cancel()

    def check(self) -> None:
        """Raises TimedOut where time was up before the request was done, Overloaded where there was no worker then."""
        if self._verdict is None:
            return
        if not self._engine.alive:
            raise Overloaded(f"{self._verdict} The engine's worker is being replaced.", retry_after=RETRY_AFTER)
        raise TimedOut(self._verdict)

    def _expire(self, name: str, seconds: float) -> None:
        what = "its first token" if name == "first_token_timeout" else "its end"
        self._verdict = f"The request did not come to {what} within {seconds:g} s ({name}) and was dropped."
        for handle in self._handles:
            handle.cancel()
