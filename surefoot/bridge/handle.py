"""One admitted request, as its caller holds it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from surefoot.errors import RequestError
from surefoot.types import Emitted, Request, Resumed

Dropped = Callable[["RequestHandle", "int | None"], None]


class RequestHandle:
    """The life of one admitted request: an async iterator over what each step emitted, for all children together.

    Raises InsufficientMemory or EngineFailure where the request fails. Leaving an `async with` block, `aclose`,
    `cancel` and cancelling the waiting task all drop the request in the engine. What was emitted is kept, so that a
    worker's death costs a pause and nothing else.
    """

    def __init__(self, request: Request, dropped: Dropped) -> None:
        self.id = request.id
        self.prompt_tokens = len(request.prompt) // 4
        self.started = False
        """True once a token was emitted: the request no longer counts as queued."""
        self._request = request
        self._dropped = dropped
        self._live = set(range(request.params.n))
        self._emitted = {child: array("i") for child in self._live}
        self._pending: list[Emitted] = []
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        """True when nothing more will be emitted."""
        return not self._live

    @property
    def tokens(self) -> int:
        """Of the prompt and of all live children."""
        return self.prompt_tokens + sum(len(self._emitted[child]) for child in self._live)

    def request(self) -> Request:
        """What a worker needs to do the rest: the request, or its live children with what they have emitted."""
        if not self.started and len(self._live) == self._request.params.n:
            return self._request
        rest = tuple(Resumed(child=child, emitted=self._emitted[child].tobytes()) for child in sorted(self._live))
        return replace(self._request, resumed=rest)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Emitted]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._live:
                raise StopAsyncIteration
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        events, self._pending = self._pending, []
        return events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def aclose(self) -> None:
        """Drop the request, wherever it stands."""
        self.cancel()

    def cancel(self, child: int | None = None) -> None:
        """Drop one child, or all of them. Nothing that is already done minds."""
        dropped = self._live & ({child} if child is not None else self._live)
        if dropped:
            self._live -= dropped
            self._pending = [event for event in self._pending if event.child not in dropped]
            self._dropped(self, child)
            self._news.set()

    # ---- for the client ---------------------------------------------------------------------------------------------

    def emit(self, event: Emitted) -> None:
        """A token arrived; one that was told before is not told again."""
        if event.child in self._live and event.index == len(self._emitted[event.child]):
            self.started = True
            self._emitted[event.child].append(event.sampled.token)
            self._pending.append(event)
            if event.finish is not None:
                self._live.discard(event.child)
            self._news.set()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._live.clear()
        self._news.set()
