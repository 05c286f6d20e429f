"""Every family computes what transformers computes, through our loading, our paged cache and our steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from tests.device.driver import Driver
from tests.model.tiny import CASES, SIZES, write, write_chatglm

pytestmark = pytest.mark.slow
LENGTH = 210
"""More than two tiles of values and three of queries, and many windows."""
STD = 0.2
"""Enough for sharp attention and logits that differ by whole numbers."""


class Pair(NamedTuple):
    """A network of transformers, and the same opened here from the checkpoint that transformers wrote."""

    theirs: Any
    ours: Driver


@pytest.fixture(scope="module", params=[*CASES, "chatglm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    sharded = {"max_shard_size": "40KB"} if name == "qwen-3" else {}
    theirs = write(folder, CASES["glm" if name == "chatglm" else name], std=STD, **sharded)
    if name == "chatglm":
        glm, folder = folder, tmp_path_factory.mktemp("renamed")
        write_chatglm(folder, glm)
    config = EngineConfig(model=str(folder), dtype="float32", memory=300 << 20, max_num_seqs=8)
    return Pair(theirs, Driver(open_device(config, progress=lambda what, part: None)))


def text(length: int = LENGTH) -> list[int]:
    return random.Random(length).choices(range(4, SIZES["vocab_size"]), k=length)


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [tokens, vocabulary] of one text, computed at once."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_logits_equal_transformers(pair: Pair) -> None:
    """Within 1e-4 of their scale for a prompt at once; cut at odd places and decoded, the same to the last bit."""
    tokens = text()
    expected = reference(pair.theirs, tokens)
    assert expected.std() > 0.3, "logits that hardly differ would hide mistakes"
    whole = pair.ours.logits(tokens, LENGTH)
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(pair.ours.logits(tokens, 37, singles=40), whole)
    assert torch.equal(pair.ours.logits(tokens, 130, singles=1), whole)


def test_greedy_text_equals_transformers(pair: Pair) -> None:
    """16 tokens after a prompt are those that transformers finds most likely, each after the same text."""
    prompt = text()
    drawn = [sampled.token for sampled in pair.ours.generate([pair.ours.sequence(prompt)], 16, 50)[0]]
    expected = reference(pair.theirs, prompt + drawn)[len(prompt) - 1 : -1].argmax(-1)
    assert drawn == expected.tolist()


def test_neighbours_change_no_bit(pair: Pair) -> None:
    """Sequences of all lengths, alone and in one batch, draw the same tokens with the same log-probabilities."""
    lengths, ours = (1, 5, 24, 25, 90, 130, 200), pair.ours
    alone = [ours.generate([ours.sequence(text(length))], 6)[0] for length in lengths]
    assert ours.generate([ours.sequence(text(length)) for length in lengths], 6, 64) == alone


@pytest.mark.parametrize("name", ["gemma-2", "gemma-3", "qwen-3-moe", "glm-4"])
def test_bfloat16_is_as_good_as_its_rounding(tmp_path: Path, name: str) -> None:
    """In bfloat16 logits are within a tenth of float32's: norms, scales and routers keep to one dtype or the other."""
    tokens, theirs = text(), write(tmp_path, CASES[name], std=STD)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", memory=300 << 20)
    ours = Driver(open_device(config, progress=lambda what, part: None)).logits(tokens, 100)
    expected = reference(theirs, tokens)
    assert (ours - expected).norm() < 0.1 * expected.norm()


def test_a_short_context_turns_by_the_short_factors(tmp_path: Path) -> None:
    """Phi-3 with longrope, served with no more than its original context, computes what transformers does of it."""
    tokens, theirs = text(60), write(tmp_path, CASES["phi-3-longrope"], std=STD)
    config = EngineConfig(model=str(tmp_path), dtype="float32", memory=300 << 20, max_model_len=64)
    ours = Driver(open_device(config, progress=lambda what, part: None)).logits(tokens, 60)
    expected = reference(theirs, tokens)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
