"""Drawing tokens on NVIDIA GPUs without a sort; the plain twin is `ops.sample`.

    logits ─ thresholds ─▸ least scaled logit that may be drawn (top_k, top_p, min_p; rows that ask for none: -inf)
           ─ draw ───────▸ argmax of scaled logits + noise, log-probability, token pool

The noise is bit for bit the twin's hash of (seed, output index, token id), so a row draws the same token whatever
shares its step. Where candidates of top_p tie for last place all of them stay, while the twin keeps the lowest ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Tokens of a program of the first stage."""
SEARCH = 8192
"""Tokens a step of the threshold search."""


@dataclass(frozen=True)
class Rows:
    """How to draw each of up to n rows; every tensor [n], at static addresses."""

    temperature: Tensor
    """float32; 0 is greedy."""
    top_k: Tensor
    """int32; 0 is all."""
    top_p: Tensor
    """float32; 1 is all."""
    min_p: Tensor
    """float32; 0 is all."""
    seed: Tensor
    """int64, the bits of the unsigned seed."""
    index: Tensor
    """int64, the output index to draw for."""
    slot: Tensor
    """int32, the row of the token pool, or -1: nothing is written there."""
    position: Tensor
    """int32, where in the pool the drawn token goes."""

    @classmethod
    def allocate(cls, count: int, device: torch.device) -> Rows:
        """Greedy rows that write nothing to the pool."""
        wide = torch.zeros(2, count, dtype=torch.int64, device=device)
        real = torch.tensor([0.0, 1.0, 0.0], device=device)[:, None].repeat(1, count)
        whole = torch.tensor([0, -1, 0], dtype=torch.int32, device=device)[:, None].repeat(1, count)
        return cls(real[0], whole[0], real[1], real[2], wide[0], wide[1], whole[1], whole[2])


