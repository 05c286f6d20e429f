"""Tiny random checkpoints of every family, written by transformers, or renamed and fused as ChatGLM has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A class of transformers, without its suffix, and what its configuration says beside `SIZES`."""

    family: str
    config: dict[str, Any]


SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": [2, 3], "bos_token_id": 1,
    "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
WINDOW = {"sliding_window": 24}


def _rope(kind: str, theta: float = 1e4, **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


CASES: dict[str, Case] = {
    "llama-2": Case("Llama", {"attention_bias": True}),
    "llama-3": Case("Llama", _rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                   original_max_position_embeddings=64)),
    "llama-linear": Case("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": Case("Llama", _rope("dynamic", factor=4.0)),
    "llama-yarn": Case("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True}),
    "qwen-2": Case("Qwen2", _rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=64)),
    "qwen-2-window": Case("Qwen2", {"use_sliding_window": True, "max_window_layers": 1} | WINDOW),
    "qwen-3": Case("Qwen3", {"head_dim": 32}),
    "qwen-3-moe": Case("Qwen3Moe", {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    }),
    "qwen-3-moe-sparse": Case("Qwen3Moe", {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "decoder_sparse_step": 2, "norm_topk_prob": False,
    }),
    "mistral": Case("Mistral", WINDOW),
    "mistral-long-window": Case("Mistral", {"sliding_window": 150}),
    "phi-3": Case("Phi3", WINDOW),
    "phi-3-partial": Case("Phi3", _rope("default", partial_rotary_factor=0.5)),
    "phi-3-longrope": Case("Phi3", {"original_max_position_embeddings": 64} | _rope(
        "longrope", short_factor=[1.0 + at / 8 for at in range(8)], long_factor=[1.0 + at / 2 for at in range(8)],
        original_max_position_embeddings=64)),
    "gemma": Case("Gemma", {"head_dim": 32}),
    "gemma-2": Case("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24} | WINDOW),
    "gemma-3": Case("Gemma3", {"head_dim": 32, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]} | WINDOW),
    "smollm-3": Case("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "glm": Case("Glm", {"head_dim": 32} | _rope("default", 5e6, partial_rotary_factor=0.5)),
    "glm-4": Case("Glm4", {"head_dim": 32}),
}  # fmt: skip


def write(folder: Path, case: Case, *, std: float = 0.02, **saving: Any) -> Any:
    """A tiny random checkpoint, its weights off their usual start by `std`; returns the model."""
    name = "Gemma3TextConfig" if case.family == "Gemma3" else f"{case.family}Config"
    config = getattr(transformers, name)(**SIZES | case.config)
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * std
    model.save_pretrained(folder, **saving)
    return model


CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "auto_map": {"AutoModel": "x.ChatGLMModel"},
    "padded_vocab_size": 96, "hidden_size": 64, "ffn_hidden_size": 48, "num_layers": 3, "num_attention_heads": 4,
    "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 32, "seq_length": 256,
    "layernorm_epsilon": 1.5625e-07, "rope_ratio": 500, "original_rope": True, "add_qkv_bias": True,
    "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "tie_word_embeddings": False,
    "apply_residual_connection_post_layernorm": False, "torch_dtype": "bfloat16", "eos_token_id": [2, 3],
}  # fmt: skip
_RENAMED = {
    "model.embed_tokens.": "transformer.embedding.word_embeddings.", "model.layers.": "transformer.encoder.layers.",
    "model.norm.": "transformer.encoder.final_layernorm.", "lm_head.": "transformer.output_layer.",
    "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def _as_chatglm(stored: Tensors) -> Tensors:
    """A GlmForCausalLM checkpoint under ChatGLM's names, with q, k and v as one."""
    found: Tensors = {"transformer.rotary_pos_emb.inv_freq": torch.ones(8)}
    for name, tensor in stored.items():
        for glm, theirs in _RENAMED.items():
            name = name.replace(glm, theirs)
        if ".q_proj" in name:
            parts = [stored[f"model{name.removeprefix('transformer.encoder').replace('q_proj', p)}"] for p in
                     ("q_proj", "k_proj", "v_proj")]  # fmt: skip
            name, tensor = name.replace("self_attn.q_proj", "self_attention.query_key_value"), torch.cat(parts)
        if "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor.contiguous()
    return found


def write_chatglm(folder: Path, glm: Path) -> None:
    """The checkpoint of case "glm" in `glm`, as a ChatGLM one of three files."""
    tensors = _as_chatglm(load_file(glm / "model.safetensors"))
    weight_map = {name: f"model-{1 + at % 3}-of-3.safetensors" for at, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CHATGLM))
