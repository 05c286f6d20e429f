"""The programs in examples/ do what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The service for vLLM, with steps of more than 48 tokens running out of memory, where a block has 64."""
    source = (EXAMPLES / "vllm_service.py").read_text()
    fault = "block_size=64, allow_fault_injection=True, faults='execute:oom:tokens>48',"
    program = tmp_path_factory.mktemp("service") / "service.py"
    program.write_text(source.replace("enforce_eager=True,", f"enforce_eager=True, {fault}"))
    assert fault in program.read_text()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = os.environ | {"PORT": str(port), "MAX_MODEL_LENGTH": "512"}
    process = subprocess.Popen([sys.executable, str(program)], env=environ, stderr=subprocess.DEVNULL)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        deadline = time.monotonic() + 90
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            try:
                http.get("/openapi.json")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield http
    process.kill()
    process.wait()


def ask(http: httpx.Client, text: str, **fields: object) -> httpx.Response:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": text}]
    body = {"messages": messages, "temperature": 0.0, "max_tokens": 5, **fields}
    # uvicorn closes the connection of a request that raised, so each has its own
    return http.post("/v1/chat/completions", json=body, headers={"connection": "close"})


def test_a_service_for_vllm_outlives_a_request_that_runs_out_of_memory(service: httpx.Client) -> None:
    """A program written for vLLM, its import changed: one request fails, and the next one is answered as ever."""
    before = ask(service, "Name a colour.").json()
    assert before["choices"][0]["message"]["content"]
    assert before["usage"]["completion_tokens"] == 5
    assert before["usage"]["total_tokens"] == before["usage"]["prompt_tokens"] + 5
    assert ask(service, "word " * 300).status_code == 500
    assert ask(service, "Name a colour.").json() == before


def test_a_service_for_vllm_streams(service: httpx.Client) -> None:
    """Its deltas, made from cumulative outputs, add up to the whole answer."""
    whole = ask(service, "Name a colour.").json()["choices"][0]["message"]["content"]
    lines = [line for line in ask(service, "Name a colour.", stream=True).text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).strip() == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
