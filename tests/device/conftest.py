"""A tiny network with random weights, to be driven by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from tests.device.driver import Driver

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configuration of a tiny network; its weights are drawn at random."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def open_tiny(tiny_model: Path) -> Callable[..., Driver]:
    """Open the tiny network with settings, and hands to drive it."""

    def open_it(**settings: object) -> Driver:
        config = {"model": str(tiny_model), "load_format": "dummy", "dtype": "float32", "memory": 400 << 20} | settings
        return Driver(open_device(EngineConfig(**config), progress=lambda what, part: None))  # type: ignore[arg-type]

    return open_it


@pytest.fixture(scope="session")
def tiny(open_tiny: Callable[..., Driver]) -> Driver:
    return open_tiny()
