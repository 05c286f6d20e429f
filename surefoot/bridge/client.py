"""The API process's side of the bridge: admission, one handle per request, and the news of the worker's death.

Everything here runs on one event loop, which is the only writer of the in-flight map. `submit` admits or refuses at
once; the handle then yields what the engine emits until every child has finished. When the worker dies, every handle
raises at once: a stream ends in an error, never in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from surefoot import errors
from surefoot.bridge import supervisor, wire
from surefoot.config import EngineConfig
from surefoot.errors import EngineFailure, Overloaded, RequestError, StartupError, WorkerLost
from surefoot.types import Emitted, Event, Failed, Request, SamplingParams, Snapshot

RETRY_AFTER = 5
"""Seconds after which a client refused for a full queue may come again."""
STALL_SECONDS = 10.0
"""How long a worker with requests may be silent before the server no longer counts as ready."""
REAP_SECONDS = 2.0
"""How long a worker that closed its socket, or was told to stop, may take to be gone before it is killed."""


class Worker(Protocol):
    """What the client needs of a worker: `supervisor.WorkerProcess`, or a thread in tests."""

    socket: socket.socket

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def kill(self) -> None: ...
    def epitaph(self) -> str: ...


class RequestHandle:
    """The life of one admitted request: an async iterator over what each step emitted, for all children together.

    Raises InsufficientMemory or EngineFailure where the request fails. Leaving an `async with` block, `aclose`,
    `cancel` and cancelling the waiting task all drop the request in the engine.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self.id = request.id
        self.prompt_tokens = len(request.prompt) // 4
        self.started = False
        """True once a token was emitted: the request no longer counts as queued."""
        self._client = client
        self._live = set(range(request.params.n))
        self._pending: list[Emitted] = []
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        """True when nothing more will be emitted."""
        return not self._live

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
            self._client._dropped(self, child)
            self._news.set()

    def _emit(self, event: Emitted) -> None:
        if event.child in self._live:
            self.started = True
            self._pending.append(event)
            if event.finish is not None:
                self._live.discard(event.child)
            self._news.set()

    def _fail(self, error: RequestError) -> None:
        self._error = error
        self._live.clear()
        self._news.set()


