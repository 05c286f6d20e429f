"""Weights of 8 bits on the card: the kernel against its twin, and the engine over them."""

from __future__ import annotations

import pytest
import torch

from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from surefoot.ops.scaled_linear import FEW_ROWS, Kind, ScaledLinear, unpacked_linear
from tests.gpu.test_engine import folder

__all__ = ["folder"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_equals_its_twin(kind: Kind, dtype: torch.dtype) -> None:
    """For 1 to 64 rows of GLM-4-9B's shapes within the rounding of 16 bits."""
    for width, size in ((4608, 4096), (4096, 13696)):
        weight = torch.randn(width, size, device="cuda", dtype=dtype)
        bias = torch.randn(width, device="cuda", dtype=dtype)
        linear = ScaledLinear(weight, bias, kind=kind)
        for rows in (1, 2, 16, 17, 33, FEW_ROWS):
            x = torch.randn(rows, size, device="cuda", dtype=dtype)
            expected = torch.empty(rows, width, device="cuda")
            unpacked_linear(x.float(), linear.codes, linear.scales, bias.float(), expected)
            assert (linear(x).float() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_engine_serves_eight_bits(folder: object, kind: Kind) -> None:
    """A checkpoint opens with weights of 8 bits, its captured steps included."""
    config = EngineConfig(model=str(folder), device="cuda", quantization=kind, memory=2 << 30, max_num_seqs=16)
    opened = open_device(config, progress=lambda stage, fraction: None)
    assert opened.plan.dtype == f"bfloat16 + {kind}"
