"""Drawing on a GPU without waiting for it: launched behind the forward pass, read when the step is collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surefoot.device.gpu_inputs import Draw
from surefoot.device.grammar import Mask
from surefoot.device.sampler import reshapes
from surefoot.ops.sample_triton import Drawn, Rows, draw
from surefoot.spec import ModelSpec
from surefoot.types import Sampled, SamplingParams

Key = tuple[int, int]
"""Request and child."""


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities of the draws that asked for them, on their way to the host."""

    draws: list[Draw]
    chosen: Tensor
    """[k] float32."""
    top_values: Tensor
    """[k, most] float32."""
    top_ids: Tensor
    """[k, most] int64."""


@dataclass(frozen=True)
class Outcome:
    """Host copies, complete when the step's event has passed."""

    tokens: Tensor
    finite: Tensor
    logprobs: Logprobs | None


class GpuSampler:
    """Static room for the draws of a step."""

    def __init__(self, spec: ModelSpec, *, most: int, device: torch.device) -> None:
        self._token_count = spec.token_count
        self._eos = spec.eos_token_ids
        self._device = device
        self.drawn = Drawn.allocate(most, spec.token_count, device)

    def launch(
        self, logits: Tensor, draws: Sequence[Draw], rows: Rows, pool: Tensor, allowed: Mapping[Key, Mask] | None = None
    ) -> Outcome:
        """Draw from `logits` [places, vocabulary]; places without a draw are padding and are drawn to nowhere.

        `allowed` are the tokens that may follow in rows with a grammar.
        """
        asked = [each for each in draws if each.work.params.logprobs is not None]
        raw = logits[_places(asked), : self._token_count].float() if asked else None
        shaped = [each for each in draws if reshapes(each.work.params, each.sample.index)]
        if shaped:
            logits = logits.float()
            logits[_places(shaped)] = self._shape(
                self._allow(logits[_places(shaped)], shaped, allowed or {}), shaped, pool
            )
        limited = any(_limited(each.work.params) for each in draws)
        draw(logits, self._token_count, rows, self.drawn, pool, limited=limited)
        count = 1 + max(_places(draws))
        return Outcome(
            tokens=to_host(self.drawn.token[:count]),
            finite=to_host(self.drawn.finite[:count]),
            logprobs=None if raw is None else self._logprobs(raw, asked),
        )

    def _logprobs(self, raw: Tensor, asked: list[Draw]) -> Logprobs:
        total = raw.logsumexp(-1, keepdim=True)
        most = max(1, *(each.work.params.logprobs or 0 for each in asked))
        values, ids = raw.topk(min(most, raw.shape[-1]))
        chosen = raw.gather(1, self.drawn.token[_places(asked)].long()[:, None]) - total
        return Logprobs(asked, to_host(chosen[:, 0]), to_host(values - total), to_host(ids))

    def _allow(self, logits: Tensor, draws: Sequence[Draw], allowed: Mapping[Key, Mask]) -> Tensor:
        """-inf on float32 rows [k, vocabulary] for what a grammar does not allow."""
        rows = [row for row, each in enumerate(draws) if each.work.key in allowed]
        if rows:
            packed = torch.from_numpy(np.stack([allowed[draws[row].work.key] for row in rows])).pin_memory()
            bits = packed.to(self._device, non_blocking=True)[:, :, None] >> torch.arange(8, device=self._device)
            forbidden = (bits & 1).flatten(1)[:, : self._token_count] == 0
            at = torch.tensor(rows, device=self._device)
            kept = logits[at]
            kept[:, : self._token_count].masked_fill_(forbidden, -torch.inf)
            logits[at] = kept
        return logits

    def _shape(self, logits: Tensor, draws: Sequence[Draw], pool: Tensor) -> Tensor:
        """Minimum length, bias and penalties on float32 rows [k, vocabulary], all rows together and without a sync."""
        self._forbid_and_bias(logits, draws, pool)
        params = [each.work.params for each in draws]
        if all(_no_penalty(each) for each in params):
            return logits
        ends = self._column([each.work.end for each in draws])
        outputs = self._column([each.sample.index for each in draws])
        longest = max(each.work.end for each in draws)
        history = pool[torch.tensor([each.work.slot for each in draws], device=self._device), :longest].long()
        position = torch.arange(longest, device=self._device)
        told = (position < ends).float()
        drawn = ((position < ends) & (position >= ends - outputs)).float()
        seen = torch.zeros_like(logits).scatter_add_(1, history, told) > 0
        counts = torch.zeros_like(logits).scatter_add_(1, history, drawn)
        repetition = self._column([each.repetition_penalty for each in params])
        presence = self._column([each.presence_penalty for each in params])
        frequency = self._column([each.frequency_penalty for each in params])
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(seen, repeated, logits) - presence * (counts > 0) - frequency * counts

    def _forbid_and_bias(self, logits: Tensor, draws: Sequence[Draw], pool: Tensor) -> None:
        forbidden = [
            (row, token)
            for row, each in enumerate(draws)
            if each.sample.index < each.work.params.min_tokens
            for token in (*self._eos, *each.work.params.stop_token_ids)
        ]
        if forbidden:
            rows, tokens = torch.tensor(forbidden, device=self._device).unbind(1)
            logits[rows, tokens] = -torch.inf
        self._keep_and_ban(logits, draws, pool)
        biases = [(row, *bias) for row, each in enumerate(draws) for bias in each.work.params.logit_bias]
        if biases:
            where = torch.tensor([bias[:2] for bias in biases], device=self._device).unbind(1)
            values = torch.tensor([bias[2] for bias in biases], device=self._device)
            logits.index_put_(where, values, accumulate=True)

    def _keep_and_ban(self, logits: Tensor, draws: Sequence[Draw], pool: Tensor) -> None:
        """allowed_token_ids, and the last token of each banned sequence whose others the output ends with."""
        for row, each in enumerate(draws):
            params, slot, end = each.work.params, each.work.slot, each.work.end
            if params.allowed_token_ids is not None:
                kept = torch.tensor(params.allowed_token_ids, device=self._device)
                values = logits[row, kept]
                logits[row].fill_(-torch.inf)[kept] = values
            for *before, last in params.bad_token_ids:
                if len(before) <= each.sample.index:
                    said = pool[slot, end - len(before) : end] == torch.tensor(before, device=self._device)
                    logits[row, last] = torch.where(said.all(), -torch.inf, logits[row, last])

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None]


def read(outcome: Outcome, draws: Sequence[Draw]) -> list[Sampled | None]:
    """The token of each draw, None where its row was not finite; only after the step's event has passed."""
    tokens, finite = outcome.tokens.tolist(), outcome.finite.tolist()
    extras: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
    if outcome.logprobs is not None:
        found = outcome.logprobs
        rows = zip(found.draws, found.chosen.tolist(), found.top_ids.tolist(), found.top_values.tolist(), strict=True)
        for each, chosen, ids, values in rows:
            top = tuple(zip(ids, values, strict=True))[: each.work.params.logprobs or 0]
            extras[each.place] = (chosen, top)
    return [Sampled(tokens[each.place], *extras.get(each.place, ())) if finite[each.place] else None for each in draws]


def _places(draws: Sequence[Draw]) -> list[int]:
    return [each.place for each in draws]


def _limited(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _no_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0


def to_host(tensor: Tensor) -> Tensor:
    """A pinned copy, on its way."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
