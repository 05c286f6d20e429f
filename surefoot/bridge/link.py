"""The API process's connection to one worker, from its start to its end. A worker that dies is never revived: the
client opens another link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol, Self

from surefoot.bridge import wire
from surefoot.bridge.journal import Journal
from surefoot.config import EngineConfig
from surefoot.errors import StartupError, WorkerLost

REAP_SECONDS = 2.0
"""How long a worker that closed its socket, or was told to stop, may take to be gone before it is killed."""

Progress = Callable[[str, float], None]


class Worker(Protocol):
    """What a link needs of a worker: `supervisor.WorkerProcess`, or a thread in tests."""

    socket: socket.socket
    journal: Journal | None

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def cpu_seconds(self) -> float: ...
    def kill(self) -> None: ...
    def epitaph(self) -> str: ...


class Link:
    """A worker that is ready, and the socket to it. Make it with `Link.open`."""

    def __init__(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker = worker
        self.info: wire.Ready
        self._reader, self._writer = reader, writer
        self._fatal: wire.Fatal | None = None

    @classmethod
    async def open(
        cls, spawn: Callable[[], Worker], config: EngineConfig, progress: Progress | None, *, patience: float
    ) -> Self:
        """Start a worker and wait until it is ready; `progress(stage, fraction)` is called as it loads.

        Raises the worker's own StartupError (with its exit code), or WorkerLost if it dies or takes longer than
        `patience` seconds. Nothing is left running then.
        """
        worker = spawn()
        reader, writer = await asyncio.open_unix_connection(sock=worker.socket)
        link = cls(worker, reader, writer)
        try:
            async with asyncio.timeout(patience):
                link.info = await link._handshake(config, progress)
        except TimeoutError:
            await link.discard()
            raise WorkerLost(f"The worker was not ready within {patience:g} s and was stopped.") from None
        except BaseException:
            await link.discard()
            raise
        return link

    async def _handshake(self, config: EngineConfig, progress: Progress | None) -> wire.Ready:
        self.send(wire.Start(config=config))
        while (message := await self.receive()) is not None:
            if isinstance(message, wire.Progress) and progress is not None:
                progress(message.stage, message.fraction)
            elif isinstance(message, wire.Ready):
                return message
        raise await self._startup_failure()

    async def _startup_failure(self) -> StartupError:
        await self.reap()
        if self._fatal is None:
            return WorkerLost(f"The worker process died while starting ({self.worker.epitaph()}).")
        kinds = {kind.exit_code: kind for kind in StartupError.__subclasses__()}
        return kinds.get(self._fatal.exit_code, WorkerLost)(self._fatal.message)

    def send(self, message: wire.ToWorker) -> None:
        """Never waits: what may pile up in the transport is bounded by admission."""
        self._writer.write(wire.frame(message))

    async def receive(self) -> wire.FromWorker | None:
        """The next message; None at the end of file. Raises WireError for garbage. A last word is kept for `death`."""
        try:
            (length,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
            wire.check_length(length)
            message = wire.decode_from_worker(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if isinstance(message, wire.Fatal):
            self._fatal = message
        return message

    def death(self, cause: str) -> str:
        """How the worker ended, for a reader; `cause` is what is known beside its own last word."""
        reason = cause or (self._fatal.message if self._fatal else "")
        return f"The worker process died ({self.worker.epitaph()}).{' ' + reason if reason else ''}"

    async def reap(self) -> None:
        """Wait until the worker is gone; kill it if that takes too long. Needs no thread: at exit there are none."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + REAP_SECONDS
        while self.worker.returncode is None:
            if clock() > deadline:
                self.worker.kill()
            await asyncio.sleep(0.01)

    async def discard(self) -> None:
        """End the worker at once, and close what belongs to it."""
        self.worker.kill()
        await self.reap()
        await self.close()

    async def close(self) -> None:
        """Close the socket and the journal of a worker that is gone."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the worker went first
            await self._writer.wait_closed()
        if self.worker.journal is not None:
            self.worker.journal.close()
            self.worker.journal = None
