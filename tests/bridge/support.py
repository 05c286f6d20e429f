"""A worker in a thread: the real loop, socket and engine, with a fake device."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from surefoot.bridge import wire
from surefoot.bridge.worker import Connection, serve
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.spec import ModelSpec
from surefoot.testing import FakeExecutor
from surefoot.types import Limits, SamplingParams

EOS = 2
LIMITS = Limits(
    max_model_len=512,
    max_num_batched_tokens=64,
    max_num_seqs=8,
    block_size=4,
    num_blocks=256,
    eos_token_ids=(EOS,),
)
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    token_count=1000,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position=512,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
    attention_bias=False,
    eos_token_ids=(EOS,),
    bos_token_id=1,
    dtype="float32",
)
Make = Callable[[Limits], FakeExecutor]


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, "ignore_eos": True, **fields})  # type: ignore[arg-type]


class ThreadWorker:
    """Looks like `supervisor.WorkerProcess` to the client."""

    def __init__(self, make: Make = FakeExecutor, *, build: Callable[..., Engine] | None = None) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.journal = None
        self._make = make
        self._build = build or self._fake
        self.executor: FakeExecutor
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self.theirs:
            self.status = serve(Connection(self.theirs), self._build)

    def _fake(self, config: EngineConfig, connection: Connection) -> Engine:
        self.executor = self._make(LIMITS)
        connection.send(wire.Progress(stage="pretending", fraction=0.5))
        connection.send(wire.Ready(pid=1, limits=LIMITS, spec=SPEC, plan_text="a table", notes=("a note",)))
        return Engine(self.executor, LIMITS)

    @property
    def pid(self) -> int:
        return 1

    @property
    def returncode(self) -> int | None:
        return None if self._thread.is_alive() else (1 if self.status is None else self.status)

    def join(self) -> int | None:
        """Wait for the end; returns the exit status."""
        self._thread.join(5)
        return self.status

    def cpu_seconds(self) -> float:
        return time.monotonic()

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self.theirs.shutdown(socket.SHUT_RDWR)

    def epitaph(self) -> str:
        return f"exit status {self.status}"
