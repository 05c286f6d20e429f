"""int8 weights against float32 ones, on the embedded model."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from surefoot import checkpoint as checkpoints
from surefoot.api.tokenizer import load_tokenizer
from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from surefoot.ops.linear import INT8_MAX_ROWS
from tests.device.driver import Driver

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
"""The beginning of Lewis Carroll, Alice's Adventures in Wonderland (1865), public domain."""


def embedded(quantization: str) -> Driver:
    config = EngineConfig(quantization=quantization, memory=2 << 30)
    return Driver(open_device(config, progress=lambda what, part: None))


def perplexity(driver: Driver, tokens: list[int], rows: int) -> float:
    """exp of the mean negative log-likelihood, `rows` positions a step: few take the int8 kernel, many float32."""
    logprobs = driver.logits(tokens[:-1], rows).log_softmax(-1)
    return math.exp(-float(logprobs.gather(1, torch.tensor(tokens[1:])[:, None]).mean()))


@pytest.mark.slow
def test_int8_costs_less_than_a_percent_of_perplexity() -> None:
    """Over 1,000 tokens eight bits per weight cost under 1 %; the kernel of few rows adds less than that again."""
    tokens = list(load_tokenizer(checkpoints.find("smollm2")).encode(TEXT.read_text()))
    assert len(tokens) > 1000
    exact = perplexity(embedded("none"), tokens, 512)
    assert 5 < exact < 40, "text that the model finds neither easy nor strange"
    gc.collect()
    int8 = embedded("int8")
    assert perplexity(int8, tokens, 512) < exact * 1.01
    start = tokens[:200]
    assert perplexity(int8, start, INT8_MAX_ROWS) < perplexity(int8, start, 512) * 1.01
