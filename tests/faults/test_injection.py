"""Faults injected into a real server by SUREFOOT_FAULTS: requests are retried, and their text does not change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.support import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SMALL = ("--max-model-len", "1024", "--max-num-seqs", "4", "--memory", "1500MiB")
PROMPTS = [f"Story number {number}:" for number in range(6)]


def ask_all(server: Server) -> list[str]:
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda prompt: server.text(prompt, max_tokens=16), PROMPTS))


def test_steps_that_fail_now_and_then_change_nothing() -> None:
    """With a fifth of all steps out of memory every request still completes, with the text of a healthy server."""
    with Server(*SMALL).wait_ready() as healthy:
        expected = ask_all(healthy)
    with Server(*SMALL, "--allow-fault-injection", SUREFOOT_FAULTS="execute:oom:p=0.2").wait_ready() as server:
        assert ask_all(server) == expected
        assert server.metric("surefoot:steps_oom_total") > 0
        assert server.complete("Hello").status_code == 200
