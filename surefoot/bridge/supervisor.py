"""Starts the worker process and knows how it ended.

The worker listens nowhere: one end of a socketpair is its only way in. Two leashes hold it. The kernel kills it when
the thread that started it ends (PDEATHSIG, asked for by the worker itself), even in the middle of a load; and the end
of file on its socket ends it on any system. So start it from a thread that lives as long as the engine is wanted.

It leads a process group of its own: Ctrl-C in a terminal reaches the server alone, which lets streams finish first.
"""

from __future__ import annotations

import os
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

import surefoot
from surefoot.bridge.journal import Journal

WORKER = ("-P", "-m", "surefoot.bridge.worker")
"""-P keeps the user's folder off the module path: a `random.py` there must not end the worker."""

WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Set for the worker unless the user set it: threads that spin for work, beside a busy process, made a small linear
layer 12-40 times slower."""


class WorkerProcess:
    """A running worker: its socket, its pid, and once it is gone, how it went."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, journal: Journal) -> None:
        self._process = process
        self.socket = connection
        self.journal: Journal | None = journal

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the signal; None while it runs."""
        return self._process.poll()

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far. Raises ProcessLookupError once it is gone."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            raise ProcessLookupError(self._process.pid) from None
        return float(times.user + times.system)

    def kill(self) -> None:
        self._process.kill()

    def epitaph(self) -> str:
        """How it ended, for a reader: `signal 9, SIGKILL`."""
        code = self.returncode
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit status {code}"
        hint = ": sent by a person or, when memory runs out, by the kernel" if code == -signal.SIGKILL else ""
        return f"signal {-code}, {signal.Signals(-code).name}{hint}"


def spawn(arguments: Sequence[str] = WORKER) -> WorkerProcess:
    """Start `python <arguments> <socket fd> <journal fd> <parent pid>`. Raises OSError where no process can be made."""
    ours, theirs = socket.socketpair()
    journal = Journal.create()
    descriptors = (theirs.fileno(), journal.fd)
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, *arguments, *map(str, descriptors), str(os.getpid())],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=worker_environment(os.environ),
            process_group=0,
        )
    except BaseException:
        ours.close()
        journal.close()
        raise
    finally:
        theirs.close()
    return WorkerProcess(process, ours, journal)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the worker; it imports this very copy of the package, installed or not."""
    result = WORKER_ENVIRONMENT | dict(environ)
    root = str(Path(surefoot.__file__).parents[1])
    if root not in site.getsitepackages():
        # Last on the path, since nothing here may shadow the standard library.
        result["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), root]))
    return result
