"""A server that sleeps has no worker, and so holds nothing; who comes is served all the same."""

from __future__ import annotations

import asyncio

import pytest

from surefoot.bridge.client import EngineClient
from surefoot.errors import Overloaded
from surefoot.testing import expected_tokens
from tests.bridge.support import params
from tests.bridge.test_replacement import _importable as _importable
from tests.bridge.test_replacement import eventually, serving, texts


async def sent_to_sleep(client: EngineClient) -> None:
    await client.sleep()
    await eventually(lambda: not client.alive)
    assert (client.sleeping, client.worker_pid, client.stalled, client.lost) == (True, None, False, False)


async def test_a_request_wakes_a_sleeping_server() -> None:
    """The worker is gone while it sleeps; a request starts another, waits for it and gets its text. That is no death,
    and counters go on.
    """
    async with serving() as client:
        before = await texts(client.submit([3, 4], params(max_tokens=20)))
        steps = client.snapshot.steps
        await sent_to_sleep(client)
        await client.sleep()  # it does already
        assert client.snapshot.steps >= steps
        assert (
            await texts(client.submit([3, 4], params(max_tokens=20)))
            == before
            == {0: expected_tokens([3, 4], 1, 20, 1000)}
        )
        assert (client.sleeping, client.alive, client.restarts) == (False, True, 0)


async def test_wake_waits_for_the_worker() -> None:
    """`wake` returns when requests are served again, and does nothing to a server that is awake."""
    async with serving() as client:
        await client.wake()
        await sent_to_sleep(client)
        await client.wake()
        assert client.ready
        assert client.worker_pid is not None


async def test_a_busy_server_does_not_sleep() -> None:
    """While a request is in flight `sleep` is refused, and the request goes on."""
    async with serving() as client:
        handle = client.submit([5] * 5, params(max_tokens=300))
        with pytest.raises(Overloaded, match="1 requests are in flight"):
            await client.sleep()
        assert await texts(handle) == {0: expected_tokens([5] * 5, 1, 300, 1000)}


async def test_it_sleeps_when_nobody_has_asked_for_long_enough() -> None:
    """With `sleep_after` a worker that has nothing to do ends by itself, again and again."""
    async with serving(sleep_after=0.3) as client:
        for _ in range(2):
            await eventually(lambda: client.sleeping and not client.alive)
            await texts(client.submit([3, 4], params(max_tokens=20)))
            assert client.alive


async def test_a_sleeping_server_can_be_stopped() -> None:
    """Stopping ends it without waking it."""
    async with serving() as client:
        await sent_to_sleep(client)
        async with asyncio.timeout(5):
            await client.stop()
        assert not client.alive
