"""The engine on a GPU gives the CPU's text; last run on one H200 with torch 2.11 on 2026-12-01."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surefoot import checkpoint
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.device.start import open_device
from surefoot.model import weights
from surefoot.spec import read_spec
from surefoot.testing import request_of
from surefoot.types import Emitted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
REQUESTS, TOKENS = 12, 24
CONFIG = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    "vocab_size": 2048, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": [7], "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of GLM's shape whose next tokens are far apart."""
    path = tmp_path_factory.mktemp("glm")
    (path / "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(checkpoint.find(str(path), weights=False))
    tensors = {
        name: tensor * (1 if "norm" in name else 4) for name, tensor in weights.dummy(spec, dtype=torch.float32, seed=3)
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}.mlp."
        parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(parts)
    save_file(tensors, str(path / "model.safetensors"))
    return path


def texts(folder: Path, device: str, dtype: str, *, chunk: int, together: bool) -> list[list[int]]:
    """Twelve prompts of 20 to 1,010 tokens: greedy, sampled, with penalties."""
    config = EngineConfig(
        model=str(folder), device=device, dtype=dtype, max_num_batched_tokens=chunk, max_num_seqs=16,
        block_size=128 if device == "cuda" else 16, memory=2 << 30,
    )  # fmt: skip
    opened = open_device(config, progress=lambda stage, fraction: None)
    engine = Engine(opened.executor, opened.limits)
    found: dict[int, list[int]] = {id: [] for id in range(REQUESTS)}

    def drain() -> None:
        while engine.has_work:
            for event in engine.step(time.monotonic()):
                assert isinstance(event, Emitted), event
                found[event.request].append(event.sampled.token)

    for id in found:
        prompt = [(id * 37 + i * i) % 2000 for i in range(20 + 90 * id)]
        params = {"temperature": 1.0, "top_k": 40} if id % 3 == 2 else {}
        if id % 4 == 3:
            params |= {"presence_penalty": 1.5, "repetition_penalty": 1.3}
        engine.add(request_of(id, prompt, max_tokens=TOKENS, **params), time.monotonic())
        if not together:
            drain()
    drain()
    assert engine.faults() == []
    return list(found.values())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return texts(folder, "cpu", "float32", chunk=512, together=True)


@pytest.mark.parametrize(("chunk", "together"), [(2048, False), (2048, True), (128, True)])
def test_float32_text_is_the_cpus(folder: Path, expected: list[list[int]], chunk: int, together: bool) -> None:
    """Alone, batched and chunked, by graphs and eagerly, two plans in flight: the same tokens as on the CPU."""
    assert texts(folder, "cuda", "float32", chunk=chunk, together=together) == expected


def test_bfloat16_begins_alike(folder: Path, expected: list[list[int]]) -> None:
    """In bfloat16 texts part where two tokens are close, but not at once."""
    found = texts(folder, "cuda", "bfloat16", chunk=2048, together=True)
    assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) >= REQUESTS - 2
