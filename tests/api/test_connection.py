"""Connections that send or read too slowly, against a real listening socket and a tiny application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from surefoot.api import connection

OK = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
ENDLESS = {"type": "http.response.start", "status": 200, "headers": []}
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Application:
    """Reads the body, then says ok; /endless sends until the client is gone, and counts those that went."""

    def __init__(self) -> None:
        self.gone = 0
        self.body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] != "/endless":
            await send(OK)
            await send({"type": "http.response.body", "body": b"ok"})
            return
        await send(ENDLESS)
        watch = asyncio.ensure_future(receive())
        while not watch.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        self.gone += 1


@asynccontextmanager
async def served(application: Application) -> AsyncIterator[int]:
    """The port of a server with this application."""
    config = uvicorn.Config(application, port=0, http=connection.BoundedProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@asynccontextmanager
async def connected(port: int, sent: bytes) -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit of time is 0.2 s."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)


def test_long_headers_are_refused() -> None:
    """Headers that never end get a 431 and a closed connection, not memory without bound; the next client is served."""

    # One byte too many, so that all of it is read: closing on bytes that are not would reset the connection.
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX: ".ljust(connection.MAX_HEAD + 1, b"a")

    async def run() -> tuple[bytes, bytes]:
        async with served(Application()) as port:
            async with connected(port, head) as (reader, _):
                refused = await asyncio.wait_for(reader.read(), 5)
            async with connected(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as (reader, _):
                return refused, await asyncio.wait_for(reader.read(), 5)

    refused, answered = asyncio.run(run())
    assert refused.startswith(b"HTTP/1.1 431 ")
    assert answered.startswith(b"HTTP/1.1 200 ")


def test_an_offer_to_upgrade_is_ignored() -> None:
    """A request that offers HTTP/2 is answered in HTTP/1.1, with its body read."""
    offer = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    request = b"POST / HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Length: 4\r\n\r\nbody"

    async def run() -> tuple[bytes, bytes]:
        application = Application()
        async with served(application) as port, connected(port, request) as (reader, _):
            return await asyncio.wait_for(reader.read(), 5), application.body

    answer, body = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert body == b"body"


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HTTP/1.1\r\nHost:", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
@pytest.mark.usefixtures("impatient")
def test_a_request_that_stops_coming_is_dropped(sent: bytes) -> None:
    """A client that sends nothing, or stops in the middle of a request, loses its connection."""

    async def run() -> None:
        async with served(Application()) as port, connected(port, sent) as (reader, _):
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 5) == b""

    asyncio.run(run())


@pytest.mark.usefixtures("impatient")
def test_a_head_sent_by_drops_is_dropped() -> None:
    """The time for a head counts from its first byte: single bytes do not prolong it."""

    async def run() -> None:
        async with served(Application()) as port, connected(port, b"GET / HTTP/1.1\r\nX: ") as (reader, writer):
            for _ in range(30):
                writer.write(b"a")
                await asyncio.sleep(0.05)
                if reader.at_eof() or writer.is_closing():
                    return
        raise AssertionError("the connection is still there")

    asyncio.run(run())


@pytest.mark.usefixtures("impatient")
def test_a_reader_that_stops_reading_is_dropped() -> None:
    """An answer that nobody takes is cancelled, as if the client had left."""

    async def run() -> int:
        application = Application()
        async with (
            served(application) as port,
            connected(port, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n") as (_, writer),
        ):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(100):
                if application.gone:
                    break
                await asyncio.sleep(0.05)
            return application.gone

    assert asyncio.run(run()) == 1


@pytest.mark.usefixtures("impatient")
def test_a_patient_client_is_left_alone() -> None:
    """Between two requests on one connection the keep-alive timeout counts, not those for heads and bodies."""
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

    async def run() -> bytes:
        async with served(Application()) as port, connected(port, request) as (reader, writer):
            first = await asyncio.wait_for(reader.readuntil(b"ok"), 5)
            await asyncio.sleep(0.5)
            writer.write(request)
            return first + await asyncio.wait_for(reader.readuntil(b"ok"), 5)

    assert asyncio.run(run()).count(b"200") == 2
