"""The gate of the feed-forward network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """`act(gate) · up` (https://arxiv.org/abs/2002.05202) of [n, 2·width] → [n, width]; silu or gelu_tanh."""
    if gate_up.is_cuda and activation == "silu":
        from surefoot.ops.activation_triton import silu_and_mul

        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        silu_and_mul(gate_up, out)
        return out
    left, up = gate_up.chunk(2, dim=-1)
    opened = F.silu(left) if activation == "silu" else F.gelu(left, approximate="tanh")
    return opened.mul_(up)
