"""Drawing on a GPU without waiting for it: launched behind the forward pass, read when the step is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.device.sampler import reshapes
from surefoot.ops.sample_triton import Drawn, Rows, draw
from surefoot.spec import ModelSpec
from surefoot.types import Sample, Sampled, SamplingParams, Work

Draw = tuple[Work, Sample]


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities of the draws that asked for them, on their way to the host."""

    draws: list[int]
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

    def launch(self, logits: Tensor, draws: Sequence[Draw], rows: Rows, pool: Tensor) -> Outcome:
        """Draw from `logits` [samples, vocabulary]; rows past the draws are padding and are drawn to nowhere."""
        count = len(draws)
        asked = [at for at, (work, _) in enumerate(draws) if work.params.logprobs is not None]
        raw = logits[asked, : self._token_count].float() if asked else None
        shaped = [at for at, (work, sample) in enumerate(draws) if reshapes(work.params, sample.index)]
        if shaped:
            logits = logits.float()
            logits[shaped] = self._shape(logits[shaped], [draws[at] for at in shaped], pool)
        limited = any(_limited(work.params) for work, _ in draws)
        draw(logits, self._token_count, rows, self.drawn, pool, limited=limited)
        return Outcome(
            tokens=_to_host(self.drawn.token[:count]),
            finite=_to_host(self.drawn.finite[:count]),
            logprobs=None if raw is None else self._logprobs(raw, asked, draws),
        )

    def _logprobs(self, raw: Tensor, asked: list[int], draws: Sequence[Draw]) -> Logprobs:
        total = raw.logsumexp(-1, keepdim=True)
        most = max(1, *(draws[at][0].params.logprobs or 0 for at in asked))
        values, ids = raw.topk(min(most, raw.shape[-1]))
        chosen = raw.gather(1, self.drawn.token[asked].long()[:, None]) - total
        return Logprobs(asked, _to_host(chosen[:, 0]), _to_host(values - total), _to_host(ids))

    def _shape(self, logits: Tensor, draws: Sequence[Draw], pool: Tensor) -> Tensor:
        """Minimum length, bias and penalties on float32 rows [k, vocabulary], all rows together and without a sync."""
        self._forbid_and_bias(logits, draws)
        params = [work.params for work, _ in draws]
        if all(_no_penalty(each) for each in params):
            return logits
        ends = self._column([work.end for work, _ in draws])
        outputs = self._column([sample.index for _, sample in draws])
        longest = max(work.end for work, _ in draws)
        history = pool[torch.tensor([work.slot for work, _ in draws], device=self._device), :longest].long()
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

    def _forbid_and_bias(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        forbidden = [
            (row, token)
            for row, (work, sample) in enumerate(draws)
            if sample.index < work.params.min_tokens
            for token in (*self._eos, *work.params.stop_token_ids)
        ]
        if forbidden:
            rows, tokens = torch.tensor(forbidden, device=self._device).unbind(1)
            logits[rows, tokens] = -torch.inf
        biases = [(row, *bias) for row, (work, _) in enumerate(draws) for bias in work.params.logit_bias]
        if biases:
            where = torch.tensor([bias[:2] for bias in biases], device=self._device).unbind(1)
            values = torch.tensor([bias[2] for bias in biases], device=self._device)
            logits.index_put_(where, values, accumulate=True)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None]


def read(outcome: Outcome, draws: Sequence[Draw]) -> tuple[list[Sampled], list[bool]]:
    """The drawn tokens and whether the row of each was finite; only after the step's event has passed."""
    sampled = [Sampled(token) for token in outcome.tokens.tolist()]
    if outcome.logprobs is not None:
        found = outcome.logprobs
        rows = zip(found.draws, found.chosen.tolist(), found.top_ids.tolist(), found.top_values.tolist(), strict=True)
        for at, chosen, ids, values in rows:
            count = draws[at][0].params.logprobs or 0
            sampled[at] = Sampled(sampled[at].token, chosen, tuple(zip(ids, values, strict=True))[:count])
    return sampled, [bool(finite) for finite in outcome.finite.tolist()]


def _limited(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _no_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0


def _to_host(tensor: Tensor) -> Tensor:
    """A pinned copy, on its way."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
