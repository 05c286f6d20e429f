"""Server-sent events, and noticing at once that the client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from surefoot.errors import EngineFailure, RequestError

DONE: Final = b"data: [DONE]\n\n"
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


def frame(payload: Any) -> bytes:
    """One event that carries `payload` as JSON, which never holds a raw newline."""
    return b"data: " + _encode(payload) + b"\n\n"


def event_frame(name: str, payload: Any) -> bytes:
    """One event with a name of its own."""
    return b"event: " + name.encode() + b"\n" + frame(payload)


async def unless_disconnected(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client goes away; raises ClientDisconnect then.

    The request's body must have been read: what `receive` has left to say is that the client is gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends frames as they come, at the pace of the reader.

    A failure after the headers went out becomes one event with the error, and then the body ends without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        frames: AsyncGenerator[bytes, None],
        on_error: Callable[[RequestError], None],
        last_words: Callable[[RequestError], bytes] = lambda error: frame(error.body()),
    ) -> None:
        super().__init__()
        self._words = last_words
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._first, self._frames, self._on_error = first, frames, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await _part(send, self._first)
        try:
            async for data in self._frames:
                await _part(send, data)
        except RequestError as error:
            await self._last_words(send, error)
        except OSError as error:
            raise ClientDisconnect from error
        except Exception:
            _log.exception("a stream failed unexpectedly")
            await self._last_words(send, EngineFailure("Internal error; the server's log has the details."))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _last_words(self, send: Send, error: RequestError) -> None:
        self._on_error(error)
        await _part(send, self._words(error))


async def _part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
