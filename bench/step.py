"""Milliseconds of one step by shape: what the device side costs, without scheduler and server.

    python bench/step.py [none|int8] [repeats, 8 by default]

Minimums are printed, since a shared machine only ever adds.
"""

from __future__ import annotations

import sys
import time

from surefoot.config import EngineConfig
from surefoot.device.start import Device, open_device
from surefoot.types import Sample, SamplingParams, StepDone, StepPlan, Work

GREEDY = SamplingParams(temperature=0.0)
SHAPES = {
    "1 row at 256": [(255, 1)],
    "8 rows at 192": [(191, 1)] * 8,
    "16 rows at 256": [(255, 1)] * 16,
    "prompt 1,500": [(0, 512), (512, 512), (1024, 476)],
}


def work(slot: int, start: int, count: int, size: int) -> Work:
    """`count` tokens of a sequence that has `start` computed, on blocks of its own."""
    blocks = -(-(start + count) // size)
    return Work(
        request=slot,
        child=0,
        epoch=0,
        slot=slot,
        start=start,
        tokens=(7,) * count,
        table=tuple(range(slot * blocks, (slot + 1) * blocks)),
        known=None,
        samples=(Sample(0, 0, 0),),
        params=GREEDY,
        decoding=count == 1,
    )


def seconds(device: Device, works: list[Work]) -> float:
    """Of one step."""
    began = time.perf_counter()
    executor = device.executor
    outcome = executor.collect(executor.launch(StepPlan(id=0, works=tuple(works))))
    assert isinstance(outcome, StepDone), outcome
    return time.perf_counter() - began


def main() -> None:
    quantization = sys.argv[1] if len(sys.argv) > 1 else "none"
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    began = time.perf_counter()
    device = open_device(EngineConfig(quantization=quantization), progress=lambda what, part: None)
    print(f"open             {time.perf_counter() - began:8.1f} s")
    size = device.limits.block_size
    for name, rows in SHAPES.items():
        together = all(count == 1 for _, count in rows)
        steps = (
            [[work(slot, start, count, size) for slot, (start, count) in enumerate(rows)]]
            if together
            else [[work(0, start, count, size)] for start, count in rows]
        )
        best = min(sum(seconds(device, step) for step in steps) for _ in range(repeats if together else 2))
        print(f"{name:<16} {best * 1e3:8.1f} ms {sum(count for _, count in rows) / best:8.1f} tok/s")


if __name__ == "__main__":
    main()
