"""vLLM's outputs. Text and token ids are cumulative: each output holds all so far."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec.structs import replace

from surefoot.api.local import CompletionOutput as Written
from surefoot.api.local import Logprob
from surefoot.errors import RequestError


class CompletionOutput(msgspec.Struct):
    """One of the n completions of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """stop | length | abort | error"""
    stop_reason: str | int | None = None
    """The stop string, or the id out of stop_token_ids, that ended it."""
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Moments of a request in seconds of the wall clock, and counts."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """Not known here: the worker tells what it emits, not what it plans."""
    time_in_queue: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        return (self.first_token_time or self.arrival_time) - self.arrival_time

    def grew(self, cached: int) -> None:
        """A token came just now, of a prompt with `cached` tokens out of the prefix cache."""
        self.last_token_time = time.time()
        self.first_token_time = self.first_token_time or self.last_token_time
        self.num_generation_tokens += 1
        self.num_cached_tokens = cached


class RequestOutput(msgspec.Struct, kw_only=True):
    """What became of one prompt, so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Any = None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    error: RequestError | None = None
    """Why it failed, where finish_reason is "error"; ours, vLLM has no such field."""


def completion(written: Written, *, shown: bool) -> CompletionOutput:
    """What was written, as vLLM has it; without text where none is wanted."""
    return CompletionOutput(
        index=written.index,
        text=written.text if shown else "",
        token_ids=written.token_ids,
        cumulative_logprob=written.cumulative_logprob,
        logprobs=written.logprobs,
        finish_reason=written.finish_reason,
        stop_reason=written.stop_reason,
    )


def rest_of(output: CompletionOutput, before: CompletionOutput) -> CompletionOutput:
    """What `output` has gained since `before`."""
    scores = None if output.logprobs is None else output.logprobs[len(before.logprobs or ()) :]
    text, ids = output.text[len(before.text) :], output.token_ids[len(before.token_ids) :]
    return replace(output, text=text, token_ids=ids, logprobs=scores)
