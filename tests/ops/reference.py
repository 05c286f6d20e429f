"""Oracles in float64 and cases that the interpreter tests, the GPU tests and bench/kernels.py share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.ops.attention import attend_reference


def relative(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖, in float64; NaN where anything is."""
    out, expected = out.double().cpu(), expected.double().cpu()
    return float((out - expected).norm() / expected.norm())


def paged(
    lengths: Sequence[int],
    *,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layers: int = 2,
) -> tuple[Tensor, Tensor]:
    """A random cache of one layer (a strided view, its blocks shuffled) and the block table of rows of `lengths`."""
    held = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(held) + 1).tolist()
    shape = (sum(held) + 1, layers, 2, block_size, kv_heads, dim)
    kv = torch.randn(shape, dtype=dtype, device=device)[:, layers - 1]
    table = torch.full((len(lengths), max(*held, 1) + 1), -1, dtype=torch.int32)
    for row, blocks in enumerate(held):
        table[row, :blocks] = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int32)
    return kv, table.to(device)


def attention(q: Tensor, kv: Tensor, table: Tensor, length: int, *, scale: float) -> Tensor:
    """Of the last queries [t, heads, dim] of one row with `table` [blocks]; float64."""
    blocks = kv.shape[2]
    held = kv[table[: -(-length // blocks)].long()].double()
    keys, values = (held[:, which].flatten(0, 1)[:length] for which in (0, 1))
    return attend_reference(q.double(), keys, values, start=length - q.shape[0], scale=scale)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of the last dimension, float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up
