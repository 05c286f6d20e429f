"""One HTTP connection, held to limits, so that strangers who send or read slowly cost next to nothing.

head          MAX_HEAD bytes, and HEAD_SECONDS from its first byte (or from the connection's start) to its last
body          STALL_SECONDS without a byte end it; its size is limited where it is read
answer        STALL_SECONDS without a byte taken end it, and the request is cancelled like that of a client who left
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD: Final = 64 << 10
"""Bytes of request line and headers together."""
HEAD_SECONDS: Final = 60.0
STALL_SECONDS: Final = 60.0

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 40\r\nconnection: close\r\n\r\n"
    b"The headers of the request are too long."
)


def without_upgrade(data: bytes) -> bytes:
    """The head of a request without the offer to change to HTTP/2 or a WebSocket, which a server may ignore.

    Java's client makes one by default, and the parser would stop there and lose the body.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return re.sub(rb"(?i)\r\nupgrade:", b"\r\nx-upgrade:", head) + end + body


class Deadline:
    """A timer that can be set, and cleared; `then` is called when it runs out."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        return self._timer is not None

    def start(self, seconds: float) -> None:
        """From now on, whatever was set before."""
        self.clear()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._then)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with those limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sending, self._reading = Deadline(transport.abort), Deadline(transport.abort)
        self._head: int | None = 0  # bytes of it so far; None while a body is due
        self._sending.start(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sending.clear()
        self._reading.clear()
        super().connection_lost(exc)

    # ---- what the client sends --------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
            if not self._sending.running:
                self._sending.start(HEAD_SECONDS)
            data = without_upgrade(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head is None:
            self._sending.start(STALL_SECONDS)
        elif self._head > MAX_HEAD:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head = 0
        self._sending.clear()
        super().on_message_complete()

    # ---- what the client takes --------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start(STALL_SECONDS)

    def resume_writing(self) -> None:
        self._reading.clear()
        super().resume_writing()
