"""Streams at the pace of their reader, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import ClientDisconnect

from surefoot.api.sse import EventStream, frame, unless_disconnected
from surefoot.errors import RequestError


async def gone() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def staying() -> dict[str, str]:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits this long")


async def test_frame_is_one_line() -> None:
    """Newlines in the text are escaped: they would end the event."""
    assert frame({"text": "a\nb", "x": float("nan")}) == b'data: {"text":"a\\nb","x":null}\n\n'


async def test_result() -> None:
    """While the client stays, the work's result or exception is passed on."""
    assert await unless_disconnected(staying, asyncio.sleep(0, "done")) == "done"

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_disconnected(staying, fails())


async def test_disconnect_cancels_the_work() -> None:
    """When the client leaves the work is cancelled, and has ended when the exception arrives."""
    ended = False

    async def works() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            ended = True

    with pytest.raises(ClientDisconnect):
        await unless_disconnected(gone, works())
    assert ended


async def test_cancelling_the_caller_cancels_the_work() -> None:
    """Work does not outlive whoever waits for it."""
    work = asyncio.create_task(asyncio.sleep(60))
    caller = asyncio.create_task(unless_disconnected(staying, work))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.cancelled()


async def test_slow_reader() -> None:
    """Nothing is generated ahead of a reader that does not read, and generation ends when it leaves."""
    produced, closed, leave = 0, False, asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        nonlocal produced, closed
        try:
            while True:
                produced += 1
                yield b"x"
        finally:
            closed = True

    async def send(message: object) -> None:
        if produced:
            await asyncio.sleep(60)

    async def receive() -> dict[str, str]:
        await leave.wait()
        return {"type": "http.disconnect"}

    errors: list[RequestError] = []
    stream = EventStream(b"first", frames(), errors.append)
    running = asyncio.create_task(stream({"type": "http"}, receive, send))
    await asyncio.sleep(0.05)
    assert produced == 1
    leave.set()
    with pytest.raises(ClientDisconnect):
        await running
    assert closed
    assert not errors
