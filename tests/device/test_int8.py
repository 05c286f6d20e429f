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
from tests.device.driver import Driver

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


def embedded(quantization: str) -> Driver:
    config = EngineConfig(quantization=quantization, memory=2 << 30)
    return Driver(open_device(config, progress=lambda what, part: None))


def perplexity(driver: Driver, tokens: list[int], rows: int) -> float:
    """exp of the mean negative log-likelihood, `rows` positions a step: few take the int8 kernel, many float32."""
    logprobs = driver.logits(tokens[:-1], rows).log_softmax(-1)
    return math.exp(-float(logprobs.gather(1, torch.tensor(tokens[1:])[:, None]).mean()))


@pytest.mark.slow
def test_int8_costs_less_than_a_percent_of_perplexity() -> None:
    """Eight bits per weight cost under 1 % of perplexity, by the int8 kernel and by the float32 copy alike."""
    tokens = list(load_tokenizer(checkpoints.find("smollm2")).encode(TEXT))
    exact = perplexity(embedded("none"), tokens, 64)
    gc.collect()
    int8 = embedded("int8")
    for rows in (8, 64):
        assert perplexity(int8, tokens, rows) < exact * 1.01
