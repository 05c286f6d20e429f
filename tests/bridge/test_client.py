"""The client of the worker, over a real socket to a worker in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from surefoot.bridge import wire
from surefoot.bridge.client import EngineClient
from surefoot.bridge.handle import RequestHandle
from surefoot.bridge.policy import Policy
from surefoot.bridge.worker import Connection
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.errors import DoesNotFit, EngineFailure, InsufficientMemory, Overloaded, WorkerLost
from surefoot.testing import FakeExecutor, expected_tokens
from surefoot.types import FailureKind, Limits, StepDone, StepFailed, StepPlan, Ticket
from tests.bridge.support import LIMITS, ThreadWorker, params


class GatedExecutor(FakeExecutor):
    """Runs a step only when `open` is set."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.open = threading.Event()

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        assert self.open.wait(10)
        return super().collect(ticket)


@asynccontextmanager
async def running(
    worker: ThreadWorker, *, progress: Callable[[str, float], None] | None = None, **policy: Any
) -> AsyncIterator[EngineClient]:
    policy_ = Policy(**policy)
    client = await EngineClient.start(EngineConfig(), spawn=lambda: worker, progress=progress, policy=policy_)
    try:
        yield client
    finally:
        await client.stop()
        worker.join()


async def tokens(handle: RequestHandle, child: int = 0) -> list[int]:
    return [event.sampled.token async for events in handle for event in events if event.child == child]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - whatever the worker tells
            await asyncio.sleep(0.005)


async def test_a_request_runs_to_its_end() -> None:
    """Tokens come out in order, the iterator ends after the last, and nothing stays in flight."""
    async with running(ThreadWorker()) as client:
        handle = client.submit([5, 6, 7], params())
        assert await tokens(handle) == expected_tokens([5, 6, 7], 1, 8, 1000)
        assert handle.done and client.in_flight == 0
        assert client.snapshot.tokens_emitted == 8


async def test_a_worker_that_makes_no_step_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready turns false while a request waits and nothing is heard, and true again with the next step."""
    monkeypatch.setattr("surefoot.bridge.client.STALL_SECONDS", 0.1)
    worker = ThreadWorker(GatedExecutor)
    async with running(worker) as client:
        await asyncio.sleep(0.2)
        assert client.ready and not client.stalled  # idle is not stalled
        handle = client.submit([5, 6], params())
        assert client.ready
        await eventually(lambda: client.stalled and not client.ready)
        assert client.alive
        worker.executor.open.set()  # type: ignore[attr-defined]
        await tokens(handle)
        assert client.ready


async def test_many_requests_are_told_apart() -> None:
    """Each of many requests at once gets its own tokens."""
    async with running(ThreadWorker()) as client:
        prompts = [[number, number + 1] for number in range(3, 33)]
        handles = [client.submit(prompt, params()) for prompt in prompts]
        results = await asyncio.gather(*map(tokens, handles))
    assert results == [expected_tokens(prompt, 1, 8, 1000) for prompt in prompts]


async def test_readiness_tells_what_was_fitted() -> None:
    """Progress is reported while loading, and `info` has the worker's limits."""
    stages: list[tuple[str, float]] = []
    async with running(ThreadWorker(), progress=lambda *news: stages.append(news)) as client:
        assert stages == [("pretending", 0.5)]
        assert client.info.limits == LIMITS
        assert (client.info.max_model_len, client.info.kv_tokens) == (512, 1024)
        assert client.alive and client.ready
        await eventually(lambda: client.snapshot.blocks_total == 256)
    assert not client.alive and not client.ready


async def test_cancel_gives_the_blocks_back() -> None:
    """Leaving the handle's block drops the request in the engine, and its KV blocks come back."""
    async with running(ThreadWorker()) as client:
        async with client.submit([5] * 100, params(max_tokens=400)) as handle:
            await anext(handle)
            assert client.snapshot.blocks_used > 0
        assert client.in_flight == 0
        await eventually(lambda: client.snapshot.blocks_used == 0)


async def test_a_cancelled_task_cancels_its_request() -> None:
    """Cancelling the task that waits for tokens drops the request."""
    worker = ThreadWorker(GatedExecutor)
    async with running(worker) as client:
        task = asyncio.create_task(tokens(client.submit([5], params())))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.in_flight == 0
        worker.executor.open.set()  # type: ignore[attr-defined]


async def test_one_child_can_be_cancelled() -> None:
    """After `cancel(child)` that child emits nothing more and the others finish."""
    async with running(ThreadWorker()) as client:
        handle = client.submit([5, 6], params(n=3, max_tokens=20))
        counts = {0: 0, 1: 0, 2: 0}
        async for events in handle:
            for event in events:
                counts[event.child] += 1
            if counts[1] and 1 in handle._live:
                handle.cancel(1)
                before = counts[1]
    assert (counts[0], counts[2]) == (20, 20)
    assert counts[1] == before < 20


