"""Norms, rotary positions and the write into the cache on NVIDIA GPUs; plain twins in `ops.norm_rope`, `ops.kv_store`.

Around attention and the feed-forward network a layer only streams its hidden rows. Each kernel here reads them once:
the residual is added while the next norm is computed, and keys are rotated on their way into their block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 4
"""Heads that one program rotates."""


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """`hidden += delta`, then its norm times `weight` into `out`; all [n, size] and contiguous, `weight` [size].

    The sum is rounded to the dtype before its norm is taken, and the norm before it meets the weight, as the reference
    implementations do. `out` may be `delta`. Without `delta` (the first norm of a network) `hidden` is only read.
    """
    _launch_norm(hidden, delta, None, weight, eps, out)


def sandwich_rms_norm(
    hidden: Tensor, delta: Tensor, delta_weight: Tensor, weight: Tensor, eps: float, out: Tensor
) -> None:
    """`hidden += norm(delta)·delta_weight`, then the norm of that into `out`: for families that norm a branch twice."""
    _launch_norm(hidden, delta, delta_weight, weight, eps, out)


def _launch_norm(
    hidden: Tensor, delta: Tensor | None, delta_weight: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    rows, size = hidden.shape
    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    _add_rms_norm[(rows,)](hidden, delta, delta_weight, weight, out, eps, SIZE=size, BLOCK=block, num_warps=warps)


@triton.jit
def _add_rms_norm(hidden, delta, delta_weight, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row, held in registers."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    x = tl.load(hidden + start + at, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        change = tl.load(delta + start + at, mask=inside, other=0.0).to(tl.float32)
        if delta_weight is not None:
            change = _normed(change, delta_weight, at, inside, eps, SIZE).to(tl.float32)
        x = (x + change).to(hidden.dtype.element_ty)
        tl.store(hidden + start + at, x, mask=inside)
        x = x.to(tl.float32)
    tl.store(out + start + at, _normed(x, weight, at, inside, eps, SIZE), mask=inside)


@triton.jit
def _normed(x, weight, at, inside, eps, SIZE: tl.constexpr):
    """The norm of float32 `x` (0 outside) times the weight, in the weight's dtype."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    rounded = (x * scale).to(factor.dtype)
    return (rounded.to(tl.float32) * factor.to(tl.float32)).to(factor.dtype)


def rope_and_store(
    qkv: Tensor,
    turns: Tensor,
    positions: Tensor,
    kv: Tensor,
    slots: Tensor,
    *,
    heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate the queries of `qkv` in place; rotate its keys into the cache; copy its values there.

    `qkv` [n, heads + 2·kv_heads, head_dim] contiguous, columns paired up as by `norm_rope.pair_up`;
    `turns` [max_position, rotary_dim/2, 2] float32, cosine and sine (`torch.view_as_real` of `norm_rope.rotations`);
    columns from rotary_dim on stay; `positions` [n] integer; `kv` [blocks, 2, block_size, kv_heads, head_dim] one
    layer of the cache (a view whose blocks may be far apart); `slots` [n] int64, block·block_size + offset, or -1 for
    a padding row, which writes nothing. With `q_norm` and `k_norm` [head_dim] (paired up, too) each head of queries
    and keys is normed first.
    """
    tokens, total, dim = qkv.shape
    kv_heads = kv.shape[3]
    _rope_and_store[(tokens, triton.cdiv(total, HEADS))](
        qkv,
        turns,
        positions,
        kv,
        slots,
        q_norm,
        k_norm,
        eps,
        kv.stride(0),
        kv.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        PAIRS=turns.shape[1],
        BLOCK_SIZE=kv.shape[2],
        TILE=HEADS,
        num_warps=1 if dim <= 64 else 2,
    )


@triton.jit
def _rope_and_store(
    qkv,
    turns,
    positions,
    kv,
    slots,
    q_norm,
    k_norm,
    eps,
    block_stride,
    value_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program turns TILE heads of one token.

    heads of a token   0 …           HEADS …        HEADS+KV_HEADS …
                       [ queries    )[ keys        )[ values        )
    turned             yes, in place  yes, to cache  no, to cache
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = tl.arange(0, BLOCK_DIM)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (at < DIM)[None, :]
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + at[None, :]
    raw = tl.load(source, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    if q_norm is not None:
        x = _head_norm(x, q_norm, k_norm, head, at, eps, HEADS, DIM)
    turned = _turn(x, turns, tl.load(positions + token).to(tl.int64), TILE, BLOCK_DIM, PAIRS).to(raw.dtype)
    tl.store(source, turned, mask=inside & (head < HEADS)[:, None])

    slot = tl.load(slots + token)
    is_value = head >= HEADS + KV_HEADS
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * (KV_HEADS * DIM)
    lane = tl.where(is_value, value_stride + (head - HEADS - KV_HEADS) * DIM, (head - HEADS) * DIM)
    kept = inside & (head >= HEADS)[:, None] & (slot >= 0)
    tl.store(kv + target + lane[:, None] + at[None, :], tl.where(is_value[:, None], raw, turned), mask=kept)


@triton.jit
def _turn(x, turns, position, TILE: tl.constexpr, BLOCK_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Multiply the pairs of float32 `x` [TILE, BLOCK_DIM] by this position's unit complex numbers."""
    pair = tl.arange(0, BLOCK_DIM // 2)
    row = turns + position * (2 * PAIRS)
    cosine = tl.load(row + 2 * pair, mask=pair < PAIRS, other=1.0)[None, :]
    sine = tl.load(row + 2 * pair + 1, mask=pair < PAIRS, other=0.0)[None, :]
    real, imaginary = tl.split(tl.reshape(x, [TILE, BLOCK_DIM // 2, 2]))
    turned = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return tl.reshape(turned, [TILE, BLOCK_DIM])


@triton.jit
def _head_norm(x, q_norm, k_norm, head, at, eps, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Norm each head of float32 `x`; values are normed as well and then not used."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    of_query = tl.load(q_norm + at, mask=at < DIM, other=0.0)
    of_key = tl.load(k_norm + at, mask=at < DIM, other=0.0)
    rounded = (x * scale[:, None]).to(of_query.dtype)
    factor = tl.where((head < HEADS)[:, None], of_query[None, :], of_key[None, :])
    return (rounded.to(tl.float32) * factor.to(tl.float32)).to(of_query.dtype).to(tl.float32)
