"""The gate of the feed-forward network."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) · up` (SwiGLU, https://arxiv.org/abs/2002.05202) of [n, 2·width] → [n, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
