"""Memory of the device: how much there is, and what to make of it when there was not enough.

`guard` is the one function that catches a failure of the device. Nothing else in this package may, so that what
follows a failure (letting go of its tensors, probing, classifying) happens every time and in one order.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil
import torch

from surefoot.config import MIB
from surefoot.errors import SurefootError
from surefoot.plan import MachineMemory
from surefoot.types import FailureKind

T = TypeVar("T")

_LIBC = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_MALLINFO_FIELDS = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]

PAGE = os.sysconf("SC_PAGE_SIZE")
SLIM = 64 * MIB
"""A RuntimeError that does not say what it is (oneDNN: "could not create a primitive") is one of memory below this."""
CACHE_SECONDS = 0.01
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_SCALE = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ALLOCATION = re.compile(r"DefaultCPUAllocator|bad_alloc|out of memory|[Cc]annot allocate memory")


@dataclass(frozen=True)
class Ok(Generic[T]):
    """`fn` returned."""

    value: T


@dataclass(frozen=True)
class Failure:
    """`fn` raised; by now its tensors are gone and the device was probed.

    `needed` is what the failed allocation asked for, where the error tells; `free` is what is free now (bytes);
    `trace` is the traceback as text, which holds on to nothing; `cause` as in `types.StepFailed`.
    """

    kind: FailureKind
    reason: str
    needed: int | None
    free: int
    trace: str
    cause: str = "allocation"


def guard(fn: Callable[[], T], *, probe: Callable[[], object] | None = None) -> Ok[T] | Failure:
    """Run `fn`; on an exception, say what kind of failure it is.

    The error is only read inside the except block. Leaving it drops the traceback, and with it the frames that hold
    the step's tensors; only then is there memory to probe with.
    """
    try:
        return Ok(fn())
    except SurefootError:
        raise  # explains itself already, and says nothing about the device
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}"
        trace = traceback.format_exc()
        asked = _asked_bytes(str(error))
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_ALLOCATION.search(str(error)))
        unclear = type(error) is RuntimeError
    if memory or unclear:
        gc.collect()
    release_cached()
    return _classify(reason, trace, asked, memory=memory, unclear=unclear, usable=_usable(probe))


def _usable(probe: Callable[[], object] | None) -> bool:
    """Whether the device still computes. A CPU that has no memory left for the probe is full, not lost."""
    outcome = guard(probe_device, probe=_nothing) if probe is None else guard(probe, probe=_nothing)
    return isinstance(outcome, Ok) or outcome.kind is FailureKind.OOM


def _classify(reason: str, trace: str, asked: int | None, *, memory: bool, unclear: bool, usable: bool) -> Failure:
    free = free_memory(fresh=True)
    if not usable:
        kind = FailureKind.LOST
    elif memory or (unclear and free_memory(mapped=True) < SLIM):
        kind = FailureKind.OOM
    else:
        kind = FailureKind.FAULT
    return Failure(kind, reason, asked, free, trace, "allocation" if memory else "library")


def _nothing() -> None:
    """The probe of a probe: what failed is known already."""


def probe_device() -> None:
    """A small computation with a known result; raises where the device does not compute any more."""
    device = "cuda" if _cuda_in_use() else "cpu"
    ones = torch.ones(16, 16, device=device)
    if float((ones @ ones).sum()) != 16**3:
        raise ArithmeticError("the probe computed a wrong sum")


def settle_malloc() -> None:
    """Make glibc's allocator keep what a step uses and give back the rest on demand (`release_cached`).

    Left alone it maps and unmaps large blocks, whose pages are cleared anew on every step, and reserves an arena of
    address space per thread, which a limit on the address space counts.
    """
    if hasattr(_LIBC, "mallopt"):
        for option, value in ((_M_MMAP_THRESHOLD, 32 * MIB), (_M_TRIM_THRESHOLD, 512 * MIB), (_M_ARENA_MAX, 1)):
            _LIBC.mallopt(option, value)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def release_cached() -> None:
    """Hand host memory that no tensor holds back. A GPU's stays: it is the arena of the next step."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def _asked_bytes(text: str) -> int | None:
    match = _ASKED.search(text)
    return int(float(match[1]) * _SCALE[match[2]]) if match else None