class EngineClient:
    """Talks to one worker. Make it with `EngineClient.start`; not thread-safe, bound to the loop that started it."""

    def __init__(
        self,
        worker: Worker,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_queued_requests: int,
        max_queued_tokens: int,
    ) -> None:
        self.snapshot = Snapshot()
        """Counts of the engine after its latest step."""
        self.draining = False
        """True when new requests are refused because the server is going down."""
        self._worker, self._reader, self._writer = worker, reader, writer
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._info: wire.Ready | None = None
        self._handles: dict[int, RequestHandle] = {}
        self._ids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._heard = 0.0  # loop time of the last message, or of the first request after a quiet time
        self._fatal: wire.Fatal | None = None
        self._lost: str | None = None
        self._gone = False
        self._lost_news = asyncio.Event()
        self._stopping = False
        self._listener: asyncio.Task[None] | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[str, float], None] | None = None,
        max_queued_requests: int = 1024,
        max_queued_tokens: int = 1 << 20,
        startup_timeout: float = 600.0,
        spawn: Callable[[], Worker] = supervisor.spawn,
    ) -> Self:
        """Start a worker and wait until it is ready; `progress(stage, fraction)` is called as it loads.

        Raises the worker's own StartupError (with its exit code), or WorkerLost if it dies or takes longer than
        `startup_timeout` seconds. Nothing is left running then.
        """
        worker = spawn()
        reader, writer = await asyncio.open_unix_connection(sock=worker.socket)
        client = cls(
            worker, reader, writer, max_queued_requests=max_queued_requests, max_queued_tokens=max_queued_tokens
        )
        try:
            async with asyncio.timeout(startup_timeout):
                await client._handshake(config, progress)
        except TimeoutError:
            await client._discard()
            raise WorkerLost(f"The worker was not ready within {startup_timeout:g} s and was stopped.") from None
        except BaseException:
            await client._discard()
            raise
        client._listener = asyncio.create_task(client._listen())
        return client

    async def _handshake(self, config: EngineConfig, progress: Callable[[str, float], None] | None) -> None:
        self._send(wire.Start(config=config))
        while self._info is None:
            message = await self._receive()
            if message is None:
                raise await self._startup_failure()
            if isinstance(message, wire.Progress) and progress is not None:
                progress(message.stage, message.fraction)
            elif isinstance(message, wire.Fatal):
                self._fatal = message
            elif isinstance(message, wire.Ready):
                self._info = message

    async def _startup_failure(self) -> StartupError:
        await self._reap()
        if self._fatal is None:
            return WorkerLost(f"The worker process died while starting ({self._worker.epitaph()}).")
        kinds = {kind.exit_code: kind for kind in StartupError.__subclasses__()}
        return kinds.get(self._fatal.exit_code, WorkerLost)(self._fatal.message)

    async def _discard(self) -> None:
        self._worker.kill()
        await self._reap()
        await self._close()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; True if all finished within `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, reason: str = "The server was stopped.") -> None:
        """End the worker now. Requests still running raise Overloaded with `reason`."""
        self.draining = self._stopping = True
        self._fail_all(Overloaded(reason, retry_after=RETRY_AFTER))
        if not self._gone:
            self._send(wire.Stop())
            await self._reap()
        if self._listener is not None:
            await self._listener
        await self._close()

    async def _reap(self) -> None:
        """Wait until the worker is gone; kill it if that takes too long. Needs no thread: at exit there are none."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + REAP_SECONDS
        while self._worker.returncode is None:
            if clock() > deadline:
                self._worker.kill()
            await asyncio.sleep(0.01)

    async def _close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the worker went first
            await self._writer.wait_closed()

    async def wait_lost(self) -> str:
        """Returns when the worker has died unasked, with what is known of why; never for one that was stopped."""
        await self._lost_news.wait()
        return self._lost or ""

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> wire.Ready:
        """What the worker fitted: limits, spec, memory plan. Raises RuntimeError before it is ready."""
        if self._info is None:
            raise RuntimeError("the worker is not ready yet")
        return self._info

    @property
    def worker_pid(self) -> int:
        return self._worker.pid

    @property
    def alive(self) -> bool:
        """True while the worker process is there."""
        return self._info is not None and not self._gone

    @property
    def ready(self) -> bool:
        """True when a request sent now would be served."""
        return self.alive and not self.draining and not self.stalled

    @property
    def stalled(self) -> bool:
        """True while requests wait for a worker that has told of no step for STALL_SECONDS; it may come back."""
        return bool(self._handles) and asyncio.get_running_loop().time() - self._heard > STALL_SECONDS

    @property
    def in_flight(self) -> int:
        """Requests admitted and not finished."""
        return len(self._handles)

    @property
    def queued(self) -> tuple[int, int]:
        """Requests admitted that have not emitted yet, and their prompt tokens."""
        waiting = [handle.prompt_tokens for handle in self._handles.values() if not handle.started]
        return len(waiting), sum(waiting)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = ""
    ) -> RequestHandle:
        """Admit a request. `params` must be validated, with `seed` and `max_tokens` set (`surefoot.sampling`).

        Raises Overloaded when draining or when the queue is full, EngineFailure when there is no worker.
        """
        if params.seed is None or params.max_tokens is None:
            raise ValueError("seed and max_tokens are set before a request is submitted")
        self._admit(len(prompt))
        request = Request(id=next(self._ids), prompt=wire.pack_ids(prompt), params=params, priority=priority, salt=salt)
        self._send(wire.Add(request=request))
        if not self._handles:
            self._heard = asyncio.get_running_loop().time()
        handle = self._handles[request.id] = RequestHandle(self, request)
        self._idle.clear()
        return handle

    def _admit(self, tokens: int) -> None:
        if self._gone:
            raise EngineFailure(self._lost or "The worker process is gone.")
        if self.draining:
            raise Overloaded("The server is shutting down and takes no new requests.", retry_after=RETRY_AFTER)
        requests, queued = self.queued
        # A prompt longer than the whole allowance is still served when nothing else waits.
        if requests and (requests >= self._max_queued_requests or queued + tokens > self._max_queued_tokens):
            raise Overloaded(
                f"The queue is full: {requests:,} requests with {queued:,} prompt tokens wait "
                f"(limits {self._max_queued_requests:,} and {self._max_queued_tokens:,}), and this one has {tokens:,}. "
                f"Try again later.",
                retry_after=RETRY_AFTER,
            )

    def _dropped(self, handle: RequestHandle, child: int | None) -> None:
        """The caller no longer wants a request, or one child of it."""
        if handle.id in self._handles and not self._gone:
            self._send(wire.Cancel(request=handle.id, child=None if handle.done else child))
        self._release_if_done(handle)

    def _release_if_done(self, handle: RequestHandle) -> None:
        if handle.done:
            self._handles.pop(handle.id, None)
        if not self._handles:
            self._idle.set()

    def _fail_all(self, error: RequestError) -> None:
        for handle in list(self._handles.values()):
            handle._fail(error)
            self._release_if_done(handle)

    # ---- the socket -------------------------------------------------------------------------------------------------

    def _send(self, message: wire.ToWorker) -> None:
        # Never waits: what may pile up in the transport is bounded by admission.
        self._writer.write(wire.frame(message))

    async def _receive(self) -> wire.FromWorker | None:
        """The next message; None at the end of file. Raises WireError for garbage."""
        try:
            (length,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
            wire.check_length(length)
            return wire.decode_from_worker(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _listen(self) -> None:
        """Dispatch what the worker says until it is gone."""
        cause = ""
        try:
            while (message := await self._receive()) is not None:
                self._heard = asyncio.get_running_loop().time()
                if isinstance(message, wire.Step):
                    self.snapshot = message.snapshot
                    self._dispatch(message.events)
                elif isinstance(message, wire.Fatal):
                    self._fatal = message
        except Exception as error:
            # Whatever went wrong in here, nobody would be told anything any more: end it for all, with the reason.
            cause = f"{type(error).__name__}: {error}"
            self._worker.kill()
        await self._bury(cause)

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            handle = self._handles.get(event.request)
            if handle is None:
                continue  # cancelled while the event was on its way
            if isinstance(event, Failed):
                kind = errors.FAILED_KINDS.get(event.kind, EngineFailure)
                handle._fail(kind(event.message))
            else:
                handle._emit(event)
            self._release_if_done(handle)

    async def _bury(self, cause: str) -> None:
        """The socket is closed: nothing more can come, so every request is told at once."""
        self._gone = True
        if not self._stopping:
            await self._reap()
            reason = cause or (self._fatal.message if self._fatal else "")
            self._lost = f"The worker process died ({self._worker.epitaph()}).{' ' + reason if reason else ''}"
            self._fail_all(EngineFailure(self._lost))
            self._lost_news.set()
