"""A real server with the embedded model in processes of its own, and plain ways to talk to it and to end it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

MODEL = "smollm2"
START_SECONDS = 90.0


class Server:
    """`surefoot serve` as a child process. `wait_ready` before asking it anything; leaving the block kills it."""

    def __init__(self, *flags: str, **environ: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile("w")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, "-m", "surefoot", "serve", "--port", str(port), *flags],
            stderr=self._log,
            env=os.environ | environ,
        )
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()
        self._log.close()

    @property
    def log(self) -> str:
        """What it has written so far."""
        return Path(self._log.name).read_text()

    def wait_ready(self) -> Self:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            try:
                if self.http.get("/health/ready").is_success:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {START_SECONDS} s: {self.log}")

    def worker(self) -> psutil.Process:
        """The worker process, once it is there."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children():
                return child
            time.sleep(0.02)
        raise AssertionError(f"no worker: {self.log}")

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body(prompt, **fields))

    def text(self, prompt: str, **fields: Any) -> str:
        reply = self.complete(prompt, **fields)
        assert reply.is_success, reply.text
        return str(reply.json()["choices"][0]["text"])

    def stream(self, prompt: str, **fields: Any) -> Iterator[dict[str, Any] | str]:
        """The events of a streamed completion: chunks, maybe an error, and the text "[DONE]"."""
        with self.http.stream("POST", "/v1/completions", json=body(prompt, stream=True, **fields)) as reply:
            assert reply.is_success, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}


def gone(process: psutil.Process, seconds: float) -> bool:
    """Whether the process ends within `seconds`; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
