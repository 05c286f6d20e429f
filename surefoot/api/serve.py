"""`surefoot serve`: the life of the server process, from a bound socket to its exit status.

    bind and listen → load (every route answers 503, /health/live 200) → serve → drain → stop

The socket is taken before the model is loaded, so that a port in use is known at once. SIGTERM or SIGINT drains: new
requests get a 503, running ones have `drain_timeout` seconds to finish; a second signal stops now. Exit status 0 when
asked to go, 70 when the worker died.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import psutil
import structlog
import uvicorn
from rich.console import Console
from starlette.types import ASGIApp, Receive, Scope, Send

from surefoot import checkpoint
from surefoot.api.connection import BoundedProtocol
from surefoot.api.progress import loading_bar
from surefoot.bridge import logs
from surefoot.bridge.client import EngineClient
from surefoot.bridge.policy import Policy
from surefoot.config import EngineConfig, ServerConfig
from surefoot.errors import ConfigError, Overloaded, StartupError, WorkerLost
from surefoot.spec import GenerationDefaults, read_generation_defaults

GRACE = 5
"""Seconds that connections get to take their last bytes once nothing runs any more."""
KEEP_ALIVE = 60
BACKLOG = 2048

log = structlog.get_logger()
T = TypeVar("T")


def serve(config: EngineConfig, server: ServerConfig, notes: Sequence[str] = ()) -> int:
    """Serve until asked to stop or until the worker dies; returns the exit status. Raises StartupError.

    `notes` is what there is to say about settings that were accepted and change nothing.
    """
    logs.configure(server.log_level, "server")
    for note in notes:
        log.info(note)
    files = checkpoint.find(config.model, weights=config.load_format != "dummy")
    if not server.served_model_name:
        server = msgspec.structs.replace(server, served_model_name=(files.name,))
    if config.faults and not config.allow_fault_injection:
        log.warning("SUREFOOT_FAULTS is not obeyed without --allow-fault-injection")
    with listen(server.host, server.port) as sock, asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(Server(config, server, files, sock).run())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError where the address is taken or is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: is not an address of this machine: {error.strerror}.") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} of {host} is in use by another program. Stop that one, or choose another with --port."
            ) from error
        raise ConfigError(f"Cannot listen on {host} port {port}: {error.strerror}.") from error
    return sock


class Entrance:
    """The application while the real one is not there yet: alive, not ready, and saying so."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        if scope["path"] == "/health/live":
            await _reply(send, 200, {"status": "alive"}, [])
            return
        error = Overloaded("The model is still loading. Try again in a few seconds.", retry_after=GRACE)
        await _reply(send, error.status, error.body(), [(b"retry-after", str(GRACE).encode())])


async def _reply(send: Send, status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    content = msgspec.json.encode(body)
    headers = [*headers, (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """Events for the first and the second request to stop."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None (and `work` cancelled) if `stop` is set first."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class Server:
    """One run of the server."""

    def __init__(
        self, config: EngineConfig, server: ServerConfig, files: checkpoint.Checkpoint, sock: socket.socket
    ) -> None:
        self._config, self._server, self._files, self._socket = config, server, files, sock
        self._console = Console(stderr=True, highlight=False)
        self._entrance = Entrance()
        self._http = HttpServer(
            uvicorn.Config(
                self._entrance,
                http=BoundedProtocol,
                log_config=None,
                log_level=server.log_level
                if server.log_level == "debug"
                else "error",  # a stranger's noise is no warning
                access_log=server.log_level == "debug",
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE,
            )
        )

    async def run(self) -> int:
        signals = Signals()
        outcome: int | StartupError
        async with asyncio.TaskGroup() as group:
            group.create_task(self._http.serve(sockets=[self._socket]))
            try:
                outcome = await self._life(signals)
            except StartupError as error:
                outcome = error
            finally:
                self._http.should_exit = True
        if isinstance(outcome, StartupError):
            raise outcome
        return outcome

    async def _life(self, signals: Signals) -> int:
        client = await unless(signals.first, self._load())
        if client is None:
            return 0
        self._announce(client)
        lost = await unless(signals.first, client.wait_lost())
        if lost is None:
            await self._drain(client, signals)
        else:
            log.error("no worker is left: the server ends", reason=lost)
        await client.stop("The server was stopped before the request was done.")
        return WorkerLost.exit_code if client.lost else 0

    async def _load(self) -> EngineClient:
        """Start the worker and, meanwhile, prepare the application; then open the entrance."""
        build: Callable[[EngineClient], ASGIApp]
        client: EngineClient
        with loading_bar(self._console) as progress:
            build, client = await asyncio.gather(
                asyncio.to_thread(self._prepare_app),
                EngineClient.start(
                    self._config,
                    progress=progress,
                    policy=self._policy(),
                ),
            )
        self._entrance.app = build(client)
        return client

    def _policy(self) -> Policy:
        names = ("max_queued_requests", "max_queued_tokens", "max_restarts", "restart_window", "incident_dir",
                 "sleep_after")  # fmt: skip
        return Policy(**{name: getattr(self._server, name) for name in names})

    def _prepare_app(self) -> Callable[[EngineClient], ASGIApp]:
        """The tokenizer and the application, made in a thread: importing them takes half of the worker's start."""
        from surefoot.api.app import create_app
        from surefoot.api.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._files, chat_template=self._server.chat_template)
        vocabulary = tokenizer.vocabulary()
        read = self._server.generation_config == "auto"
        defaults = read_generation_defaults(self._files) if read else GenerationDefaults()

        def build(client: EngineClient) -> ASGIApp:
            client.learn(vocabulary)
            return create_app(client, tokenizer, self._server, defaults)

        return build

    def _announce(self, client: EngineClient) -> None:
        seconds = time.time() - psutil.Process().create_time()
        host, port = self._socket.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        name = self._server.served_model_name[0]
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._server.api_key else ""
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        out = self._console
        out.print(client.info.plan_text, markup=False)
        for note in client.info.notes:
            out.print(f"note: {note}", markup=False, style="yellow")
        out.print(
            f"Ready in {seconds:.1f} s: {name} on {url}/v1 (documentation: {url}/docs)",
            style="bold green",
            soft_wrap=True,
        )
        out.print(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
            markup=False,
            soft_wrap=True,
        )

    async def _drain(self, client: EngineClient, signals: Signals) -> None:
        seconds = self._server.drain_timeout
        client.draining = True
        log.info("stopping: running requests may finish; a second signal stops now",
                 requests=client.in_flight, seconds=seconds)  # fmt: skip
        if not await unless(signals.second, client.drain(seconds)):
            log.warning("stopping now", requests_cut=client.in_flight)
