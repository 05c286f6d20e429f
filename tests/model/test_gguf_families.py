"""GGUF files of every architecture, as llama.cpp's converter writes them, against transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from tests.device.driver import Driver
from tests.model.test_exactness import STD, reference, text
from tests.model.tiny import CASES, SIZES, Case, Tensors, write

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow


class File(NamedTuple):
    """An architecture of llama.cpp's, what its metadata says beside sizes, and further tensors."""

    architecture: str
    metadata: dict[str, Any] = {}  # noqa: RUF012 - a named tuple's default, never written
    tensors: dict[str, list[float]] = {}  # noqa: RUF012


SHORT_DIVISORS = [1.0 + at / 8 for at in range(8)]
LONG_DIVISORS = [1.0 + at / 2 for at in range(8)]
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
FILES: dict[str, tuple[Case, File]] = {
    "llama": (CASES["llama-tied"], File("llama")),
    "llama-linear": (
        CASES["llama-linear"],
        File("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ),
    "qwen-2": (CASES["qwen-2"], File("qwen2", YARN | {"rope.freq_base": 1e6})),
    "qwen-3": (CASES["qwen-3"], File("qwen3")),
    "qwen-3-moe": (
        Case("Qwen3Moe", CASES["qwen-3-moe"].config | {"mlp_only_layers": []}),
        File("qwen3moe", {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24}),
    ),
    "phi-3": (CASES["phi-3"], File("phi3", {"attention.sliding_window": 24})),
    "phi-3-longrope": (
        CASES["phi-3-longrope"],
        File(
            "phi3",
            {"rope.scaling.original_context_length": 64},
            {"rope_factors_short.weight": SHORT_DIVISORS, "rope_factors_long.weight": LONG_DIVISORS},
        ),
    ),
    "gemma": (CASES["gemma"], File("gemma")),
    "gemma-2": (
        Case("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}),
        File("gemma2", {"attention.sliding_window": 24}),
    ),
    "gemma-3": (
        Case("Gemma3", CASES["gemma-3"].config | {"query_pre_attn_scalar": 32}),
        File("gemma3", {"attention.sliding_window": 24, "attention.sliding_window_pattern": 3, "rope.freq_base": 1e6}),
    ),
    "smollm-3": (
        Case("SmolLM3", {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}),
        File("smollm3", {"rope.freq_base": 2e6}),
    ),
    "glm": (CASES["glm"], File("chatglm", {"rope.dimension_count": 16, "rope.freq_base": 5e6})),
    "glm-4": (CASES["glm-4"], File("glm4", {"rope.dimension_count": 16})),
}
HEAD_DIMS = {"llama": 16, "qwen2": 16, "phi3": 16, "smollm3": 16}
"""Of the tiny models; 32 in others."""


def metadata_of(config: Any, file: File) -> dict[str, Any]:
    """What the converter writes, with the architecture's prefix."""
    own = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": HEAD_DIMS.get(file.architecture, 32),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    prefixed = {f"{file.architecture}.{key}": value for key, value in (own | file.metadata).items()}
    tokens = [f"t{index}" for index in range(SIZES["vocab_size"])]
    return prefixed | {"general.architecture": file.architecture, "tokenizer.ggml.tokens": tokens}


def converted(stored: Tensors, config: Any, file: File) -> dict[str, np.ndarray]:
    """Tensors as the converter renames and changes them; names are those of the gguf package."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found = {name: np.array(values, np.float32) for name, values in file.tensors.items()}
    for name, tensor in together(stored).items():
        if file.architecture in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        found[renamed] = np.ascontiguousarray(tensor.numpy())
    return found


def together(stored: Tensors) -> Tensors:
    """Experts of a layer as one tensor."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in stored.items():
        before, _, after = name.partition(".experts.")
        key = f"{before}.experts.{after.split('.', 1)[1]}" if after else name
        found.setdefault(key, []).append(tensor)
    return {name: torch.stack(tensors) if ".experts." in name else tensors[0] for name, tensors in found.items()}


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_computes_what_transformers_does(tmp_path: Path, write_gguf: Any, name: str) -> None:
    """Logits of a long text, cut and decoded, are transformers' within 1e-4 of their scale."""
    case, file = FILES[name]
    (tmp_path / "hf").mkdir()
    theirs = write(tmp_path / "hf", case, std=STD)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    path = write_gguf(metadata_of(theirs.config, file), converted(stored, theirs.config, file))
    config = EngineConfig(model=str(path), dtype="float32", memory=300 << 20, max_num_seqs=8)
    ours = Driver(open_device(config, progress=lambda what, part: None))
    tokens = text()
    expected = reference(theirs, tokens)
    assert (ours.logits(tokens, 70, singles=5) - expected).abs().max() < 1e-4 * expected.abs().max()
