"""The guard: every failure becomes a value, and says what the device is good for."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch

from surefoot.config import GIB, MIB
from surefoot.device import memory
from surefoot.errors import CheckpointError
from surefoot.types import FailureKind


def test_what_returns_is_ok() -> None:
    """A function that returns passes through with its value."""
    assert memory.guard(lambda: 7) == memory.Ok(7)


def test_an_allocation_that_cannot_be_made_is_oom_with_its_size() -> None:
    """torch's CPU allocator raises RuntimeError; the guard reads it as OOM and tells what was asked for."""
    failure = memory.guard(lambda: torch.empty(2**50, dtype=torch.uint8))
    assert isinstance(failure, memory.Failure)
    assert failure.kind is FailureKind.OOM
    assert failure.needed == 2**50
    assert failure.free > 0


def _memory_error() -> None:
    raise MemoryError


def _bug() -> None:
    raise RuntimeError("shapes do not match")


@pytest.mark.parametrize(("fn", "kind"), [(_memory_error, FailureKind.OOM), (_bug, FailureKind.FAULT)])
def test_kinds(fn: object, kind: FailureKind) -> None:
    """MemoryError is OOM; any other error on a healthy device with memory to spare is a FAULT."""
    failure = memory.guard(fn)  # type: ignore[arg-type]
    assert isinstance(failure, memory.Failure)
    assert failure.kind is kind


def test_an_unclear_error_without_headroom_is_oom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries report a lack of memory in words of their own: then what is free decides."""
    monkeypatch.setattr(memory, "free_memory", lambda **_: MIB)
    failure = memory.guard(_bug)
    assert isinstance(failure, memory.Failure)
    assert failure.kind is FailureKind.OOM


def test_idle_heap_is_no_room_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unclear error is OOM where little more can be mapped, however much malloc holds: kernels' code is mapped."""
    monkeypatch.setattr(memory, "_rlimits", lambda: [(GIB, GIB - MIB)])
    monkeypatch.setattr(memory, "_idle_heap", lambda: GIB)
    assert memory.free_memory(mapped=True) == MIB < memory.free_memory()
    failure = memory.guard(_bug)
    assert isinstance(failure, memory.Failure)
    assert failure.kind is FailureKind.OOM


def test_the_probe_decides_that_a_device_is_lost() -> None:
    """Where the probe fails with anything but memory the device is LOST, whatever the first error said."""
    failure = memory.guard(_memory_error, probe=_bug)
    assert isinstance(failure, memory.Failure)
    assert failure.kind is FailureKind.LOST


def test_a_full_cpu_is_not_lost() -> None:
    """A probe that only runs out of memory leaves an OOM an OOM."""
    failure = memory.guard(_memory_error, probe=_memory_error)
    assert isinstance(failure, memory.Failure)
    assert failure.kind is FailureKind.OOM


def test_the_tensors_of_a_failed_function_are_gone_before_the_probe() -> None:
    """The traceback that holds a step's tensors is dropped before anything else is done."""
    held: list[weakref.ref[torch.Tensor]] = []
    seen: list[bool] = []

    def step() -> None:
        tensor = torch.ones(10)
        held.append(weakref.ref(tensor))
        torch.empty(2**50)

    gc.disable()
    try:
        memory.guard(step, probe=lambda: seen.append(held[0]() is None))
    finally:
        gc.enable()
    assert seen == [True]


def test_errors_that_explain_themselves_pass() -> None:
    """An error of ours, such as of a checkpoint, is no failure of the device and passes through."""

    def load() -> None:
        raise CheckpointError("tensor x is missing")

    with pytest.raises(CheckpointError, match="tensor x"):
        memory.guard(load)


def test_measure_agrees_with_itself() -> None:
    """Free is part of total, and reading it again at once gives the remembered number."""
    machine = memory.measure()
    assert 0 < machine.free <= machine.total
    assert memory.free_memory() == memory.free_memory()


@pytest.mark.slow
def test_a_limit_on_the_address_space_counts_from_when_it_is_set() -> None:
    """With RLIMIT_AS set while running, free memory is what is left below it, and an allocation beyond it is OOM."""
    code = f"""
        import resource, torch
        from surefoot.device import memory
        memory.guard(lambda: torch.ones(64, 64) @ torch.ones(64, 64))
        used = int(open("/proc/self/statm").read().split()[0]) * memory.PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + {200 * MIB}, resource.RLIM_INFINITY))
        assert {150 * MIB} < memory.free_memory() <= {250 * MIB}, memory.free_memory()
        failure = memory.guard(lambda: torch.empty({GIB}, dtype=torch.uint8))
        assert failure.kind.value == "oom" and failure.needed == {GIB}, failure
        assert isinstance(memory.guard(lambda: torch.ones({MIB})), memory.Ok)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
