"""Workers that die and are replaced: real processes with a fake device. Nothing is lost, and nothing told twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from surefoot.bridge import supervisor, watch
from surefoot.bridge.client import EngineClient
from surefoot.bridge.handle import RequestHandle
from surefoot.bridge.policy import Policy
from surefoot.config import EngineConfig
from surefoot.errors import EngineFailure
from surefoot.testing import expected_tokens
from tests.bridge.fake_worker import POISON
from tests.bridge.support import params

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@asynccontextmanager
async def serving(*mode: str, **policy: object) -> AsyncIterator[EngineClient]:
    def spawn() -> supervisor.WorkerProcess:
        return supervisor.spawn(("-m", "tests.bridge.fake_worker", *mode))

    chosen = Policy(**{"max_restarts": 12, **policy})  # type: ignore[arg-type]
    client = await EngineClient.start(EngineConfig(), spawn=spawn, policy=chosen)
    try:
        yield client
    finally:
        await client.stop()


async def texts(handle: RequestHandle) -> dict[int, list[int]]:
    """Tokens by child; each index comes once and in order."""
    found: dict[int, list[int]] = defaultdict(list)
    async for events in handle:
        for event in events:
            assert event.index == len(found[event.child])
            found[event.child].append(event.sampled.token)
    return found


async def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - whatever the worker tells
            await asyncio.sleep(0.01)


def kill(client: EngineClient, number: int = signal.SIGKILL) -> None:
    assert client.worker_pid is not None
    os.kill(client.worker_pid, number)


async def test_streams_go_on_where_they_stood() -> None:
    """After three `kill -9` eight streams, and one of three children, have the tokens of an undisturbed run."""
    async with serving() as client:
        prompts = [[number] * number for number in range(3, 11)]
        handles = [client.submit(prompt, params(max_tokens=300)) for prompt in prompts]
        several = client.submit([7, 8], params(n=3, max_tokens=40, seed=5))
        tasks = [asyncio.create_task(texts(handle)) for handle in (*handles, several)]
        for deaths in range(1, 4):
            before = client.snapshot.tokens_emitted
            await eventually(lambda: client.snapshot.tokens_emitted > before + 40)  # noqa: B023
            kill(client)
            await eventually(lambda: client.alive and client.restarts == deaths)  # noqa: B023
        *singles, children = await asyncio.gather(*tasks)
        for prompt, found in zip(prompts, singles, strict=True):
            assert found == {0: expected_tokens(prompt, 1, 300, 1000)}
        undisturbed = await texts(client.submit([7, 8], params(n=3, max_tokens=40, seed=5)))
        assert children == undisturbed
        assert len(undisturbed) == 3
        assert client.snapshot.tokens_emitted >= 8 * 300 + 2 * 120  # what the dead ones counted is not forgotten


async def test_a_request_that_comes_meanwhile_waits_for_the_next_worker() -> None:
    """Between two workers requests are admitted, can be cancelled, and run as soon as there is one."""
    async with serving() as client:
        kill(client)
        await eventually(lambda: not client.alive)
        waiting, left = client.submit([5], params()), client.submit([6], params())
        left.cancel()
        assert await texts(waiting) == {0: expected_tokens([5], 1, 8, 1000)}
        assert client.in_flight == 0


async def test_a_request_that_kills_is_found_and_fails_alone() -> None:
    """One of eight requests kills every worker that computes it: it alone fails, after a few deaths, and says why."""
    async with serving("poison") as client:
        good = [[number, number] for number in range(20, 27)]
        tasks = [asyncio.create_task(texts(client.submit(prompt, params(max_tokens=40)))) for prompt in good]
        await eventually(lambda: client.snapshot.tokens_emitted > 20)
        bad = client.submit([POISON], params(max_tokens=40))
        with pytest.raises(EngineFailure, match="ended the worker process each time"):
            await texts(bad)
        assert await asyncio.gather(*tasks) == [{0: expected_tokens(prompt, 1, 40, 1000)} for prompt in good]
        assert 3 <= client.restarts <= 7
        assert await texts(client.submit([5], params())) == {0: expected_tokens([5], 1, 8, 1000)}


async def test_a_death_is_written_down(tmp_path: Path) -> None:
    """With an incident folder each death leaves a record of what ran and where it stood, and of no text."""
    async with serving(incident_dir=str(tmp_path / "new")) as client:
        handle = client.submit([5, 6, 7], params(max_tokens=200))
        await anext(handle)
        kill(client)
        await texts_after(handle)
        (path,) = (tmp_path / "new").glob("incident-*.json")
        found = json.loads(path.read_text())
    assert "signal 9" in found["reason"]
    (request,) = found["requests"]
    assert (request["request"], request["prompt_tokens"], request["started"]) == (handle.id, 3, True)
    assert request["tokens"] > 3
    assert request["in_the_dying_step"] == (request["position"] is not None)  # the kill may fall between two steps
    assert found["counts"]["steps"] > 0


async def texts_after(handle: RequestHandle) -> int:
    return sum([len(events) async for events in handle])


async def test_restarting_is_given_up() -> None:
    """After max_restarts deaths within the window every request fails with the reason, and `wait_lost` returns."""
    async with serving(max_restarts=1) as client:
        handle = client.submit([5], params(max_tokens=500))
        for _ in range(2):
            await eventually(lambda: client.alive)
            kill(client)
            await eventually(lambda: not client.alive)
        with pytest.raises(EngineFailure, match="replaced 1 times"):
            await texts(handle)
        assert "signal 9" in await client.wait_lost()
        assert client.lost
        with pytest.raises(EngineFailure):
            client.submit([5], params())


async def test_a_stopped_worker_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: a worker that uses no processor while requests wait is replaced, and the stream goes on."""
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 0.6)
    async with serving() as client:
        handle = client.submit([5], params(max_tokens=100))
        first = await anext(handle)
        kill(client, signal.SIGSTOP)
        stopped = time.monotonic()
        await eventually(lambda: client.restarts == 1)
        assert time.monotonic() - stopped < 6
        rest = [event.sampled.token async for events in handle for event in events]
        assert [first[0].sampled.token, *rest] == expected_tokens([5], 1, 100, 1000)


async def test_an_idle_worker_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence without requests is no hang."""
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 0.3)
    async with serving() as client:
        await asyncio.sleep(1.0)
        assert (client.restarts, client.alive) == (0, True)