async def test_queue_is_bounded_in_requests() -> None:
    """A request beyond max_queued_requests is refused with the numbers and Retry-After; started ones do not count."""
    worker = ThreadWorker(GatedExecutor)
    async with running(worker, max_queued_requests=2) as client:
        handles = [client.submit([5], params()) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 requests with 2 prompt tokens wait") as refused:
            client.submit([5], params())
        assert refused.value.retry_after
        worker.executor.open.set()  # type: ignore[attr-defined]
        await asyncio.gather(*map(tokens, handles))
        assert len(await tokens(client.submit([5], params()))) == 8


async def test_queue_is_bounded_in_tokens() -> None:
    """Prompt tokens that wait are bounded; a prompt over the whole bound is served where nothing else waits."""
    worker = ThreadWorker(GatedExecutor)
    async with running(worker, max_queued_tokens=10) as client:
        handle = client.submit([5] * 20, params())
        with pytest.raises(Overloaded):
            client.submit([5], params())
        worker.executor.open.set()  # type: ignore[attr-defined]
        await tokens(handle)


async def test_a_failure_is_the_requests_own() -> None:
    """A request that fails raises the error that its event names, and the one beside it finishes."""

    def fails(plan: StepPlan) -> StepFailed | None:
        heavy = any(work.request == 1 for work in plan.works)
        return StepFailed(plan=plan.id, kind=FailureKind.OOM, reason="full", needed=99, free=9) if heavy else None

    async with running(ThreadWorker(lambda limits: FakeExecutor(limits, fails=fails))) as client:
        bad, good = client.submit([5] * 50, params()), client.submit([6], params())
        with pytest.raises(InsufficientMemory, match="99 B"):
            await tokens(bad)
        assert await tokens(good) == expected_tokens([6], 1, 8, 1000)


async def test_every_handle_raises_when_the_worker_dies() -> None:
    """When the socket closes, waiting requests raise EngineFailure at once and new ones are refused."""
    worker = ThreadWorker(GatedExecutor)
    client = await EngineClient.start(EngineConfig(), spawn=lambda: worker)
    handles = [client.submit([5], params()) for _ in range(3)]
    lost = asyncio.create_task(client.wait_lost())
    worker.kill()
    worker.executor.open.set()  # type: ignore[attr-defined]
    for handle in handles:
        with pytest.raises(EngineFailure, match="worker process died"):
            await tokens(handle)
    assert "worker process died" in await lost
    assert not client.alive
    with pytest.raises(EngineFailure):
        client.submit([5], params())
    await client.stop()


async def test_a_bug_in_the_engine_says_what_it_was() -> None:
    """An exception in the worker's loop reaches every caller as EngineFailure with its text."""

    def explode(plan: StepPlan) -> StepFailed | None:
        raise ZeroDivisionError("the sum was wrong")

    worker = ThreadWorker(lambda limits: FakeExecutor(limits, fails=explode))
    async with running(worker) as client:
        with pytest.raises(EngineFailure, match="the sum was wrong"):
            await tokens(client.submit([5], params()))
    assert worker.status == WorkerLost.exit_code


async def test_drain_waits_for_what_runs() -> None:
    """While draining new requests get Overloaded; drain is True once the running ones are done."""
    worker = ThreadWorker(GatedExecutor)
    async with running(worker) as client:
        handle = client.submit([5], params())
        assert not await client.drain(0.05)
        with pytest.raises(Overloaded, match="shutting down"):
            client.submit([5], params())
        worker.executor.open.set()  # type: ignore[attr-defined]
        assert await client.drain(5)
        assert len(await tokens(handle)) == 8


async def test_stop_ends_what_still_runs() -> None:
    """`stop` fails running requests with the reason that it was given."""
    worker = ThreadWorker(GatedExecutor)
    client = await EngineClient.start(EngineConfig(), spawn=lambda: worker)
    handle = client.submit([5], params())
    worker.executor.open.set()  # type: ignore[attr-defined]
    await client.stop("closing time")
    with pytest.raises(Overloaded, match="closing time"):
        await tokens(handle)


async def test_startup_errors_keep_their_class() -> None:
    """A StartupError in the worker is raised as the same class with the same text by `start`."""

    def build(config: EngineConfig, connection: Connection) -> Engine:
        raise DoesNotFit("needs 9 GiB, has 1 GiB")

    worker = ThreadWorker(build=build)
    with pytest.raises(DoesNotFit, match="needs 9 GiB"):
        await EngineClient.start(EngineConfig(), spawn=lambda: worker)
    assert worker.status == DoesNotFit.exit_code


async def test_readiness_has_a_deadline() -> None:
    """A worker that never gets ready ends in WorkerLost after startup_timeout."""
    release = threading.Event()

    def build(config: EngineConfig, connection: Connection) -> Engine:
        release.wait(10)
        raise ConnectionError

    worker = ThreadWorker(build=build)
    threading.Timer(0.3, release.set).start()
    with pytest.raises(WorkerLost, match=r"not ready within 0\.1 s"):
        await EngineClient.start(EngineConfig(), spawn=lambda: worker, policy=Policy(startup_timeout=0.1))


async def test_garbage_from_the_worker_ends_it() -> None:
    """Bytes that are no message fail every request rather than hang it."""

    def build(config: EngineConfig, connection: Connection) -> Engine:
        ready = ThreadWorker._fake(worker, config, connection)
        connection._socket.sendall(wire.HEADER.pack(3) + b"abc")
        return ready

    worker = ThreadWorker(build=build)
    client = await EngineClient.start(EngineConfig(), spawn=lambda: worker)
    async with asyncio.timeout(5):
        assert "not a message of this protocol" in await client.wait_lost()
    await client.stop()


async def test_incomplete_parameters_are_a_callers_bug() -> None:
    """`submit` insists on seed and max_tokens, which only validation can set."""
    async with running(ThreadWorker()) as client:
        with pytest.raises(ValueError, match="seed and max_tokens"):
            client.submit([5], params(seed=None))
