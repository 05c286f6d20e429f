"""Checkpoints as every family's makers store them: written by transformers, or by renaming and fusing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.checkpoint import Checkpoint, find
from surefoot.errors import CheckpointError
from surefoot.model.layout import stored_names
from surefoot.model.weights import dummy, load
from surefoot.spec import ModelSpec, read_spec, tensor_shapes

transformers = pytest.importorskip("transformers")
Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": [2, 3], "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Qwen2": {"rope_parameters": YARN},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    },
    "Mistral": {"sliding_window": 24},
    "Phi3": {"sliding_window": 24},
    "Gemma2": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    "Gemma3": {"head_dim": 32, "sliding_window": 24, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Glm": {"head_dim": 32},
    "Glm4": {"head_dim": 32},
}  # fmt: skip


def write(folder: Path, family: str) -> Any:
    """A tiny random checkpoint of a family; returns the model."""
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**SIZES | FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder)
    return model


def read(folder: Path) -> tuple[ModelSpec, Tensors]:
    checkpoint = find(str(folder))
    spec = read_spec(checkpoint)
    return spec, dict(load(checkpoint, spec, dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_whole(tmp_path: Path, family: str) -> None:
    """Every tensor that transformers saves is needed and found, and pieces stacked again are what was stored."""
    model = write(tmp_path, family)
    spec, found = read(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == tensor_shapes(spec)
    stored = load_file(tmp_path / "model.safetensors")
    names = stored_names(spec)
    assert stored.keys() == names.keys()
    for name, pieces in names.items():
        assert torch.equal(torch.cat([found[piece] for piece in pieces]), stored[name]), name
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spec.eos_token_ids == (2, 3)


CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "auto_map": {"AutoModel": "x.ChatGLMModel"},
    "padded_vocab_size": 96, "hidden_size": 64, "ffn_hidden_size": 48, "num_layers": 3, "num_attention_heads": 4,
    "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 32, "seq_length": 256,
    "layernorm_epsilon": 1.5625e-07, "rope_ratio": 500, "original_rope": True, "add_qkv_bias": True,
    "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "tie_word_embeddings": False,
    "apply_residual_connection_post_layernorm": False, "torch_dtype": "bfloat16", "eos_token_id": [2, 3],
}  # fmt: skip
RENAMED = {
    "model.embed_tokens.": "transformer.embedding.word_embeddings.", "model.layers.": "transformer.encoder.layers.",
    "model.norm.": "transformer.encoder.final_layernorm.", "lm_head.": "transformer.output_layer.",
    "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def chatglm(stored: Tensors) -> Tensors:
    """A GlmForCausalLM checkpoint under ChatGLM's names, with q, k and v as one."""
    found: Tensors = {"transformer.rotary_pos_emb.inv_freq": torch.ones(8)}
    for name, tensor in stored.items():
        for glm, theirs in RENAMED.items():
            name = name.replace(glm, theirs)
        if ".q_proj" in name:
            parts = [stored[f"model{name.removeprefix('transformer.encoder').replace('q_proj', p)}"] for p in
                     ("q_proj", "k_proj", "v_proj")]  # fmt: skip
            name, tensor = name.replace("self_attn.q_proj", "self_attention.query_key_value"), torch.cat(parts)
        if "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor.contiguous()
    return found


@pytest.mark.slow
def test_chatglm_is_glm_under_other_names(tmp_path: Path) -> None:
    """A ChatGLM checkpoint of several files gives the tensors and the numbers of the GLM one it was made of."""
    (tmp_path / "glm").mkdir()
    (tmp_path / "chatglm").mkdir()
    write(tmp_path / "glm", "Glm")
    wanted_spec, wanted = read(tmp_path / "glm")
    tensors = chatglm(load_file(tmp_path / "glm" / "model.safetensors"))
    folder, names = tmp_path / "chatglm", list(tensors)
    weight_map = {name: f"model-{1 + at % 3}-of-3.safetensors" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CHATGLM))
    spec, found = read(folder)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    same = {name: getattr(spec, name) for name in spec.__struct_fields__}
    differs = {name for name, value in same.items() if value != getattr(wanted_spec, name)}
    assert differs == {"layout", "rope_theta", "dtype", "bos_token_id"}
    assert (spec.layout, spec.rope_theta, spec.dtype) == ("chatglm", 5e6, "bfloat16")


def test_a_fused_tensor_of_another_height_is_named(tmp_path: Path) -> None:
    """The error names the tensor as the file does, with both shapes."""
    (tmp_path / "config.json").write_text(json.dumps(CHATGLM))
    checkpoint_spec = read_spec_of(tmp_path)
    parts = dict(dummy(checkpoint_spec, dtype=torch.float32))
    tensors = {
        name: torch.cat([parts[piece] for piece in pieces]) for name, pieces in stored_names(checkpoint_spec).items()
    }
    name = "transformer.encoder.layers.1.self_attention.query_key_value.weight"
    tensors[name] = torch.ones(255, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[255, 64\].*\[256, 64\]"):
        read(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"incomplete: tensor {name} is missing"):
        read(tmp_path)


def read_spec_of(folder: Path) -> ModelSpec:
    return read_spec(Checkpoint(kind="hf", path=folder, name="tiny"))


@pytest.mark.slow
def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """Gemma 3 with vision: the text part is read from either generation's names, the rest is left alone."""
    write(tmp_path, "Gemma3")
    _, wanted = read(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [2, 3], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    stored = load_file(tmp_path / "model.safetensors")
    for before, after in (("model.", "language_model.model."), ("model.", "model.language_model.")):
        renamed = {after + name.removeprefix(before): tensor for name, tensor in stored.items()}
        renamed["vision_tower.x.weight"] = torch.ones(2)
        save_file(renamed, tmp_path / "model.safetensors")
        spec, found = read(tmp_path)
        assert spec.architecture == "Gemma3ForCausalLM"
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
