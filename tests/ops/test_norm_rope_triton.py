"""Norm, rotation and cache kernels against their plain twins, in float32 through the interpreter."""

from __future__ import annotations

import pytest
import torch

from surefoot.architecture import Rope
from surefoot.ops.activation_triton import silu_and_mul
from surefoot.ops.norm_rope import rotate_, rotations
from surefoot.ops.norm_rope_triton import add_rms_norm, rope_and_store, sandwich_rms_norm
from tests.ops.reference import relative, rms, swiglu

EPS = 1e-5


@pytest.mark.parametrize("size", [64, 576])
def test_residual_is_added_and_normed(size: int) -> None:
    """`hidden` becomes the sum, `out` its norm; without a delta `hidden` stays."""
    hidden, delta = torch.randn(2, 3, size)
    weight = torch.randn(size)
    total, out = hidden + delta, torch.full_like(hidden, torch.nan)
    add_rms_norm(hidden, delta, weight, EPS, out)
    assert torch.equal(hidden, total)
    assert relative(out, rms(total, weight, EPS)) < 1e-6
    add_rms_norm(hidden, None, weight, EPS, out)
    assert torch.equal(hidden, total)
    assert relative(out, rms(total, weight, EPS)) < 1e-6


def test_sandwich_norms_the_delta_first() -> None:
    """`hidden` gains the normed delta, `out` is the norm of the sum, also where `out` is the delta."""
    hidden, delta = torch.randn(2, 3, 96)
    inner, outer = torch.randn(2, 96)
    total = hidden.double() + rms(delta, inner, EPS)
    sandwich_rms_norm(hidden, delta, inner, outer, EPS, delta)
    assert relative(hidden, total) < 1e-6
    assert relative(delta, rms(total, outer, EPS)) < 1e-6


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 64), (80, 80), (96, 48)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_turned_and_stored(dim: int, rotary: int, normed: bool) -> None:
    """Queries turn in place, keys and values land in their slots, and nothing else in the cache is touched."""
    heads, kv_heads, block_size = 5, 2, 16
    qkv = torch.randn(3, heads + 2 * kv_heads, dim)
    cache = torch.full((4, 2, 2, block_size, kv_heads, dim), 7.0)
    kv = cache[:, 1]
    positions, slots = torch.tensor([5, 40, 11]), torch.tensor([2 * 16 + 3, 0, -1])
    turns = rotations(Rope(theta=10_000.0, dim=rotary, interleaved=True, scaling=None), 64, qkv.device)
    norms = [torch.randn(dim) if normed else None for _ in range(2)]

    expected = qkv.clone()
    if norms[0] is not None and norms[1] is not None:
        expected[:, :heads] = rms(expected[:, :heads], norms[0], EPS).float()
        expected[:, heads : heads + kv_heads] = rms(expected[:, heads : heads + kv_heads], norms[1], EPS).float()
    turned = expected[:, : heads + kv_heads, :rotary].contiguous()
    rotate_(turned, turns[positions])
    expected[:, : heads + kv_heads, :rotary] = turned
    filled = cache.clone()
    for token, (block, offset) in enumerate([(2, 3), (0, 0)]):
        filled[block, 1, :, offset] = expected[token, heads:].view(2, kv_heads, dim)

    rope_and_store(
        qkv,
        torch.view_as_real(turns),
        positions,
        kv,
        slots,
        heads=heads,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=EPS,
    )
    torch.testing.assert_close(qkv[:, :heads], expected[:, :heads], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, filled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [96, 2500])
def test_gate_is_silu_times_up(width: int) -> None:
    """Every column of every row is written with silu(gate)·up."""
    gate_up = torch.randn(3, 2 * width)
    out = torch.full((3, width), torch.nan)
    silu_and_mul(gate_up, out)
    assert relative(out, swiglu(gate_up)) < 1e-6
