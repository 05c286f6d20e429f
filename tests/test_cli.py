"""The command line: what it accepts, how it refuses, and that it starts fast."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import surefoot
from surefoot import cli
from surefoot.api import settings

RUNNER = CliRunner()


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environ,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["serve", "--max_model_len", "4k"], ["serve", "--max-model-len", "4k"]),
        (["serve", "--max_model_len=a_b"], ["serve", "--max-model-len=a_b"]),
        (["serve", "./my_model", "-h"], ["serve", "./my_model", "-h"]),
        (["generate", "--", "--a_b"], ["generate", "--", "--a_b"]),
    ],
)
def test_dashes_and_underscores_are_the_same(given: list[str], expected: list[str]) -> None:
    """Option names may be written with underscores; values, arguments and what follows -- are left alone."""
    assert cli.normalise(given) == expected


def test_version() -> None:
    """`surefoot version` prints the version alone."""
    result = RUNNER.invoke(cli.app, ["version"])
    assert (result.exit_code, result.output) == (0, surefoot.__version__ + "\n")


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_help_has_examples(command: str) -> None:
    """Every command's help shows how it is called."""
    result = RUNNER.invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"surefoot {command}" in result.output


def test_every_setting_has_a_flag() -> None:
    """`serve` has a flag for each setting, but for the fault text, which is a variable only."""
    command = cli.serve.__annotations__
    assert set(settings.SETTINGS) - set(command) == {"faults"}
    assert set(command) - set(settings.SETTINGS) == {"context", "config", "return"}


def test_flags_arrive_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given on the command line is what the server is run with, and its result is the exit status."""
    seen: list[Any] = []
    monkeypatch.setattr("surefoot.api.serve.serve", lambda *configs: seen.extend(configs) or 7)
    arguments = (
        "serve smollm2 --port 9 --api-key a --api-key b --memory 2GiB --max-model-len 32K --allow-fault-injection"
    )
    result = RUNNER.invoke(cli.app, arguments.split(), env={"SUREFOOT_HOST": "::1"})
    assert result.exit_code == 7
    engine, server, _ = seen
    assert (engine.memory, engine.max_model_len, engine.allow_fault_injection) == (2 << 30, 32768, True)
    assert (server.port, server.host, server.api_key) == (9, "::1", ("a", "b"))


def test_a_bad_flag_exits_with_2_and_one_message() -> None:
    """A ConfigError is shown as one line without a traceback, with exit status 2."""
    result = run("serve", "--memory", "lots")
    assert result.returncode == 2
    assert "--memory: 'lots' is not a size" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_variable_exits_with_2() -> None:
    """A mistyped SUREFOOT_ variable ends the start."""
    result = run("serve", SUREFOOT_PROT="1")
    assert result.returncode == 2
    assert "SUREFOOT_PROT" in result.stderr and "SUREFOOT_PORT" in result.stderr


@pytest.mark.slow
def test_an_unknown_model_exits_with_3() -> None:
    """ModelNotFound has exit status 3 and says what may be named."""
    result = run("serve", "no/such/model", "--port", "0")
    assert result.returncode == 3
    assert "no/such/model" in result.stderr and "smollm2" in result.stderr


@pytest.mark.slow
def test_a_taken_port_exits_with_2_before_anything_is_loaded() -> None:
    """A port in use is known at once, and the message names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port)
    assert result.returncode == 2
    assert f"Port {port} of 127.0.0.1 is in use" in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.slow
def test_an_address_that_is_not_ours_exits_with_2() -> None:
    """A host that cannot be listened on is a ConfigError."""
    result = run("serve", "--host", "192.0.2.1")
    assert result.returncode == 2
    assert "192.0.2.1" in result.stderr


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_told() -> None:
    """`generate --url` with nobody there says so, exit status 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = run("generate", "Hello", "--url", f"http://127.0.0.1:{port}/v1")
    assert result.returncode == 1
    assert "No server answers" in result.stderr


def test_help_needs_nothing_heavy() -> None:
    """Importing the command line pulls in no server, model or HTTP library."""
    heavy = {"torch", "fastapi", "uvicorn", "httpx", "numpy", "tokenizers", "structlog", "yaml"}
    code = f"import sys, surefoot.cli; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
