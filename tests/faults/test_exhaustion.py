"""A worker that really has no memory left: one request is at fault, and it alone notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import httpx
import psutil
import pytest

from tests.faults.support import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
KV_BYTES = 30 * 2 * 3 * 64 * 4
"""Of one token: layers × (k, v) × heads × head size × float32."""
WITNESSES = [f"Story number {number}:" for number in range(8)]
OUTPUT = 32
FAULTS = "execute:oom:step=3,execute:oom:step=9,execute:raise:step=15"


class Squeeze:
    """Holds a process's address space, as `prlimit --as` does, at the least that it has used plus `spare` bytes.

    The limit follows what the process gives back, so that every step meets it, and never what a slow step takes.
    """

    def __init__(self, process: psutil.Process, spare: int) -> None:
        self._process, self._spare = process, spare
        self._least = process.memory_info().vms
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        while not self._over.wait(0.05):
            used = self._process.memory_info().vms
            if used < self._least:
                self._least = used
                self._limit(used + self._spare)

    def _limit(self, soft: int) -> None:
        self._process.rlimit(psutil.RLIMIT_AS, (soft, psutil.RLIM_INFINITY))

    def __enter__(self) -> Self:
        self._limit(self._least + self._spare)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._limit(psutil.RLIM_INFINITY)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--max-num-seqs", "10", "--memory", "2GiB")
    with Server(*flags) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def faulty() -> Iterator[Server]:
    """A server with memory enough, and with a few failures on cue in its first steps."""
    flags = ("--max-model-len", "2048", "--max-num-seqs", "8", "--memory", "1500MiB", "--allow-fault-injection")
    with Server(*flags, SUREFOOT_FAULTS=FAULTS) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """What each witness says when there is memory enough."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: server.text(prompt, max_tokens=OUTPUT), WITNESSES))


def witness(server: Server, prompt: str, started: threading.Barrier) -> str:
    """Streams one answer; passes the barrier at its first token."""
    text = ""
    for event in server.stream(prompt, max_tokens=OUTPUT):
        if isinstance(event, dict):
            if not text:
                started.wait(60)
            text += event["choices"][0]["text"]
    return text


def beside_witnesses(server: Server, prompt: str, spare: int) -> tuple[httpx.Response, list[str]]:
    """The reply to `prompt`, sent while eight streams run and only `spare` bytes are left; and what those said."""
    started = threading.Barrier(9)
    with ThreadPoolExecutor(8) as pool, Squeeze(server.worker(), spare):
        streams = [pool.submit(witness, server, other, started) for other in WITNESSES]
        started.wait(60)
        reply = server.complete(prompt)
        return reply, [stream.result() for stream in streams]


def test_injected_failures_change_nothing(faulty: Server, expected: list[str]) -> None:
    """Steps that run out of memory or raise are tried again: every request completes, with its usual text."""
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: faulty.text(prompt, max_tokens=OUTPUT), WITNESSES)) == expected
    assert (faulty.metric("surefoot:steps_oom_total"), faulty.metric("surefoot:steps_fault_total")) == (2, 1)


def test_a_step_that_cannot_be_allocated_is_retried_smaller(
    server: Server, faulty: Server, expected: list[str]
) -> None:
    """A prompt whose large steps do not fit is served in small ones, and gives the same text as with memory enough."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 120
    plenty = faulty.text(prompt)  # asked elsewhere: a cached prefix would spare the squeezed run its large steps
    failed = server.metric("surefoot:steps_oom_total")
    reply, said = beside_witnesses(server, prompt, 34 * MIB)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == plenty
    assert server.metric("surefoot:steps_oom_total") > failed
    assert said == expected


def test_a_request_that_cannot_be_served_fails_alone(server: Server, expected: list[str]) -> None:
    """A prompt too long for the memory left ends in 413 with the numbers, or completes in small steps; the eight
    streams beside it say what they would have said, the next request works, and the memory comes back."""
    tokens = 3000
    worker = server.worker()
    before = worker.memory_info().rss
    reply, said = beside_witnesses(server, "word " * tokens, 30 * MIB)
    if reply.status_code != 200:
        assert reply.status_code == 413, reply.text
        error = reply.json()["error"]
        assert error["type"] == "insufficient_memory"
        assert "Needed: " in error["message"] and "Free: " in error["message"]
    assert said == expected
    assert server.text(WITNESSES[0], max_tokens=OUTPUT) == expected[0]
    assert worker.is_running() and server.worker().pid == worker.pid
    assert server.metric("vllm:num_requests_running") == 0
    deadline = time.monotonic() + 10
    while (grown := worker.memory_info().rss - before) > tokens * KV_BYTES + 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    assert grown <= tokens * KV_BYTES + 64 * MIB, f"{grown / MIB:.0f} MiB more than before"
