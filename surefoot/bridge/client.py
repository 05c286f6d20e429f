"""The API process's side of the bridge: admission, one handle per request, and a new worker for one that died.

Everything here runs on one event loop, which is the only writer of the in-flight map. `submit` admits or refuses at
once; the handle then yields what the engine emits until every child has finished. When the worker dies another is
started, and every request goes on where it stood: its prompt and what it has emitted are computed again, the shortest
first. Only when restarting has been given up do the handles raise: a stream ends in an error, never in silence.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from surefoot import errors
from surefoot.bridge import incident, supervisor, wire
from surefoot.bridge.handle import RequestHandle
from surefoot.bridge.link import Link, Progress, Worker
from surefoot.bridge.policy import Policy
from surefoot.bridge.suspicion import Suspicion
from surefoot.bridge.watch import STALL_SECONDS, Watch
from surefoot.config import EngineConfig
from surefoot.errors import EngineFailure, Overloaded, RequestError, StartupError
from surefoot.types import Event, Failed, Request, SamplingParams, Snapshot, Vocabulary

log = logging.getLogger(__name__)

RETRY_AFTER = 5
"""Seconds after which a client refused for a full queue may come again."""
RESIZE_SECONDS = 30.0
"""How long a change of the cache's size may take to be answered: a step, or a worker's start."""
MAX_BACK_OFF = 10.0
"""Longest pause in seconds before a worker is started after one that died without having served."""


class EngineClient:
    """Talks to one worker at a time. Make it with `EngineClient.start`; bound to the loop that started it."""

    def __init__(self, config: EngineConfig, link: Link, policy: Policy, spawn: Callable[[], Worker]) -> None:
        self.draining = False
        """True when new requests are refused because the server is going down."""
        self.info = link.info
        """What the worker fitted: limits, spec, memory plan."""
        self.restarts = 0
        """Workers that were replaced so far."""
        self._config, self._policy, self._spawn = config, policy, spawn
        self._link: Link | None = link
        self._snapshot, self._before = _first(link.info), Snapshot()  # of this worker, and of all before it
        self._handles: dict[int, RequestHandle] = {}
        self._ids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._suspicion = Suspicion()
        self._deaths: deque[float] = deque()
        self._fruitless = 0  # deaths in a row without a step between them
        self._lost: str | None = None
        self._lost_news = asyncio.Event()
        self._stopping = False
        self._blocks: int | None = None  # KV blocks that were asked for last, also of workers to come
        self._resizing: list[asyncio.Future[wire.Resized]] = []
        self._vocabulary: Vocabulary | None = None
        self._watch = Watch(asyncio.get_running_loop().time)
        self._sleep: asyncio.Event | None = None  # while the worker is gone on purpose; set when it is to come back
        self._bedtime: asyncio.TimerHandle | None = None
        self._nap: asyncio.Task[None] | None = None
        self._life = asyncio.create_task(self._live())
        self._plan_sleep()

    # ---- life -------------------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        policy: Policy = Policy(),
        spawn: Callable[[], Worker] = supervisor.spawn,
    ) -> Self:
        """Start a worker and wait until it is ready; see `Link.open` for `progress` and what is raised."""
        link = await Link.open(spawn, config, progress, patience=policy.startup_timeout)
        return cls(config, link, policy, spawn)

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
        if self._link is not None:
            self._link.send(wire.Stop())
            await self._link.reap()
        elif not self._life.done():
            self._life.cancel()  # a worker is being started: it goes with the task
        await asyncio.wait([self._life])

    async def wait_lost(self) -> str:
        """Returns when no worker is left and none will be started, with why; never after `stop`."""
        await self._lost_news.wait()
        return self._lost or ""

    async def _live(self) -> None:
        """Hear a worker until it ends, put another in its place, and so on."""
        while (link := self._link) is not None:
            watch = asyncio.create_task(self._guard(link))
            cause = await self._hear(link)
            watch.cancel()
            self._link = None
            if self._stopping:
                await link.close()
                continue
            try:
                await link.reap()
                death = link.death(cause or self._watch.verdict)
                if self._sleep is None:
                    self._autopsy(link, death)
            finally:
                await link.close()
            await (self._replace(death) if self._sleep is None else self._slept(self._sleep))

    async def _hear(self, link: Link) -> str:
        """Dispatch what the worker says until it is gone; returns what went wrong here, if anything did."""
        try:
            while (message := await link.receive()) is not None:
                self._watch.heard(link.worker)
                if isinstance(message, wire.Step):
                    self._fruitless = 0
                    self._snapshot = message.snapshot
                    self._dispatch(message.events)
                elif isinstance(message, wire.Resized):
                    self._resized(message)
        except Exception as error:
            # Whatever went wrong in here, nobody would be told anything any more: end it for all, with the reason.
            link.worker.kill()
            return f"{type(error).__name__}: {error}"
        return ""

    async def _guard(self, link: Link) -> None:
        """End a worker that hangs."""
        while True:
            await asyncio.sleep(self._watch.interval)
            if self._handles and self._watch.hangs(link.worker):
                log.error("the worker hangs and is ended: %s", self._watch.verdict)
                link.worker.kill()

    # ---- replacement ------------------------------------------------------------------------------------------------

    def _autopsy(self, link: Link, death: str) -> None:
        """Write down what ran, keep what was counted, and fail the request that kills once that is certain."""
        journal = link.worker.journal
        rows = {} if journal is None else journal.in_flight()
        rows = {request: at for request, at in rows.items() if request in self._handles}
        if self._policy.incident_dir is not None:
            incident.record(
                Path(self._policy.incident_dir),
                reason=death,
                in_flight=rows,
                handles=self._handles.values(),
                snapshot=self.snapshot,
            )
        self._before, self._snapshot = self.snapshot, _first(link.info)
        convicted = self._suspicion.died(rows)
        if convicted is not None:
            message = (
                "This request ended the worker process each time that it ran, at last with no other request under "
                "suspicion; it is not tried again. Other requests go on."
            )
            log.error("request %d kills workers and is failed", convicted)
            self._handles[convicted].fail(EngineFailure(message))
            self._release_if_done(self._handles[convicted])

    async def _replace(self, death: str) -> None:
        """Start another worker and give it what the dead one had; gives up where there have been too many."""
        while True:
            now = asyncio.get_running_loop().time()
            while self._deaths and self._deaths[0] < now - self._policy.restart_window:
                self._deaths.popleft()
            if len(self._deaths) >= self._policy.max_restarts:
                self._give_up(death)
                return
            self._deaths.append(now)
            self.restarts += 1
            log.error("%s It is replaced; %d requests wait for that.", death, len(self._handles))
            await asyncio.sleep(min(MAX_BACK_OFF, 0.25 * 2**self._fruitless) if self._fruitless else 0.0)
            self._fruitless += 1
            try:
                await self._open()
            except StartupError as error:
                death = f"A new worker could not be started: {error.message}"
                continue
            return

    async def _open(self) -> None:
        """Start a worker and give it what the one before had. Raises StartupError."""
        link = await Link.open(self._spawn, self._config, None, patience=self._policy.startup_timeout)
        self._link, self.info = link, link.info
        self._watch.heard(link.worker)
        if self._vocabulary is not None:
            link.send(wire.Learn(vocabulary=self._vocabulary))
        if self._blocks is not None:
            link.send(wire.Resize(blocks=self._blocks))
        log.warning("a new worker is ready; %d requests go on", len(self._handles))
        self._plan_sleep()
        held = self._suspicion.held
        self._go_on(handle for handle in self._handles.values() if handle.id not in held)

    def _go_on(self, handles: Iterable[RequestHandle]) -> None:
        """Give the worker what is left to do of these requests, the shortest first."""
        assert self._link is not None
        for handle in sorted(handles, key=lambda handle: handle.tokens):
            self._link.send(wire.Add(request=handle.request()))

    def _give_up(self, death: str) -> None:
        most = self._policy.max_restarts
        if most:
            death += f" It was replaced {most} times within {self._policy.restart_window:g} s, which is the limit."
        self._lost = death
        self._fail_all(EngineFailure(death))
        self._lost_news.set()

    # ---- sleep ------------------------------------------------------------------------------------------------------

    @property
    def sleeping(self) -> bool:
        """True from the moment that a worker was ended on purpose until another one is ready."""
        return self._sleep is not None

    async def sleep(self) -> None:
        """End the worker: all that it holds of the device goes back, a GPU's context too. The next request wakes it.

        Raises Overloaded while requests are in flight or a worker is being replaced.
        """
        if self._sleep is not None:
            return
        if self._handles or self._link is None:
            why = f"{len(self._handles)} requests are in flight" if self._handles else "a worker is being started"
            raise Overloaded(f"The server cannot sleep now: {why}.", retry_after=RETRY_AFTER)
        self._sleep, link = asyncio.Event(), self._link
        link.send(wire.Stop())
        await link.reap()
        log.info("the worker sleeps: its memory is given back")

    async def wake(self) -> None:
        """Start a worker again and wait until it is ready. Raises EngineFailure where none will come."""
        while self._sleep is not None:
            self._sleep.set()
            await asyncio.sleep(0.01)
        if self._lost is not None:
            raise EngineFailure(self._lost)

    async def _slept(self, wake: asyncio.Event) -> None:
        """The worker ended on purpose: wait until it is wanted, and start another."""
        self._before, self._snapshot = self.snapshot, _first(self.info)
        await wake.wait()
        try:
            await self._open()
        except StartupError as error:
            await self._replace(f"The worker could not be woken: {error.message}")
        self._sleep = None

    def _plan_sleep(self) -> None:
        """Sleep when nobody has asked for long enough."""
        if self._policy.sleep_after is not None and not self._handles:
            self._bedtime = asyncio.get_running_loop().call_later(self._policy.sleep_after, self._fall_asleep)

    def _fall_asleep(self) -> None:
        self._nap = asyncio.create_task(self.sleep())
        self._nap.add_done_callback(lambda nap: nap.cancelled() or nap.exception())  # it was not the time

    # ---- memory -----------------------------------------------------------------------------------------------------

    async def resize(self, blocks: int) -> wire.Resized:
        """Have memory for so many KV blocks: rows that held others are computed again, nothing fails.

        Raises Overloaded where no worker answers in time, EngineFailure where none will come.
        """
        if self._lost is not None:
            raise EngineFailure(self._lost)
        self._blocks = blocks
        answer: asyncio.Future[wire.Resized] = asyncio.get_running_loop().create_future()
        self._resizing.append(answer)
        if self._link is not None:
            self._link.send(wire.Resize(blocks=blocks))
        try:
            return await asyncio.wait_for(answer, RESIZE_SECONDS)
        except TimeoutError:
            message = f"The engine did not resize its cache within {RESIZE_SECONDS:g} s; it will when it can."
            raise Overloaded(message, retry_after=RETRY_AFTER) from None

    def _resized(self, message: wire.Resized) -> None:
        if message.refusal is not None:
            self._blocks = message.blocks
        waiting, self._resizing = self._resizing, []
        for answer in waiting:
            if not answer.done():
                answer.set_result(message)

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """Counts of the engine after its latest step; counters go on from one worker to the next."""
        return self._snapshot.after(self._before)

    @property
    def worker_pid(self) -> int | None:
        """None while there is no worker."""
        return None if self._link is None else self._link.worker.pid

    @property
    def lost(self) -> bool:
        """True when no worker is left and none will be started."""
        return self._lost is not None

    @property
    def alive(self) -> bool:
        """True while a worker is there and ready."""
        return self._link is not None

    @property
    def ready(self) -> bool:
        """True when a request sent now would be served."""
        return self.alive and not self.draining and not self.stalled

    @property
    def stalled(self) -> bool:
        """True while requests wait for a worker that has told of no step for STALL_SECONDS; it may come back."""
        return bool(self._handles) and self._watch.silence > STALL_SECONDS

    @property
    def in_flight(self) -> int:
        """Requests admitted and not finished."""
        return len(self._handles)

    @property
    def queued(self) -> tuple[int, int]:
        """Requests admitted that have not emitted yet, and their prompt tokens."""
        waiting = [handle.prompt_tokens for handle in self._handles.values() if not handle.started]
        return len(waiting), sum(waiting)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Tell the worker, and all after it, what tokens stand for: before the first request with a grammar."""
        self._vocabulary = vocabulary
        if self._link is not None:
            self._link.send(wire.Learn(vocabulary=vocabulary))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = ""
    ) -> RequestHandle:
        """Admit a request. `params` must be validated, with `seed` and `max_tokens` set (`surefoot.sampling`).

        While a worker is being replaced the request waits for the next one. Raises Overloaded when draining or when
        the queue is full, EngineFailure when no worker will come.
        """
        if params.seed is None or params.max_tokens is None:
            raise ValueError("seed and max_tokens are set before a request is submitted")
        self._admit(len(prompt))
        request = Request(id=next(self._ids), prompt=wire.pack_ids(prompt), params=params, priority=priority, salt=salt)
        if not self._handles:
            self._watch.begin()
        if self._bedtime is not None:
            self._bedtime.cancel()
        if self._sleep is not None:
            self._sleep.set()
        handle = self._handles[request.id] = RequestHandle(request, self._dropped)
        if self._link is not None:
            self._link.send(wire.Add(request=request))
        self._idle.clear()
        return handle

    def _admit(self, tokens: int) -> None:
        if self._lost is not None or (self._stopping and self._link is None):
            raise EngineFailure(self._lost or "The worker process is gone.")
        if self.draining:
            raise Overloaded("The server is shutting down and takes no new requests.", retry_after=RETRY_AFTER)
        requests, queued = self.queued
        most, most_tokens = self._policy.max_queued_requests, self._policy.max_queued_tokens
        # A prompt longer than the whole allowance is still served when nothing else waits.
        if requests and (requests >= most or queued + tokens > most_tokens):
            raise Overloaded(
                f"The queue is full: {requests:,} requests with {queued:,} prompt tokens wait "
                f"(limits {most:,} and {most_tokens:,}), and this one has {tokens:,}. Try again later.",
                retry_after=RETRY_AFTER,
            )

    def _dropped(self, handle: RequestHandle, child: int | None) -> None:
        """The caller no longer wants a request, or one child of it."""
        if handle.id in self._handles and self._link is not None:
            self._link.send(wire.Cancel(request=handle.id, child=None if handle.done else child))
        self._release_if_done(handle)

    def _release_if_done(self, handle: RequestHandle) -> None:
        if handle.done and self._handles.pop(handle.id, None) is not None and self._suspicion.forget(handle.id):
            self._release_suspects()
        if not self._handles:
            self._idle.set()
            self._plan_sleep()

    def _release_suspects(self) -> None:
        """Those on trial were cleared: the next ones go on, unless a worker that is to come will be given them."""
        if self._link is not None:
            self._go_on(self._handles[r] for r in self._suspicion.trial if r in self._handles)

    def _fail_all(self, error: RequestError) -> None:
        for handle in list(self._handles.values()):
            handle.fail(error)
            self._release_if_done(handle)

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            handle = self._handles.get(event.request)
            if handle is None:
                continue  # cancelled while the event was on its way
            if isinstance(event, Failed):
                kind = errors.FAILED_KINDS.get(event.kind, EngineFailure)
                handle.fail(kind(event.message))
            else:
                handle.emit(event)
                if self._suspicion.progressed(event.request, handle.prompt_tokens + event.index):
                    self._release_suspects()
            self._release_if_done(handle)


def _first(info: wire.Ready) -> Snapshot:
    """Counts of a worker that has made no step."""
    return Snapshot(blocks_total=info.limits.num_blocks, block_size=info.limits.block_size)
