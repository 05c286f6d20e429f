"""Memory of the KV cache on a CPU: what is given back is gone from this process, and what is moved stays what it is."""

from __future__ import annotations

import psutil
import pytest
import torch

from surefoot.config import MIB
from surefoot.device.kvcache import KVCache
from surefoot.spec import ModelSpec
from tests.test_plan import SPEC


@pytest.fixture
def cache() -> KVCache:
    """400 blocks of 360 KiB of a real model's shape."""
    spec: ModelSpec = SPEC
    return KVCache(spec, num_blocks=400, block_size=16, dtype=torch.float32, device=torch.device("cpu"))


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_what_is_given_back_is_gone(cache: KVCache) -> None:
    """Of 400 blocks that were written 300 are given back: the process is smaller by their bytes, the rest is intact,
    and blocks that are taken again are zero.
    """
    before = resident()
    cache.data.fill_(1.0)
    size = cache.data[0].nbytes
    assert resident() - before > 390 * size
    written = resident()
    cache.hold(100)
    assert abs(written - resident() - 300 * size) < 8 * MIB
    assert bool((cache.data[:100] == 1).all())
    assert bool((cache.data[cache.sink] == 1).all())
    assert not bool(cache.data[101:400].any())


def test_moved_blocks_are_what_they_were(cache: KVCache) -> None:
    """Each block of a chain of moves arrives whole."""
    for block in range(10):
        cache.data[390 + block] = block
    cache.move([(390 + block, block) for block in range(10)])
    for block in range(10):
        assert bool((cache.data[block] == block).all())
