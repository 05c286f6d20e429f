"""A deterministic engine without a model, and a real uvicorn server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from msgspec.structs import replace

from surefoot.api.app import create_app
from surefoot.api.tokenizer import Tokenizer
from surefoot.bridge.wire import Resized
from surefoot.config import ServerConfig
from surefoot.errors import RequestError
from surefoot.plan import MemoryPlan
from surefoot.spec import NO_DEFAULTS, GenerationDefaults
from surefoot.types import Emitted, Limits, Sampled, SamplingParams, Snapshot

TEXT = "The capital of France is Paris."
MAX_MODEL_LEN = 512


class FakeInfo:
    def __init__(self, eos: int) -> None:
        self.limits = Limits(
            max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64, max_num_seqs=8, block_size=16, num_blocks=100,
            eos_token_ids=(eos,),
        )  # fmt: skip

        self.plan: MemoryPlan | None = None


class FakeHandle:
    """Emits the engine's script, one token per child and step."""

    def __init__(self, engine: FakeEngine, number: int, prompt: Sequence[int], params: SamplingParams) -> None:
        self.engine, self.number, self.prompt, self.params = engine, number, list(prompt), params
        self.live = set(range(params.n))
        self.index = 0
        self.cancelled: list[int | None] = []

    def __aiter__(self) -> FakeHandle:
        return self

    async def __anext__(self) -> list[Emitted]:
        if not self.live:
            raise StopAsyncIteration
        if self.engine.failure is not None and self.index == self.engine.fail_at:
            self.live.clear()
            raise self.engine.failure
        await asyncio.sleep(self.engine.delay)
        events = [self._event(child) for child in sorted(self.live)]
        self.live -= {event.child for event in events if event.finish}
        self.index += 1
        return events

    def _event(self, child: int) -> Emitted:
        script = self.engine.script
        ended = self.index >= len(script) and not self.params.ignore_eos
        token = self.engine.eos if ended else script[self.index % len(script)]
        stopped = ended or token in self.params.stop_token_ids
        finish = "stop" if stopped else "length" if self.index + 1 == self.params.max_tokens else None
        alternatives = self.params.logprobs
        top = tuple((token + 1 + k, -2.0 - k) for k in range(alternatives or 0))
        sampled = Sampled(token, None if alternatives is None else -0.5, top)
        return Emitted(self.number, child, self.index, sampled, finish, token if stopped else None)

    def cancel(self, child: int | None = None) -> None:
        dropped = self.live & ({child} if child is not None else self.live)
        if dropped:
            self.cancelled.append(child)
            self.live -= dropped


class FakeEngine:
    """Set `script`, `delay` (seconds a step), `failure` at token `fail_at`, `refusal` at admission; read `handles`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos = tokenizer.eos_token_id or 0
        self.info = FakeInfo(self.eos)
        self._script = tokenizer.encode(TEXT)
        self.reset()

    def reset(self) -> None:
        self.script = list(self._script)
        self.delay = 0.0
        self.failure: Exception | None = None
        self.fail_at = 0
        self.refusal: RequestError | None = None
        self.refuse_after = 0
        self.handles: list[FakeHandle] = []
        self.snapshot = Snapshot(running=3, waiting=2, blocks_total=100, blocks_used=25, preemptions=7, steps_oom=4)
        self.draining = False
        self.alive, self.stalled, self.sleeping = True, False, False
        self.lost, self.restarts = False, 0

    worker_pid = None

    async def resize(self, blocks: int) -> Resized:
        self.snapshot = replace(self.snapshot, blocks_total=blocks)
        return Resized(blocks=blocks)

    async def sleep(self) -> None:
        self.alive, self.sleeping = False, True

    async def wake(self) -> None:
        self.alive, self.sleeping = True, False

    async def drain(self, seconds: float) -> bool:
        self.draining = True
        return True

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = "") -> FakeHandle:
        assert params.seed is not None
        assert params.max_tokens is not None
        if self.refusal is not None and len(self.handles) >= self.refuse_after:
            raise self.refusal
        handle = FakeHandle(self, len(self.handles), prompt, params)
        self.handles.append(handle)
        return handle


@contextmanager
def served(
    engine: FakeEngine, tokenizer: Tokenizer, config: ServerConfig, defaults: GenerationDefaults = NO_DEFAULTS
) -> Iterator[str]:
    """The app behind a real socket; yields its base URL."""
    app = create_app(engine, tokenizer, config, defaults)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        sock.close()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Fail unless `condition` becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
