"""The cache's memory on a GPU comes and goes beneath addresses that stay; last run on one H200 on 2026-12-01."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def memory_range():  # type: ignore[no-untyped-def]
    from surefoot.device.gpu_range import EXTENT, GpuRange

    return GpuRange(16 * EXTENT, torch.device("cuda", 0)), EXTENT


def test_what_is_let_go_is_back_on_the_card_and_what_stays_keeps_its_bytes(memory_range) -> None:  # type: ignore[no-untyped-def]
    memory, extent = memory_range
    data = memory.tensor((16 * extent,), torch.uint8)
    memory.hold([(0, 8 * extent), (15 * extent, 16 * extent)])
    free = torch.cuda.mem_get_info()[0]
    data[: 8 * extent] = 7
    memory.hold([(0, 2 * extent), (15 * extent, 16 * extent)])
    assert torch.cuda.mem_get_info()[0] - free == 6 * extent
    memory.hold([(0, 8 * extent), (15 * extent, 16 * extent)])
    assert bool((data[: 2 * extent] == 7).all())
    assert not bool(data[2 * extent : 8 * extent].any())


def test_a_card_that_refuses_changes_nothing(memory_range) -> None:  # type: ignore[no-untyped-def]
    from surefoot.device.gpu_range import GpuRange

    memory, extent = memory_range
    memory.hold([(0, extent)])
    total = torch.cuda.mem_get_info()[1]
    large = GpuRange(2 * total, torch.device("cuda", 0))
    large.hold([(0, extent)])
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(torch.OutOfMemoryError, match="refused an extent"):
        large.hold([(0, 2 * total)])
    assert torch.cuda.mem_get_info()[0] == free
    assert large.backed == extent
    assert float(torch.ones(1000, device="cuda").sum()) == 1000.0


def test_a_graph_captured_over_an_extent_replays_after_it_came_back(memory_range) -> None:  # type: ignore[no-untyped-def]
    memory, extent = memory_range
    memory.hold([(0, 2 * extent)])
    data = memory.tensor((2 * extent // 4,), torch.float32)
    data.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.add_(1)
    torch.cuda.synchronize()
    memory.hold([(0, extent)])
    memory.hold([(0, 2 * extent)])
    graph.replay()
    torch.cuda.synchronize()
    assert float(data[-1]) == 1.0  # new memory is zero
    assert float(data[0]) == 2.0
