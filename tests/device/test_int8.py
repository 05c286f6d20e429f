"""int8 weights against float32 ones, on the embedded model."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from surefoot import checkpoint as checkpoints
from surefoot.api.tokenizer import load_tokenizer
from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from surefoot.types import Sample, SamplingParams, StepDone, StepPlan, Work

# Lewis Carroll, Alice's Adventures in Wonderland (1865), public domain.
TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and "
    "what is the use of a book,” thought Alice “without pictures or conversations?” So she was considering in her own "
    "mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with "
    "pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so very much out "
    "of the way to hear the Rabbit say to itself, “Oh dear! Oh dear! I shall be late!”"
)


def perplexity(quantization: str, tokens: list[int], rows: int) -> float:
    """exp of the mean negative log-likelihood, `rows` positions a step: few take the int8 kernel, many float32."""
    device = open_device(EngineConfig(quantization=quantization, memory=2 << 30), progress=lambda what, part: None)
    runner = device.executor.runner
    params = SamplingParams(temperature=0.0)
    total = 0.0
    for start in range(0, len(tokens) - 1, rows):
        given = tuple(tokens[start : min(start + rows, len(tokens) - 1)])
        seen: list[torch.Tensor] = []
        forward = runner.forward
        runner.forward = lambda inputs, seen=seen, forward=forward: seen.append(forward(inputs)) or seen[-1]  # type: ignore[method-assign]
        work = Work(
            request=0,
            child=0,
            epoch=0,
            slot=0,
            start=start,
            tokens=given,
            table=tuple(range(-(-(start + len(given)) // 16))),
            known=None,
            samples=(Sample(0, 0, 0),),
            params=params,
            decoding=False,
        )
        outcome = device.executor.collect(device.executor.launch(StepPlan(id=start, works=(work,))))
        runner.forward = forward  # type: ignore[method-assign]
        assert isinstance(outcome, StepDone)
        logprobs = runner.logits(seen[0], list(range(len(given)))).log_softmax(-1)
        targets = torch.tensor(tokens[start + 1 : start + 1 + len(given)])
        total -= float(logprobs.gather(1, targets[:, None]).sum())
    return math.exp(total / (len(tokens) - 1))


@pytest.mark.slow
def test_int8_costs_less_than_a_percent_of_perplexity() -> None:
    """Eight bits per weight cost under 1 % of perplexity, by the int8 kernel and by the float32 copy alike."""
    tokens = load_tokenizer(checkpoints.find("smollm2")).encode(TEXT)
    exact = perplexity("none", tokens, 64)
    gc.collect()
    for rows in (8, 64):
        assert perplexity("int8", tokens, rows) < exact * 1.01
        gc.collect()
