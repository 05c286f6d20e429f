"""A running server's memory, shown and limited: what it gives back is really gone, and no request fails for it."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.config import MIB
from tests.faults.support import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
ADMIN = {"authorization": "Bearer secret"}
FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "4", "--memory", "1700MiB", "--admin-api-key", "secret")
PROMPTS = [f"Chapter {number}. " + "It was a bright cold day in April. " * 40 for number in range(4)]


def test_a_lower_limit_takes_effect_at_once_and_fails_nobody() -> None:
    """With four streams running a limit of an eighth of the cache is obeyed within seconds: the worker's resident
    memory falls by what the blocks took, every stream has the text of an undisturbed run, and the cache grows back.
    """
    with Server(*FLAGS, "--dtype", "float32").wait_ready() as server:
        fields = {"max_tokens": 30}
        texts = [server.text(prompt, **fields) for prompt in PROMPTS]
        before = server.http.get("/memory", headers=ADMIN).json()
        assert before["kv"]["blocks"] == before["kv"]["blocks_planned"]

        results: dict[int, str] = {}

        def ask(number: int) -> None:
            results[number] = server.text(PROMPTS[number], **fields)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while server.metric("vllm:num_requests_running") < 4 and any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
        resident = server.worker().memory_info().rss
        kv = before["rows"]["kv_cache"]
        began = time.monotonic()
        reply = server.http.post("/memory", headers=ADMIN, json={"limit": before["limit"] - kv * 7 // 8})
        assert reply.is_success, reply.text
        assert time.monotonic() - began < 20  # ten times the two seconds that are promised
        assert server.worker().memory_info().rss < resident - 20 * MIB
        after = reply.json()
        assert after["kv"]["blocks"] < before["kv"]["blocks"] // 6
        assert after["limit"] <= before["limit"] - kv * 7 // 8
        for thread in threads:
            thread.join()
        assert [results[number] for number in range(4)] == texts
        assert server.metric("surefoot:requests_failed_total") == 0

        grown = server.http.post("/memory", headers=ADMIN, json={"limit": "8GiB"}).json()
        assert grown["kv"]["blocks"] == before["kv"]["blocks_planned"]
        assert server.text(PROMPTS[0], **fields) == texts[0]
        shown = CliRunner().invoke(app, ["memory", "--url", server.url, "--admin-api-key", "secret"])
        assert shown.exit_code == 0
        assert "KV blocks" in shown.stdout


@pytest.mark.parametrize("limit", ["1MiB", "much", -1, 1.5, None, True])
def test_limits_that_cannot_be(limited: Server, limit: object) -> None:
    """A limit below weights and one sequence, or that is no size, is a 400 that names the field and changes nothing."""
    reply = limited.http.post("/memory", headers=ADMIN, json={"limit": limit})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")


def test_only_the_admin_may(limited: Server) -> None:
    """Without the admin key memory is neither shown nor changed."""
    assert limited.http.get("/memory").status_code == 401
    assert limited.http.post("/memory", json={"limit": "2GiB"}).status_code == 401


def test_a_new_worker_keeps_the_limit(limited: Server) -> None:
    """The worker that replaces one that died is held to the limit too."""
    whole = limited.http.get("/memory", headers=ADMIN).json()
    limit = whole["limit"] - whole["rows"]["kv_cache"] // 2
    reply = limited.http.post("/memory", headers=ADMIN, json={"limit": limit})
    assert reply.is_success, reply.text
    blocks = reply.json()["kv"]["blocks"]
    limited.worker().kill()
    assert limited.text("Hello")
    assert limited.http.get("/memory", headers=ADMIN).json()["kv"]["blocks"] == blocks


@pytest.fixture(scope="module")
def limited():  # type: ignore[no-untyped-def]
    with Server(*FLAGS).wait_ready() as server:
        yield server


def test_an_idle_server_gives_its_cache_back() -> None:
    """With --idle-release the worker's resident memory falls once nobody asks, and the next request has its text all
    the same; a prompt that the cache can hold is not refused for it.
    """
    with Server(*FLAGS, "--dtype", "float32", "--idle-release", "0.5").wait_ready() as server:
        text = server.text(PROMPTS[0], max_tokens=30)
        for prompt in PROMPTS[1:]:
            server.text(prompt, max_tokens=2)
        deadline = time.monotonic() + 20
        while not server.metric("surefoot:kv_blocks_idle"):
            assert time.monotonic() < deadline, "it never rests"
            time.sleep(0.05)
        rested = server.worker().memory_info().rss
        found = server.http.get("/memory", headers=ADMIN).json()
        assert (found["kv"]["blocks"], found["kv"]["blocks_idle"]) == (0, found["kv"]["blocks_planned"])
        assert server.text(PROMPTS[0], max_tokens=30) == text
        assert server.worker().memory_info().rss > rested + 10 * MIB
        assert server.metric("surefoot:requests_failed_total") == 0


def test_a_sleeping_server_has_no_worker_and_wakes_for_a_request(limited: Server) -> None:
    """/sleep ends the worker, and with it all that it held; the next request gets the text that it would have had."""
    text, deaths = limited.text("Hello"), limited.metric("surefoot:worker_restarts_total")
    assert limited.http.post("/sleep", headers=ADMIN).is_success
    assert psutil.Process(limited.process.pid).children() == []
    assert limited.text("Hello") == text
    assert limited.metric("surefoot:worker_restarts_total") == deaths
