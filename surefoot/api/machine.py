"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

import surefoot

PACKAGES = ("surefoot", "torch", "triton", "numpy", "tokenizers")


def describe_machine() -> dict[str, Any]:
    """Time, commit, processor, memory in bytes, GPUs, load average and versions, as plain values."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(psutil.Process().cpu_affinity())
            if hasattr(psutil.Process, "cpu_affinity")
            else os.cpu_count(),
            "memory": psutil.virtual_memory().total,
            "gpus": _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
            "load_average": os.getloadavg()[0],
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _commit() -> str | None:
    """Of the checkout that this package lies in, with a + where files differ from it; None outside of one."""
    root = str(Path(surefoot.__file__).parent)
    found = _output("git", "-C", root, "rev-parse", "HEAD")
    changed = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
    return found[0] + ("+" if changed else "") if found else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _output(*command: str) -> list[str]:
    """The lines a program prints; none where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return []
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.splitlines()  # noqa: S603


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
