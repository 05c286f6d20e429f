"""Counters of what core did; they only grow, and leave as a frozen Snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Written by the scheduler and the engine, read by `Engine.snapshot`."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_emitted: int = 0
    preemptions: int = 0
    steps_oom: int = 0
    oom_predicted: int = 0
    oom_library: int = 0
    steps_fault: int = 0
    control_steps: int = 0
    rows_failed: int = 0
    requests_failed: int = 0
    leaks_repaired: int = 0
    retries: int = 0
    shrinks: int = 0
    blocks_moved: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def values(self) -> dict[str, int]:
        return asdict(self)
