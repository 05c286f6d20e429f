"""Root-mean-square norm and rotary positions.

Rotary embedding (RoFormer, https://arxiv.org/abs/2104.09864) turns each pair (x_i, x_{i+d/2}) of a head by the angle
position · theta^(-2i/d). A turn is one multiplication of complex numbers, so the two halves of a pair are kept side by
side: `pair_up` permutes the rows of the query and key projections once, at load. Scores do not change, since queries
and keys are permuted alike, and a rotation costs one operation in place of six.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension; `x` [n, hidden], `weight` [hidden]."""
    return (x * x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_().to(x.dtype)).mul_(weight)


def pair_up(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of a query or key projection [heads·d, …]: row 2i of a head was i, row 2i+1 was i+d/2."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def rotations(max_position: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Unit complex numbers [max_position, head_dim/2], complex64: the turn of each pair at each position.

    Angles are computed in float32, as the reference implementation does, so that long positions round alike.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse)
    return torch.complex(angles.cos(), angles.sin()).to(device)


def rotate_(x: Tensor, turns: Tensor) -> None:
    """Turn heads in place: `x` [n, heads, head_dim] with paired columns, `turns` [n, head_dim/2] complex64."""
    if x.dtype != torch.float32:
        wide = x.float()
        rotate_(wide, turns)
        x.copy_(wide)
        return
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(turns.unsqueeze(1))
