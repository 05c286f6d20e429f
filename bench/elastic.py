"""What an elastic KV cache costs: the same work over it and over a cache of one ordinary allocation, in turns.

    python bench/elastic.py [FOLDER] [--device cuda] [--rounds 15] [--streams 8] [--tokens 32] [--moving]

With `--moving` the elastic one gives half of its cache back and takes it again in the middle of every round. Ratios
are elastic over fixed, medians of paired rounds: 1.01 is one percent more time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from surefoot.config import MIB, EngineConfig, format_bytes
from surefoot.core.engine import Engine
from surefoot.device.start import Device, open_device
from surefoot.testing import request_of


class FixedRange:
    """In place of `gpu_range.GpuRange`: memory of torch's own, held for good."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.backed = size

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def hold(self, parts: object) -> None:
        """It holds everything."""


@contextmanager
def fixed(device: str) -> Iterator[None]:
    """Caches made meanwhile are ordinary allocations."""
    if device == "cuda":
        with mock.patch("surefoot.device.gpu_cache.GpuRange", FixedRange):
            yield
    else:
        with mock.patch("surefoot.device.kvcache._zero_pages", bytearray):
            yield


def work(device: Device, options: argparse.Namespace, seed: int, *, moving: bool) -> tuple[float, float]:
    """(seconds, seconds of processor) of all streams to their end."""
    engine, draw = Engine(device.executor, device.limits), random.Random(seed)
    for id in range(options.streams):
        engine.add(request_of(id, [draw.randrange(1000) for _ in range(64)], max_tokens=options.tokens), 0.0)
    began, used, steps, blocks = time.perf_counter(), time.process_time(), 0, device.limits.num_blocks
    while engine.has_work:
        engine.step(time.monotonic())
        steps += 1
        if moving and steps == options.tokens // 2:
            for size in (blocks // 2, blocks):
                engine.fit(size, time.monotonic())
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--memory", type=int, default=1400, help="MiB for each of the two")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--moving", action="store_true")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "model": options.model, "device": options.device, "memory": options.memory * MIB,
        "load_format": options.load_format, "enable_prefix_caching": False,
    }  # fmt: skip

    def opened() -> Device:
        return open_device(EngineConfig(**settings), progress=lambda stage, fraction: None)

    with fixed(options.device):
        plain = opened()
    elastic = opened()
    for device in (plain, elastic):
        work(device, options, 0, moving=False)
    pairs = []
    for seed in range(1, options.rounds + 1):
        order = (plain, elastic) if seed % 2 else (elastic, plain)
        times = {id(each): work(each, options, seed, moving=options.moving and each is elastic) for each in order}
        pairs.append((times[id(plain)], times[id(elastic)]))
    print(f"{options.rounds} rounds of {options.streams} streams, {format_bytes(elastic.plan.kv)} of cache")
    for name, at in (("wall", 0), ("processor", 1)):
        ratios = sorted(after[at] / before[at] for before, after in pairs)
        print(
            f"{name}: {statistics.median(ratios):.3f} (quartiles {ratios[len(ratios) // 4]:.3f} to "
            f"{ratios[3 * len(ratios) // 4]:.3f})"
        )


if __name__ == "__main__":
    main()
