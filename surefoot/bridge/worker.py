"""The worker process: where what `core` decides and what `device` does are joined.

    python -m surefoot.bridge.worker <fd of the socket> <pid of the parent>

One thread, one loop: read every message that has arrived, run one step, send what it brought. With nothing to do it
sleeps in select until a message comes. It may block while sending, since the API process always reads and never waits
for the worker to; that bounds what can pile up between the two.

SIGINT and SIGTERM are ignored: terminals and service managers send them to every process, and it is the server that
decides when the requests are done. What ends the worker is Stop, the end of file, or the death of its parent.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import structlog

from surefoot.bridge import logs, wire
from surefoot.bridge.journal import Journal, Journaled
from surefoot.config import EngineConfig
from surefoot.core.engine import DeviceLost, Engine
from surefoot.errors import StartupError, WorkerLost
from surefoot.types import Event, Failed, Snapshot

PR_SET_PDEATHSIG = 1
CHUNK = 1 << 18
HEARTBEAT = 1.0
"""Seconds after which a worker that has work but nothing new to tell says that it lives."""

log = structlog.get_logger()


class Connection:
    """The worker's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unframer = wire.Unframer()
        self._chunk = memoryview(bytearray(CHUNK))  # made once: there may be no memory for another when it is needed

    def send(self, message: wire.FromWorker) -> None:
        """Blocks until the whole message is on its way. Raises ConnectionError if the API process is gone."""
        self._socket.sendall(wire.frame(message))

    def receive(self, timeout: float | None) -> list[wire.ToWorker]:
        """Every message that has arrived, waiting up to `timeout` seconds for a first one (None: for ever).

        Raises ConnectionResetError at the end of file, WireError for garbage.
        """
        bodies: list[bytes] = []
        while select.select([self._socket], [], [], timeout)[0]:
            count = self._socket.recv_into(self._chunk)
            if not count:
                raise ConnectionResetError("the API process closed the socket")
            bodies += self._unframer.feed(self._chunk[:count])
            timeout = 0.0
        return [wire.decode_to_worker(body) for body in bodies]


Build = Callable[[EngineConfig, Connection], Engine]
"""Makes the engine, and tells the API process how far it is and that it is ready."""


def main(build: Build | None = None) -> int:
    """Entry point; returns the exit status. Arguments: descriptors of the socket and the journal, the parent's pid."""
    fd, journal, parent = map(int, sys.argv[1:4])
    leash(parent)
    for inherited in (fd, journal):
        os.set_inheritable(inherited, False)
    with socket.socket(fileno=fd) as sock:
        return serve(Connection(sock), build, Journal(journal))


def leash(parent: int) -> None:
    """Die with the parent, whatever this process is busy with."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew that we care
        sys.exit("The server that started this worker is gone.")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def serve(connection: Connection, build: Build | None = None, journal: Journal | None = None) -> int:
    """From Start to the end; returns the exit status. Whatever ends the engine is told to the API process first."""
    try:
        fatal = _outcome(connection, build or open_engine, journal)
        if fatal is None:
            return 0
        connection.send(fatal)
    except ConnectionError:
        return 0  # the API process is gone, and nobody is left to serve
    return fatal.exit_code


def _outcome(connection: Connection, build: Build, journal: Journal | None) -> wire.Fatal | None:
    """Serve until Stop, or until something ends the engine: that is returned."""
    try:
        _serve(connection, build, journal)
    except StartupError as error:
        return wire.Fatal(exit_code=error.exit_code, message=error.message)
    except DeviceLost as error:
        log.error("the device is lost", reason=str(error))
        return wire.Fatal(exit_code=WorkerLost.exit_code, message=f"The device is lost: {error}")
    except ConnectionError:
        raise
    except Exception as error:
        log.exception("the engine failed")
        return wire.Fatal(exit_code=WorkerLost.exit_code, message=f"{type(error).__name__}: {error}")
    return None


def _serve(connection: Connection, build: Build, journal: Journal | None) -> None:
    (start, *early) = connection.receive(None)
    if not isinstance(start, wire.Start) or early:
        raise wire.WireError(f"Expected Start alone as the first message, got {type(start).__name__}.")
    logs.configure(start.config.log_level, "worker")
    engine = build(start.config, connection)
    if journal is not None:
        engine.executor = Journaled(engine.executor, journal)
    tame_collector()
    run(connection, engine, idle_release=start.config.idle_release)


def open_engine(config: EngineConfig, connection: Connection) -> Engine:
    """Open the device, telling how far it is, and say what was fitted."""
    connection.send(wire.Progress(stage="starting", fraction=0.0))
    from surefoot.device.start import open_device  # torch takes seconds: not before the leash is on

    device = open_device(
        config, progress=lambda stage, fraction: connection.send(wire.Progress(stage=stage, fraction=fraction))
    )
    engine = Engine(device.executor, device.limits)
    connection.send(
        wire.Ready(
            pid=os.getpid(),
            limits=device.limits,
            spec=device.spec,
            plan_text=str(device.plan),
            plan=device.plan,
            notes=tuple(device.plan.notes),
        )
    )
    return engine


def tame_collector() -> None:
    """Keep garbage collection out of the step loop: what lives now lives for good, the rest is collected when idle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1_000)