@dataclass(frozen=True)
class Drawn:
    """What was drawn for up to n rows, and the room that the first stage needs."""

    token: Tensor
    """[n] int32."""
    logprob: Tensor
    """[n] float32: log-probability of the token by the logits as given, before temperature."""
    finite: Tensor
    """[n] int32: 1 where no logit was NaN or +inf and some was finite."""
    threshold: Tensor
    """[n] float32."""
    scores: Tensor
    """[n, parts, 4] float32: best score of a part, its logit, maximum and sum of exponentials."""
    ids: Tensor
    """[n, parts] int32: the best token of a part, or -1 where a logit was not finite."""

    @classmethod
    def allocate(cls, count: int, token_count: int, device: torch.device) -> Drawn:
        """Room for `count` rows of a vocabulary of `token_count`."""
        parts = triton.cdiv(token_count, PART)
        return cls(
            torch.zeros(count, dtype=torch.int32, device=device),
            torch.zeros(count, dtype=torch.float32, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
            torch.full((count,), -math.inf, dtype=torch.float32, device=device),
            torch.zeros(count, parts, 4, dtype=torch.float32, device=device),
            torch.zeros(count, parts, dtype=torch.int32, device=device),
        )


def draw(logits: Tensor, token_count: int, rows: Rows, drawn: Drawn, pool: Tensor, *, limited: bool) -> None:
    """One token for each row of `logits` [n, ≥ token_count] (float32 or bfloat16; ids from token_count on are padding).

    `limited` says whether any row has top_k, top_p or min_p; without, the search for thresholds is left out. Tokens
    go to `drawn` and into `pool` [slots, positions] int32. Of equal scores the lowest id wins.
    """
    count = logits.shape[0]
    parts = drawn.ids.shape[1]
    if limited:
        _find_thresholds[(count,)](
            logits,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            drawn.threshold,
            logits.stride(0),
            TOKENS=token_count,
            BLOCK=SEARCH,
            num_warps=16,
        )
    _draw_parts[(count, parts)](
        logits,
        rows.temperature,
        rows.seed,
        rows.index,
        drawn.threshold,
        drawn.scores,
        drawn.ids,
        logits.stride(0),
        TOKENS=token_count,
        BLOCK=PART,
        LIMITED=limited,
    )
    _join_parts[(count,)](
        drawn.scores,
        drawn.ids,
        drawn.token,
        drawn.logprob,
        drawn.finite,
        rows.slot,
        rows.position,
        pool,
        pool.stride(0),
        PARTS=parts,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
    )


@triton.jit
def _draw_parts(
    logits,
    temperatures,
    seeds,
    indices,
    thresholds,
    scores,
    ids,
    stride,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """The best token of BLOCK ids of one row, and this part of the sum of exponentials."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < TOKENS
    raw = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    broken = (raw != raw) | (raw == float("inf"))
    bad = tl.max(broken.to(tl.int32), 0)
    raw = tl.where(broken, float("-inf"), raw)
    top = tl.max(raw, 0)
    # A part of nothing but -inf (all forbidden) sums to 0, not to NaN.
    total = tl.sum(tl.exp(raw - tl.where(top == float("-inf"), 0.0, top)), 0)

    temperature = tl.load(temperatures + row)
    score = raw
    if temperature > 0:
        score = raw / temperature
        if LIMITED:
            score = tl.where(score >= tl.load(thresholds + row), score, float("-inf"))
        score += _gumbel(token, tl.load(seeds + row), tl.load(indices + row))
    best, at = tl.max(score, 0, return_indices=True)
    slot = scores + (row * tl.num_programs(1) + part).to(tl.int64) * 4
    tl.store(slot, best)
    tl.store(slot + 1, tl.max(tl.where(tl.arange(0, BLOCK) == at, raw, float("-inf")), 0))
    tl.store(slot + 2, top)
    tl.store(slot + 3, total)
    tl.store(ids + row * tl.num_programs(1) + part, tl.where(bad > 0, -1, part * BLOCK + at))


@triton.jit
def _join_parts(
    scores,
    ids,
    tokens,
    logprobs,
    finites,
    slots,
    positions,
    pool,
    pool_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the best of its parts, and the sum over all of them."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    source = scores + (row * PARTS + part).to(tl.int64) * 4
    score = tl.load(source, mask=inside, other=float("-inf"))
    chosen = part == tl.argmax(score, 0)
    raw = tl.max(tl.where(chosen, tl.load(source + 1, mask=inside, other=float("-inf")), float("-inf")), 0)
    tops = tl.load(source + 2, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(source + 3, mask=inside, other=0.0) * tl.exp(tops - shift), 0)
    token = tl.load(ids + row * PARTS + part, mask=inside, other=0)
    finite = (tl.min(token, 0) >= 0) & (top > float("-inf"))
    token = tl.maximum(tl.max(tl.where(chosen, token, -1), 0), 0)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, raw - top - tl.log(total))
    tl.store(finites + row, finite.to(tl.int32))
    slot = tl.load(slots + row)
    target = pool + slot.to(tl.int64) * pool_stride + tl.load(positions + row)
    tl.store(target, token, mask=slot >= 0)


@triton.jit
def _gumbel(token, seed, index):
    """`ops.sample.gumbel`: -log(-log(1 - v)) with v of 32 hashed bits, float32 [tokens].

    log(1 - v) is a series for small v: that is where the winner is, and where 1 - v has no digits left.
    """
    key = _splitmix64(_splitmix64(seed.to(tl.uint64)) ^ index.to(tl.uint64))
    bits = _mix32(token.to(tl.uint32) ^ key.to(tl.uint32))
    bits = _mix32(bits + (key >> 32).to(tl.uint32))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1 - v)))


@triton.jit
def _splitmix64(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _mix32(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _find_thresholds(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    stride,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least scaled logit that one row may draw: min_p, then top_k, then top_p of what these left.

    Each is "the largest value t such that the entries ≥ t are enough": k of them, or p of the probability.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    base = logits + row.to(tl.int64) * stride
    threshold = float("-inf")
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        top, bottom = _range(base, temperature, TOKENS, BLOCK)
        low = _order(bottom)
        if min_p > 0:
            low = tl.maximum(low, _order(top + tl.log(min_p)))
        if (top_k > 0) & (top_k < TOKENS):
            low = tl.maximum(low, _search(base, temperature, top, _order(bottom), top_k + 0.0, False, TOKENS, BLOCK))
        if top_p < 1:
            mass = _measure(base, temperature, top, low, True, TOKENS, BLOCK)
            # The likeliest token stays even for a top_p of 0.
            low = tl.minimum(_search(base, temperature, top, low, top_p * mass, True, TOKENS, BLOCK), _order(top))
        threshold = _value(low)
    tl.store(thresholds + row, threshold)


@triton.jit
def _range(base, temperature, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest and smallest scaled logit of a row."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    bottoms = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, TOKENS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < TOKENS, other=float("-inf")).to(tl.float32) / temperature
        tops = tl.maximum(tops, x)
        bottoms = tl.minimum(bottoms, tl.where(at < TOKENS, x, float("inf")))
    return tl.max(tops, 0), tl.min(bottoms, 0)


@triton.jit
def _search(base, temperature, top, low, target, BY_MASS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key ≥ `low` whose entries and those above reach `target`, four ways at a time.

    low     enough
    high    not enough;  keys between are unknown
    """
    high = _order(top) + 1
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        a, b, c = _measures(base, temperature, top, first, second, third, BY_MASS, TOKENS, BLOCK)
        # Measures fall as keys rise: take the last of the three that is enough.
        new_low = tl.where(c >= target, third, tl.where(b >= target, second, tl.where(a >= target, first, low)))
        new_high = tl.where(a < target, first, tl.where(b < target, second, tl.where(c < target, third, high)))
        low = new_low
        high = tl.minimum(new_high, high)
    return low


@triton.jit
def _measures(
    base, temperature, top, first, second, third, BY_MASS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many entries, or how much of the exponentials, lie at or above each of three keys."""
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    for start in range(0, TOKENS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < TOKENS, other=float("-inf")).to(tl.float32) / temperature
        share = tl.exp(x - top) if BY_MASS else (at < TOKENS).to(tl.float32)
        key = _order(x)
        a += tl.where(key >= first, share, 0.0)
        b += tl.where(key >= second, share, 0.0)
        c += tl.where(key >= third, share, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _measure(base, temperature, top, key, BY_MASS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    a, _, _ = _measures(base, temperature, top, key, key, key, BY_MASS, TOKENS, BLOCK)
    return a


@triton.jit
def _order(x):
    """float32 → int64 that sorts alike: for negatives the bits below the sign are flipped."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key):
    """The inverse of `_order`."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
