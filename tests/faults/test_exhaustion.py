"""A worker that really has no memory left: one request is at fault, and it alone notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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


@contextmanager
def squeezed(process: psutil.Process, spare: int) -> Iterator[None]:
    """Limits a process's address space to what it uses plus `spare` bytes, as `prlimit --as` does."""
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + spare, psutil.RLIM_INFINITY))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


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
    with ThreadPoolExecutor(8) as pool, squeezed(server.worker(), spare):
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
    reply, said = beside_witnesses(server, prompt, 20 * MIB)
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
