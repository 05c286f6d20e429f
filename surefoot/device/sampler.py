"""Rows of logits → drawn tokens with their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from surefoot.device.grammar import Mask
from surefoot.ops import sample as ops
from surefoot.spec import ModelSpec
from surefoot.types import Sampled, SamplingParams, Work

NOTHING_ALLOWED: Final = (
    "what it may say (its grammar, min_tokens, allowed_token_ids, bad words) leaves no token that could follow; other "
    "requests are not affected."
)


@dataclass(frozen=True)
class Row:
    """One row to draw from: its work, and the tokens up to and with its last input, [end] int32."""

    work: Work
    history: Tensor
    allowed: Mask | None = None
    """Of a row with a grammar: the tokens that may follow."""


class Sampler:
    """Draws tokens; holds nothing but the model's numbers."""

    def __init__(self, spec: ModelSpec) -> None:
        self.token_count = spec.token_count
        self.eos = spec.eos_token_ids

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[Sampled, ...] | None]:
        """`logits` [rows, vocabulary] float32 → a token per Sample of each row; None where no token is allowed."""
        drawable = logits[:, : self.token_count]
        likeliest = drawable.argmax(-1).tolist()
        return [
            tuple(Sampled(token) for _ in row.work.samples)
            if is_plain(row.work.params, row.work.samples[0].index)
            else self._sample_row(raw, drawn, row, token)
            for raw, drawn, row, token in zip(logits, drawable, rows, likeliest, strict=True)
        ]

    def _sample_row(self, raw: Tensor, drawable: Tensor, row: Row, likeliest: int) -> tuple[Sampled, ...] | None:
        params = row.work.params
        tokens = self._draw(drawable, row, likeliest)
        if tokens is None:
            return None
        if params.logprobs is None:
            return tuple(Sampled(token) for token in tokens)
        total = raw.logsumexp(-1)
        logprobs = (drawable[tokens] - total).tolist()
        top = _top(drawable, total, params.logprobs)
        return tuple(Sampled(token, logprob, top) for token, logprob in zip(tokens, logprobs, strict=True))

    def _draw(self, drawable: Tensor, row: Row, likeliest: int) -> list[int] | None:
        params, samples = row.work.params, row.work.samples
        if not reshapes(params, samples[0].index):
            if params.greedy:
                return [likeliest] * len(samples)
            shaped = drawable
        else:
            shaped = self._shape(drawable, row)
            if shaped.max() == -torch.inf:
                return None
        if params.greedy:
            return [int(shaped.argmax())] * len(samples)
        scaled = shaped / params.temperature
        ids = ops.candidates(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        return [ops.draw(scaled, ids, seed=sample.seed, index=sample.index) for sample in samples]

    def _shape(self, drawable: Tensor, row: Row) -> Tensor:
        """What is allowed, minimum length, bias and penalties, on a copy. A row's samples have one history."""
        params, outputs = row.work.params, row.work.samples[0].index
        logits = drawable.clone()
        if row.allowed is not None:
            ops.allow_(logits, torch.from_numpy(np.unpackbits(row.allowed, bitorder="little")))
        if params.allowed_token_ids is not None:
            ops.keep_(logits, params.allowed_token_ids)
        ops.forbid_(logits, banned(params.bad_token_ids, row.history, outputs))
        if outputs < params.min_tokens:
            ops.forbid_(logits, (*self.eos, *params.stop_token_ids))
        if params.logit_bias:
            ops.bias_(logits, params.logit_bias)
        ops.penalize_(
            logits,
            row.history,
            outputs,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
        return logits


def reshapes(params: SamplingParams, index: int) -> bool:
    """Whether anything changes the logits before they are drawn from."""
    return (
        index < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.grammar is not None
        or params.allowed_token_ids is not None
        or bool(params.bad_token_ids)
    )


def banned(sequences: Sequence[tuple[int, ...]], history: Tensor, outputs: int) -> list[int]:
    """The last tokens of those `sequences` whose others the output ends with."""
    longest = min(outputs, max(map(len, sequences), default=1) - 1)
    end = tuple(history[len(history) - longest :].tolist()) if longest else ()
    return [
        last for *before, last in sequences if len(before) <= longest and end[longest - len(before) :] == (*before,)
    ]


def is_plain(params: SamplingParams, index: int) -> bool:
    """Whether the likeliest token is all that is asked for."""
    return params.greedy and params.logprobs is None and not reshapes(params, index)


def _top(drawable: Tensor, total: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with their log-probabilities, likeliest first."""
    values, ids = drawable.topk(min(count, drawable.shape[0]))
    return tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))
