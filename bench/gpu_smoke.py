"""First light on a GPU: a small network of GLM's shape gives the CPU's text, alone, batched, chunked and by graphs.

python bench/gpu_smoke.py
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from surefoot import checkpoint
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.testing import request_of
from surefoot.types import Emitted

CONFIG = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    "vocab_size": 2048, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": [7], "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip


def texts(folder: str, device: str, dtype: str, chunk: int, together: bool) -> list[list[int]]:
    from surefoot.device.start import open_device

    config = EngineConfig(
        model=folder, device=device, dtype=dtype, max_num_batched_tokens=chunk,
        max_num_seqs=16, block_size=128 if device == "cuda" else 16, memory=2 << 30,
    )  # fmt: skip
    opened = open_device(config, progress=lambda stage, fraction: None)
    engine = Engine(opened.executor, opened.limits)
    found: dict[int, list[int]] = {id: [] for id in range(12)}

    def drain() -> None:
        while engine.has_work:
            for event in engine.step(time.monotonic()):
                assert isinstance(event, Emitted), event
                found[event.request].append(event.sampled.token)

    for id in found:
        prompt = [(id * 37 + i * i) % 2000 for i in range(20 + 90 * id)]
        hot = {"temperature": 1.0, "top_k": 40} if id % 3 == 2 else {}
        if id % 4 == 3:
            hot |= {"presence_penalty": 1.5, "repetition_penalty": 1.3}
        engine.add(request_of(id, prompt, max_tokens=24, **hot), time.monotonic())
        if not together:
            drain()
    drain()
    assert engine.faults() == []
    return list(found.values())


def write(folder: str) -> None:
    """A random checkpoint whose next tokens are far apart."""
    from surefoot.model import weights
    from surefoot.spec import read_spec

    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(checkpoint.find(folder, weights=False))
    tensors = {
        name: tensor * (1 if "norm" in name else 4) for name, tensor in weights.dummy(spec, dtype=torch.float32, seed=3)
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}.mlp."
        parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(parts)
    save_file(tensors, str(Path(folder, "model.safetensors")))


def main() -> int:
    folder = tempfile.mkdtemp()
    write(folder)
    runs = {
        "cpu float32": texts(folder, "cpu", "float32", 512, True),
        "float32 alone": texts(folder, "cuda", "float32", 2048, False),
        "float32 together": texts(folder, "cuda", "float32", 2048, True),
        "float32 chunked": texts(folder, "cuda", "float32", 128, True),
        "bfloat16 alone": texts(folder, "cuda", "bfloat16", 2048, False),
        "bfloat16 together": texts(folder, "cuda", "bfloat16", 2048, True),
    }
    first = runs["cpu float32"]
    for name, run in runs.items():
        same = sum(a == b for a, b in zip(first, run, strict=True))
        prefix = sum(
            next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 24)
            for a, b in zip(first, run, strict=True)
        )
        print(f"{name:20s} {same} of 12 texts equal the CPU's; {prefix} of {12 * 24} tokens before a difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