# ---- how much there is ----------------------------------------------------------------------------------------------


def measure(device: torch.device | None = None) -> MachineMemory:
    """Total and free bytes of the device, and on CPU the tightest limit set on this process."""
    if device is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MachineMemory(total=total, free=free, name=torch.cuda.get_device_name(device))
    total = psutil.virtual_memory().total
    bounds = [bound for bound, _ in (*_cgroups(), *_rlimits())]
    limit = min(bounds, default=None)
    return MachineMemory(total=min(total, limit or total), free=free_memory(fresh=True), limit=limit)


_last: tuple[float, int] = (-1.0, 0)


def free_memory(*, fresh: bool = False, mapped: bool = False) -> int:
    """Bytes that this process could still allocate, or map (code of kernels is mapped: malloc's idle heap is no use to
    it); cheap enough to be read every step.

    On a GPU that is what the card has free, neighbours counted (6 us); what steps need is reserved besides.

    What the machine and the cgroup have is remembered for 10 ms. Limits on the process are read every time: they can
    be set from outside at any moment (`prlimit --as`), and reading them takes microseconds.
    """
    global _last
    if _cuda_in_use():
        return int(torch.cuda.mem_get_info()[0])
    now = time.monotonic()
    if fresh or now - _last[0] > CACHE_SECONDS:
        room = [bound - used for bound, used in _cgroups()]
        _last = (now, min([_available(), *room]))
    limits = _rlimits()
    if not limits:
        return max(0, _last[1])
    # What malloc holds and nobody uses counts as used by the limit, and can be used again all the same.
    idle = 0 if mapped else _idle_heap()
    return max(0, min([_last[1], *(bound - used + idle for bound, used in limits)]))


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


def _idle_heap() -> int:
    """Bytes of malloc's heap that are free (`fordblks`); 0 where the C library does not tell."""
    return int(_MALLINFO().fordblks) if _MALLINFO is not None else 0


def _mallinfo() -> Callable[[], _MallInfo] | None:
    function = getattr(_LIBC, "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo
    return function


_MALLINFO = _mallinfo()


def _available() -> int:
    """MemAvailable of the machine, in bytes."""
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(psutil.virtual_memory().available)


def _rlimits() -> list[tuple[int, int]]:
    """(limit, used) of the address space and of private memory, where they are limited."""
    address = resource.getrlimit(resource.RLIMIT_AS)[0]
    data = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if address == data == resource.RLIM_INFINITY:
        return []
    with open("/proc/self/statm", "rb") as file:
        fields = [int(field) * PAGE for field in file.read().split()]
    pairs = [(address, fields[0]), (data, fields[5])]
    return [(limit, used) for limit, used in pairs if limit != resource.RLIM_INFINITY]


def _cgroups() -> list[tuple[int, int]]:
    """(limit, used without reclaimable file pages) of this process's memory cgroup, v2 or v1, where it is limited."""
    found = []
    for folder, names in _CGROUP_FILES:
        limit = _read_number(folder / names[0])
        used = _read_number(folder / names[1])
        if limit is not None and used is not None and limit < 1 << 60:
            found.append((limit, max(0, used - _reclaimable(folder / "memory.stat", names[2]))))
    return found


def _cgroup_folders() -> list[tuple[Path, tuple[str, str, bytes]]]:
    """Where this process's memory cgroups show their limits: the leaf and every parent of it."""
    v2 = ("memory.max", "memory.current", b"inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")
    found: list[tuple[Path, tuple[str, str, bytes]]] = []
    membership = Path("/proc/self/cgroup")
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (Path("/sys/fs/cgroup/memory"), v1) if controllers else (Path("/sys/fs/cgroup"), v2)
        leaf = root / path.lstrip("/")
        found += [(folder, names) for folder in (leaf, *leaf.parents) if folder.is_relative_to(root)]
    return [(folder, names) for folder, names in found if (folder / names[0]).exists()]


_CGROUP_FILES = _cgroup_folders()


def _read_number(path: Path) -> int | None:
    """A number out of a control file; None where it says "max" or is gone."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path, name: bytes) -> int:
    try:
        text = path.read_bytes()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(name + b" "):
            return int(line.split()[1])
    return 0