def run(
    connection: Connection,
    engine: Engine,
    *,
    idle_release: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Step the engine until Stop; it rests after `idle_release` seconds without work. Raises ConnectionError when the
    API process is gone.
    """
    reporter = Reporter(connection, engine)
    reporter.report([])
    busy, idle_since = False, clock()
    while True:
        messages = connection.receive(patience(engine, clock(), idle_release, idle_since))
        if not (messages or engine.has_work or idle_release is None or clock() < idle_since + idle_release):
            engine.rest(clock())
            log.info("idle: memory of KV blocks given back", blocks=engine.snapshot().blocks_idle)
            reporter.report([])
            idle_since = math.inf
            continue
        for message in messages:
            if isinstance(message, wire.Stop):
                return
            if isinstance(message, wire.Resize):
                events, refusal = engine.fit(message.blocks, clock())
                reporter.report(events)
                blocks = engine.snapshot().blocks_total
                connection.send(wire.Resized(blocks=blocks, refusal=refusal, least=engine.least_blocks))
                log.info("KV cache resized", blocks=blocks, asked=message.blocks, why=refusal)
                continue
            obey(engine, message, clock())
        busy = busy or engine.has_work
        reporter.report(engine.step(clock()))
        if not engine.has_work:
            idle_since = clock()
        if busy and not engine.has_work:
            busy = False
            for fault in engine.check_when_idle():
                log.error("the books of KV blocks did not add up and were repaired", fault=fault)
            reporter.report([])
            gc.collect()


def patience(engine: Engine, now: float, idle_release: float | None = None, idle_since: float = 0.0) -> float | None:
    """Seconds to wait for a message before the next step, or, without work, before resting (`idle_release` seconds
    after `idle_since`, which is never for infinity); None where only a message can bring anything.
    """
    if not engine.has_work:
        rest = math.inf if idle_release is None else idle_since + idle_release
        return None if rest == math.inf else max(0.0, rest - now)
    until = engine.idle_until(now)
    return 0.0 if until is None else max(0.0, until - now)


def obey(engine: Engine, message: wire.ToWorker, now: float) -> None:
    if isinstance(message, wire.Add):
        engine.add(message.request, now)
    elif isinstance(message, wire.Cancel):
        engine.cancel(message.request, message.child)
    elif isinstance(message, wire.Learn):
        engine.executor.learn(message.vocabulary)
    else:
        raise wire.WireError(f"{type(message).__name__} is out of place once the worker is ready.")


class Reporter:
    """Tells the API process, and the log, what changed since it was last told."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._told: Snapshot | None = None
        self._told_at = 0.0

    def report(self, events: list[Event]) -> None:
        snapshot, now = self._engine.snapshot(), time.monotonic()
        if events or snapshot != self._told or now > self._told_at + HEARTBEAT:
            self._connection.send(wire.Step(events=events, snapshot=snapshot))
            self._told_at = now
            log_step(events, self._told or snapshot, snapshot)
            self._told = snapshot


def log_step(events: list[Event], before: Snapshot, after: Snapshot) -> None:
    """One line for each thing that an operator would want to know of."""
    if after.steps_oom > before.steps_oom:
        log.warning(
            "a step ran out of memory and is tried again, smaller",
            steps_oom=after.steps_oom,
            token_budget=after.token_budget,
        )
    if after.steps_fault > before.steps_fault:
        log.warning("a step failed and its rows are tried again, apart", steps_fault=after.steps_fault)
    if after.rows_failed > before.rows_failed:
        log.warning("a row came out wrong and failed alone", rows_failed=after.rows_failed)
    for event in events:
        if isinstance(event, Failed):
            log.warning("request failed", request=event.request, kind=event.kind, message=event.message)


if __name__ == "__main__":
    sys.exit(main())
