"""What the API needs of the engine: `bridge.client.EngineClient` has it, and so has the fake one in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from surefoot.plan import MemoryPlan
from surefoot.types import Emitted, Limits, SamplingParams, Snapshot


class Handle(Protocol):
    """One admitted request: what each step emitted, all children together; iterating raises RequestError on failure."""

    def __aiter__(self) -> AsyncIterator[list[Emitted]]: ...

    def cancel(self, child: int | None = None) -> None:
        """Drop one child, or all. Nothing that is already done minds."""
        ...


class Info(Protocol):
    """What was fitted to the device at start."""

    @property
    def limits(self) -> Limits: ...

    @property
    def plan(self) -> MemoryPlan | None:
        """None of an engine that is not real."""
        ...


class Resized(Protocol):
    """How many KV blocks there are, and why not as many as were asked for."""

    @property
    def blocks(self) -> int: ...

    @property
    def refusal(self) -> str | None: ...

    @property
    def least(self) -> int:
        """Blocks that what is running needs."""
        ...


class Engine(Protocol):
    """Admits requests and tells how it is."""

    draining: bool

    @property
    def snapshot(self) -> Snapshot:
        """Counts after the latest step; counters only grow, whatever worker counts."""
        ...

    @property
    def info(self) -> Info: ...

    @property
    def alive(self) -> bool:
        """True while a worker is there; one that died is being replaced unless `lost`."""
        ...

    @property
    def lost(self) -> bool:
        """True when no worker is left and none will come; a request sent now would fail."""
        ...

    @property
    def restarts(self) -> int:
        """Workers that were replaced so far."""
        ...

    @property
    def stalled(self) -> bool:
        """True while requests wait and no step has been made for a long time."""
        ...

    @property
    def worker_pid(self) -> int | None:
        """None while there is no worker."""
        ...

    async def resize(self, blocks: int) -> Resized:
        """Have memory for so many KV blocks and no more. Raises RequestError."""
        ...

    @property
    def sleeping(self) -> bool:
        """True while the worker is gone on purpose; the next request wakes it."""
        ...

    async def sleep(self) -> None:
        """Give back all that the worker holds of the device. Raises Overloaded while requests are in flight."""
        ...

    async def wake(self) -> None:
        """Start a worker again and wait for it. Raises EngineFailure."""
        ...

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests for good and wait for the running ones; True if all finished within `seconds`."""
        ...

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = "") -> Handle:
        """Admit a request with `seed` and `max_tokens` set. Raises Overloaded or EngineFailure."""
        ...
