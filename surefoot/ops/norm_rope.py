"""Root-mean-square norm and rotary positions.

Rotary embedding (RoFormer, https://arxiv.org/abs/2104.09864) turns each pair (x_i, x_{i+d/2}) of a head by the angle
position · theta^(-2i/d). A turn is one multiplication of complex numbers, so the two halves of a pair are kept side by
side: `pair_up` permutes the rows of the query and key projections once, at load. Scores do not change, since queries
and keys are permuted alike, and a rotation costs one operation in place of six.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.architecture import Rope, RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension; `x` [n, hidden], `weight` [hidden]."""
    return (x * x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_().to(x.dtype)).mul_(weight)


def add_rms_norm(
    hidden: Tensor, change: Tensor | None, weight: Tensor, eps: float, *, change_weight: Tensor | None = None
) -> Tensor:
    """`hidden += change` in place, then the norm of that; [n, hidden].

    With `change_weight` the change is normed before it is added. Without a change `hidden` is only read.
    """
    if hidden.is_cuda:
        return _add_rms_norm_cuda(hidden, change, weight, eps, change_weight)
    if change is not None:
        hidden += change if change_weight is None else rms_norm(change, change_weight, eps)
    return rms_norm(hidden, weight, eps)


def _add_rms_norm_cuda(
    hidden: Tensor, change: Tensor | None, weight: Tensor, eps: float, change_weight: Tensor | None
) -> Tensor:
    from surefoot.ops import norm_rope_triton as triton

    out = torch.empty_like(hidden)
    if change is not None and change_weight is not None:
        triton.sandwich_rms_norm(hidden, change, change_weight, weight, eps, out)
    else:
        triton.add_rms_norm(hidden, change, weight, eps, out)
    return out


def pair_up(weight: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder rows [heads·head_dim, …]: of the first `rotary_dim` (None: all) of a head, 2i was i, 2i+1 was i+d/2."""
    dim = head_dim if rotary_dim is None else rotary_dim
    heads = weight.view(-1, head_dim, *weight.shape[1:])
    turned, rest = heads[:, :dim], heads[:, dim:]
    paired = turned.reshape(-1, 2, dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(turned.shape)
    return torch.cat((paired, rest), 1).reshape(weight.shape)


def rotations(rope: Rope, max_position: int, device: torch.device) -> Tensor:
    """The turn of each pair at each position, complex numbers [max_position, rope.dim/2], complex64.

    They are of length 1, or of the scaling's attention factor. Angles are computed in float32, as the reference
    implementation does, so that long positions round alike.
    """
    inverse = frequencies(rope, max_position)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse)
    length = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    return (torch.complex(angles.cos(), angles.sin()) * length).to(device)


def frequencies(rope: Rope, max_position: int) -> Tensor:
    """Radians per position of each pair, [dim/2] float32, stretched as `rope.scaling` says."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    scaling = rope.scaling
    if scaling is None or scaling.kind == "dynamic":
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "longrope":
        long = max_position > scaling.original_max_position
        return inverse / torch.tensor(scaling.long_factor if long else scaling.short_factor)
    return _llama3(inverse, scaling) if scaling.kind == "llama3" else _yarn(inverse, rope, scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by the factor, short ones not, those between by a share of it (Llama 3.1)."""
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    turns = scaling.original_max_position * inverse / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return inverse * (share + (1 - share) / scaling.factor)


def _yarn(inverse: Tensor, rope: Rope, scaling: RopeScaling) -> Tensor:
    """Interpolation by parts (YaRN, https://arxiv.org/abs/2309.00071)."""

    def pair_of(rotations: float) -> float:
        wave = scaling.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return inverse * kept + inverse / scaling.factor * (1 - kept)


def rotate_(x: Tensor, turns: Tensor) -> None:
    """Turn heads in place: `x` [n, heads, head_dim], `turns` [n, dim/2] complex64; columns past `dim` stay.

    The first `dim` columns are paired up.
    """
    dim = 2 * turns.shape[-1]
    turned = x[..., :dim]
    if x.dtype == torch.float32 and dim == x.shape[-1]:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(turns.unsqueeze(1))
        return
    wide = turned.float().contiguous()
    torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2)).mul_(turns.unsqueeze(1))
    turned.copy_(wide)
