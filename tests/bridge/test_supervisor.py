"""Real worker processes with a fake device: nobody is left behind, however either side ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from surefoot.bridge import supervisor
from surefoot.bridge.client import EngineClient
from surefoot.config import EngineConfig
from surefoot.errors import EngineFailure, WorkerLost
from tests.bridge.support import params

ROOT = Path(__file__).parents[2]
FAKE = ("-m", "tests.bridge.fake_worker")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def spawn(*extra: str) -> supervisor.WorkerProcess:
    return supervisor.spawn((*FAKE, *extra))


async def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends (a zombie has ended) within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.02)
    return False


async def test_serves_and_stops() -> None:
    """A worker process serves a request over the inherited socket and ends with status 0 when told to stop."""
    worker = spawn()
    client = await EngineClient.start(EngineConfig(), spawn=lambda: worker)
    count = 0
    async for events in client.submit([5, 6], params()):
        count += len(events)
    assert client.worker_pid == worker.pid
    await client.stop()
    assert (count, worker.returncode) == (8, 0)


async def test_a_killed_worker_is_noticed_at_once() -> None:
    """`kill -9` of the worker raises EngineFailure that names the signal, well within a second."""
    client = await EngineClient.start(EngineConfig(), spawn=spawn)
    handle = client.submit([5], params(max_tokens=500))
    await anext(handle)
    os.kill(client.worker_pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineFailure, match="signal 9, SIGKILL"):
        async for _ in handle:
            pass
    assert time.monotonic() - killed < 1
    await client.stop()


async def test_a_worker_that_dies_while_loading_is_an_error_of_start() -> None:
    """Death before readiness raises WorkerLost with the signal."""
    worker = spawn("slow")
    starting = asyncio.create_task(EngineClient.start(EngineConfig(), spawn=lambda: worker))
    await asyncio.sleep(0.05)
    worker.kill()
    with pytest.raises(WorkerLost, match=r"died while starting \(signal 9"):
        await starting


async def test_cancelling_start_leaves_no_worker() -> None:
    """A start that is given up kills the worker that was loading."""
    worker = spawn("slow")
    starting = asyncio.create_task(EngineClient.start(EngineConfig(), spawn=lambda: worker))
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert worker.returncode == -signal.SIGKILL


async def test_terminal_and_service_signals_do_not_end_the_worker() -> None:
    """The worker leads its own process group and ignores SIGINT and SIGTERM: the server decides when it ends."""
    client = await EngineClient.start(EngineConfig(), spawn=spawn)
    pid = client.worker_pid
    assert os.getpgid(pid) == pid != os.getpgid(0)
    handle = client.submit([5], params())
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert len([event async for events in handle for event in events]) == 8
    await client.stop()


@pytest.mark.parametrize("mode", ["ready", "slow"])
async def test_a_killed_parent_takes_the_worker_along(mode: str) -> None:
    """`kill -9` of the process that started it ends the worker within 2 seconds, also while it loads."""
    code = (
        "import sys, time; from surefoot.bridge import supervisor, wire;"
        f"worker = supervisor.spawn({(*FAKE, mode)!r});"
        "from surefoot.config import EngineConfig;"
        "worker.socket.sendall(wire.frame(wire.Start(config=EngineConfig())));"
        "worker.socket.recv(1); print(worker.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.kill()
        assert await gone(pid, 2)


def test_a_worker_whose_parent_is_already_gone_does_not_start() -> None:
    """A parent that died before the leash was on is noticed by its pid."""
    result = subprocess.run(
        [sys.executable, *FAKE, "0", "0", "1"], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 1
    assert "is gone" in result.stderr


def test_the_workers_environment() -> None:
    """Threads do not spin, and what the user set stays."""
    environment = supervisor.worker_environment({"OMP_WAIT_POLICY": "ACTIVE", "PYTHONPATH": "/theirs"})
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == "/theirs"
    assert supervisor.worker_environment({})["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_users_folder_is_not_on_the_workers_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the current folder named like a standard module does not end the worker."""
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    result = subprocess.run(
        [sys.executable, *supervisor.WORKER, "0", "0", "1"],
        env=supervisor.worker_environment({"PATH": os.environ["PATH"]}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "shadowed" not in result.stderr
    assert "is gone" in result.stderr


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit status 0"), (70, "exit status 70"), (-9, "signal 9, SIGKILL"), (-11, "signal 11, SIGSEGV")],
)
def test_how_it_ended_is_told(code: int, text: str) -> None:
    """The epitaph names the exit status or the signal."""
    action = f"raise SystemExit({code})" if code >= 0 else f"import os; os.kill(os.getpid(), {-code})"
    worker = supervisor.spawn(("-c", action))
    deadline = time.monotonic() + 20
    while worker.returncode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.socket.close()
    assert worker.epitaph().startswith(text)
