"""From logits to a token: each step of the way as a function on one row.

The order is vLLM's: minimum length, bias, penalties, temperature, min_p, top_k, top_p, draw. A draw adds Gumbel noise
and takes the maximum, which samples from the softmax (Gumbel 1954; Maddison et al., https://arxiv.org/abs/1411.0030).
The noise is a hash of (seed, output index, token id): no generator, no state, so a token is drawn alike alone, in any
batch and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LIKELY = 512
"""A nucleus is looked for among this many tokens before all are sorted."""


def penalize_(
    logits: Tensor, history: Tensor, outputs: int, *, repetition: float, presence: float, frequency: float
) -> None:
    """Penalties in place on `logits` [vocabulary]; `history` [tokens] is the prompt and then the last `outputs` drawn.

    Repetition (https://arxiv.org/abs/1909.05858) divides what is positive and multiplies what is negative, of every
    token seen; presence and frequency subtract, of the tokens drawn.
    """
    if repetition != 1.0:
        seen = torch.unique(history).long()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if outputs and (presence or frequency):
        drawn, counts = torch.unique(history[-outputs:], return_counts=True)
        logits[drawn.long()] -= presence + frequency * counts


def forbid_(logits: Tensor, tokens: Sequence[int]) -> None:
    """Set the logits of `tokens` to -inf in place; ids beyond the row are not there to be drawn anyway."""
    logits[[token for token in tokens if token < logits.shape[0]]] = -torch.inf


def allow_(logits: Tensor, allowed: Tensor) -> None:
    """Set to -inf in place where `allowed` [at least vocabulary] uint8 is 0."""
    logits.masked_fill_(allowed[: logits.shape[0]] == 0, -torch.inf)


def keep_(logits: Tensor, tokens: Sequence[int]) -> None:
    """Set the logits of all but `tokens` to -inf in place."""
    kept = list(tokens)
    values = logits[kept]
    logits.fill_(-torch.inf)[kept] = values


def bias_(logits: Tensor, bias: Sequence[tuple[int, float]]) -> None:
    """Add to single logits in place."""
    ids, values = zip(*bias, strict=True)
    logits[list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def candidates(scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Ids that may be drawn from `scaled` [vocabulary] (logits over temperature), or None for all.

    min_p keeps what is at least that part of the likeliest; top_k the k largest and what equals the last of them;
    top_p the fewest of the remaining whose probabilities reach p, at least one.
    """
    ids = None
    if min_p > 0:
        ids = torch.nonzero(scaled >= scaled.max() + torch.tensor(min_p).log()).squeeze(-1)
    if 0 < top_k < (scaled.shape[0] if ids is None else ids.shape[0]):
        kept = scaled if ids is None else scaled[ids]
        above = torch.nonzero(kept >= kept.topk(top_k).values[-1]).squeeze(-1)
        ids = above if ids is None else ids[above]
    if top_p < 1:
        ids = _nucleus(scaled, top_p) if ids is None else ids[_nucleus(scaled[ids], top_p)]
    return ids


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Positions of the fewest largest entries whose share of the softmax reaches `top_p`.

    A sort of the whole vocabulary is the most expensive step of a draw, and the nucleus is nearly always small.
    """
    total = scaled.logsumexp(-1)
    few = min(_LIKELY, scaled.shape[0])
    values, order = scaled.topk(few)
    before = _shares_before(values, total)
    if few < scaled.shape[0] and before[-1] < top_p:
        values, order = scaled.sort(descending=True, stable=True)
        before = _shares_before(values, total)
    keep = before < top_p
    keep[0] = True
    return order[keep]


def _shares_before(values: Tensor, total: Tensor) -> Tensor:
    """Sum of probabilities of the larger entries, for each of `values` in falling order."""
    shares = (values - total).exp()
    return shares.cumsum(-1) - shares


def draw(scaled: Tensor, ids: Tensor | None, *, seed: int, index: int) -> int:
    """One token id from `scaled` [vocabulary], among `ids` or all: argmax of the logits plus Gumbel noise."""
    if ids is None:
        ids = torch.arange(scaled.shape[0], device=scaled.device)
        return int((scaled + gumbel(ids, seed=seed, index=index)).argmax())
    return int(ids[(scaled[ids] + gumbel(ids, seed=seed, index=index)).argmax()])


def gumbel(ids: Tensor, *, seed: int, index: int) -> Tensor:
    """Standard Gumbel noise of each token id, float32, as a function of (seed, output index, id) alone.

    -log(-log(1 - v)) with v uniform in (0, 1): the winner of a draw has a small v, where float32 is finest.
    """
    uniform = (hash_bits(ids, seed=seed, index=index).float() + 0.5).mul_(2.0**-32).clamp_max_(1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def hash_bits(ids: Tensor, *, seed: int, index: int) -> Tensor:
    """32 uniform bits per token id, int64.

    The seed and the index make a key of 64 bits (SplitMix64, Steele et al. 2014); each half enters one round of a
    32-bit integer mixer over the id (multiply and xor-shift, constants of Wellons' lowbias32).
    """
    key = splitmix64(splitmix64(seed & _M64) ^ (index & _M64))
    bits = _mix32(ids.to(torch.int64) ^ (key & _M32))
    return _mix32((bits + (key >> 32)).bitwise_and_(_M32))


_M32 = (1 << 32) - 1
_M64 = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """One step of SplitMix64: a bijection on 64-bit integers in which every input bit changes half of the output."""
    value = (value + 0x9E3779B97F4A7C15) & _M64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _M64
    return value ^ (value >> 31)


def _mix32(bits: Tensor) -> Tensor:
    """A bijection on 32-bit integers, held in int64 so that shifts are logical; products are cut to 32 bits."""
    bits = bits ^ (bits >> 16)
    bits = bits.mul_(0x7FEB352D).bitwise_and_(_M32)
    bits ^= bits >> 15
    bits = bits.mul_(0x846CA68B).bitwise_and_(_M32)
    bits ^= bits >> 16
    return bits
