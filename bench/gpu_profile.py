"""Where a step's time goes on a GPU: host and device, for prompts and for decoding, at GLM-4-9B's shape.

python bench/gpu_profile.py FOLDER [--chunk 2048]     (FOLDER: a config.json; weights are random)
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.device.start import Device, open_device
from surefoot.testing import request_of
from surefoot.types import StepPlan, Ticket


class Timed:
    """Wraps an executor and notes how long launch and collect hold the host."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.launches: list[float] = []
        self.waits: list[float] = []

    def launch(self, plan: StepPlan) -> Ticket:
        began = time.perf_counter()
        ticket = self.inner.launch(plan)
        self.launches.append(time.perf_counter() - began)
        return ticket

    def collect(self, ticket: Ticket) -> object:
        began = time.perf_counter()
        outcome = self.inner.collect(ticket)
        self.waits.append(time.perf_counter() - began)
        return outcome

    def free_memory(self) -> int:
        return self.inner.free_memory()


def run(device: Device, name: str, requests: list[tuple[int, int]], around: Callable[[], object] | None = None) -> None:
    """Serve (prompt, output) lengths and print how the host spent its time."""
    timed = Timed(device.executor)
    engine = Engine(timed, device.limits)
    for id, (prompt, output) in enumerate(requests):
        engine.add(request_of(id, [(id * 7919 + i * 104729) % 150000 for i in range(prompt)], max_tokens=output), 0.0)
    began, steps = time.perf_counter(), []
    while engine.has_work:
        at = time.perf_counter()
        engine.step(at)
        steps.append(time.perf_counter() - at)
    total = time.perf_counter() - began

    def ms(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e3:7.2f} (sum {sum(values):6.3f})"

    own = [step - launch - wait for step, launch, wait in zip(steps, timed.launches, timed.waits, strict=False)]
    print(
        f"{name:24s} {total:7.3f} s, {len(steps)} steps of {ms(steps)} ms: launch {ms(timed.launches)}, "
        f"wait {ms(timed.waits)}, core {ms(own)}",
        flush=True,
    )


def profiled(device: Device, name: str, requests: list[tuple[int, int]], skip: int, count: int) -> None:
    """The kernels of `count` steps after the first `skip`."""
    engine = Engine(device.executor, device.limits)
    for id, (prompt, output) in enumerate(requests):
        engine.add(request_of(id, [(id * 7919 + i * 104729) % 150000 for i in range(prompt)], max_tokens=output), 0.0)
    for _ in range(skip):
        engine.step(time.monotonic())
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        began = time.perf_counter()
        for _ in range(count):
            engine.step(time.monotonic())
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    kernels = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in kernels) / 1e3
    print(f"--- {name}: {count} steps, wall {wall * 1e3:.1f} ms, kernels {busy:.1f} ms", flush=True)
    for row in kernels[:14]:
        print(f"      {row.self_device_time_total / 1e3:9.2f} ms  {row.count:6d} x  {row.key[:90]}")
    hosts = sorted(trace.key_averages(), key=lambda row: -row.self_cpu_time_total)
    for row in hosts[:8]:
        print(f"      host {row.self_cpu_time_total / 1e3:9.2f} ms  {row.count:6d} x  {row.key[:80]}")
    for id in range(len(requests)):
        engine.cancel(id)
    while engine.has_work:
        engine.step(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--chunk", type=int, default=2048)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    began = time.perf_counter()
    config = EngineConfig(
        model=args.folder, device="cuda", load_format="dummy", max_num_batched_tokens=args.chunk,
        gpu_memory_utilization=0.4, enable_prefix_caching=False,
    )  # fmt: skip
    device = open_device(config, progress=lambda stage, fraction: None)
    print(f"open_device {time.perf_counter() - began:.1f} s; {device.limits.step_time}")
    run(device, "1 row", [(128, 200)])
    run(device, "32 rows", [(512, 100)] * 32)
    run(device, "256 rows", [(512, 100)] * 256)
    run(device, "8k prompt", [(8192, 2)])
    run(device, "8k prompt again", [(8192, 2)])
    run(device, "32k prompt", [(32768, 2)])
    run(device, "100k prompt", [(100_000, 2)])
    profiled(device, "chunks of a prompt at 32k", [(60_000, 2)], 16, 3)
    profiled(device, "256 rows decoding", [(300, 100)] * 256, 60, 5)
    profiled(device, "1 row decoding", [(300, 100)], 20, 5)


if __name__ == "__main__":
    main()
