"""Real processes that end, asked or not: nobody is left behind, and no stream ends in silence."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

import psutil
import pytest

from tests.faults.support import Server, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SMALL = ("--max-model-len", "1024", "--max-num-seqs", "4", "--memory", "1500MiB")
LONG = {"max_tokens": 900}


def text_of(events: Iterable[object]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if isinstance(event, dict) and event["choices"])


def test_a_killed_worker_is_replaced_and_streams_go_on() -> None:
    """`kill -9` of the worker: streams pause, then end with the text of an undisturbed run; nothing else is needed."""
    asked = [
        {"max_tokens": 80, "temperature": 0},
        {"max_tokens": 80, "temperature": 1.0, "seed": 7, "presence_penalty": 0.5},
        {"max_tokens": 80, "temperature": 0, "stop": ["the"], "min_tokens": 20},
    ]
    with Server(*SMALL, "--dtype", "float32").wait_ready() as server:
        undisturbed = [text_of(server.stream("Once upon a time", **fields)) for fields in asked]
        streams = [server.stream("Once upon a time", **fields) for fields in asked]
        begun = [[next(stream) for _ in range(6)] for stream in streams]
        worker = server.worker()
        worker.kill()
        assert [text_of([*start, *rest]) for start, rest in zip(begun, streams, strict=True)] == undisturbed
        assert server.worker().pid != worker.pid
        assert server.http.get("/health").status_code == 200
        assert server.complete("Hello").status_code == 200
        assert "surefoot:worker_restarts_total" in server.http.get("/metrics").text
        assert "It is replaced" in server.log


def test_without_restarts_a_killed_worker_ends_streams_in_an_error_and_the_server_with_70() -> None:
    """`--max-restarts 0`: a running stream gets one error event and no [DONE], and the server exits with 70."""
    with Server(*SMALL, "--max-restarts", "0").wait_ready() as server:
        events = server.stream("Once upon a time", **LONG)
        next(events)
        server.worker().kill()
        rest = list(events)
        assert isinstance(rest[-1], dict)
        assert rest[-1]["error"]["code"] == 500
        assert "signal 9" in rest[-1]["error"]["message"]
        assert "[DONE]" not in rest
        assert server.process.wait(10) == 70
        assert "no worker is left" in server.log


@pytest.mark.parametrize("loading", [True, False], ids=["while loading", "while serving"])
def test_a_killed_server_takes_the_worker_along(loading: bool) -> None:
    """`kill -9` of the server: its worker is gone within 2 seconds, also in the middle of a load or of a step."""
    with Server(*SMALL) as server:
        worker = server.worker()
        if loading:
            while worker.memory_info().rss < 200 << 20:  # torch is there, the weights are coming
                time.sleep(0.02)
        else:
            next(server.wait_ready().stream("Once upon a time", **LONG))
        server.process.kill()
        assert gone(worker, 2)


def test_sigterm_lets_streams_finish() -> None:
    """SIGTERM: a running stream goes on to its [DONE], new requests get a 503 and Retry-After, the status is 0."""
    with Server(*SMALL).wait_ready() as server:
        events = server.stream("Once upon a time", max_tokens=60)
        next(events)
        worker = psutil.Process(server.worker().pid)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = server.complete("Hello")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        rest = list(events)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert server.process.wait(20) == 0
        assert gone(worker, 1)


def test_a_second_sigterm_stops_now() -> None:
    """A second SIGTERM: running streams get an error event, and the server exits with 0 within seconds."""
    with Server(*SMALL).wait_ready() as server:
        events = server.stream("Once upon a time", **LONG)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        rest = list(events)
        assert isinstance(rest[-1], dict)
        assert rest[-1]["error"]["code"] == 503
        assert server.process.wait(10) == 0


def test_a_server_that_loads_is_alive_and_not_ready_and_can_be_stopped() -> None:
    """While loading /health/live is 200 and everything else 503; SIGTERM then ends both processes with status 0."""
    with Server(*SMALL) as server:
        worker = server.worker()
        live = server.http.get("/health/live")
        ready = server.http.get("/health/ready")
        server.process.send_signal(signal.SIGTERM)
        assert (live.status_code, ready.status_code) == (200, 503)
        assert "loading" in ready.json()["error"]["message"]
        assert server.process.wait(10) == 0
        assert gone(worker, 2)
