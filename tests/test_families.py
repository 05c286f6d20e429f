"""config.json of every family, as it is published, and what transformers computes from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from surefoot.spec import Experts, ModelSpec, Rope, read_spec

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False, "ffn_hidden_size": 13696, "hidden_size": 4096,
    "kv_channels": 128, "layernorm_epsilon": 1.5625e-07, "multi_query_attention": True, "multi_query_group_num": 2,
    "num_attention_heads": 32, "num_layers": 40, "original_rope": True, "padded_vocab_size": 151552,
    "post_layer_norm": True, "rmsnorm": True, "rope_ratio": 500, "seq_length": 131072, "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "torch_dtype": "bfloat16", "vocab_size": 151552,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def read(folder: Path, config: dict[str, Any], **files: Any) -> ModelSpec:
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return read_spec(Checkpoint(kind="hf", path=folder, name="tiny"))


def family(folder: Path, architecture: str, **more: Any) -> ModelSpec:
    return read(folder, BASE | {"architectures": [f"{architecture}ForCausalLM"]} | more)


# ---- GLM


def test_glm_4_9b_chat(tmp_path: Path) -> None:
    """The published glm-4-9b-chat has the parameters, rotary base, bias and three ends that its makers state."""
    spec = read(tmp_path, CHATGLM)
    assert spec.parameters == 9_399_951_360
    assert (spec.architecture, spec.layout, spec.max_position) == ("GlmForCausalLM", "chatglm", 131072)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (40, 32, 2, 128)
    assert (spec.attention_bias, spec.output_bias, spec.tie_word_embeddings) == (True, False, False)
    assert spec.rope(0) == Rope(theta=5e6, dim=64, interleaved=True, scaling=None)
    assert spec.eos_token_ids == (151329, 151336, 151338)


def test_glm_4_9b_chat_1m(tmp_path: Path) -> None:
    """The one with a million tokens of context has four key-value heads and a base of 1e8."""
    spec = read(tmp_path, CHATGLM | {"multi_query_group_num": 4, "rope_ratio": 10000, "seq_length": 1048576})
    assert (spec.parameters, spec.rope_theta, spec.max_position) == (9_483_857_920, 1e8, 1048576)


def test_chatglm_ends_of_both_files(tmp_path: Path) -> None:
    """Ends in generation_config.json count where config.json names only one."""
    spec = read(tmp_path, CHATGLM | {"eos_token_id": 151329}, generation_config={"eos_token_id": [151336, 151338]})
    assert spec.eos_token_ids == (151329, 151336, 151338)


def test_chatglm_padding_rows(tmp_path: Path) -> None:
    """Rows from the last special token on are padding; without a tokenizer every row counts."""
    added = {str(token): {"content": f"<{token}>"} for token in range(151329, 151343)}
    (tmp_path / "tokenizer.model").write_bytes(b"")
    tokenizer = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added}
    assert read(tmp_path, CHATGLM, tokenizer_config=tokenizer).token_count == 151343
    assert read(tmp_path, CHATGLM, tokenizer_config={"tokenizer_class": "Other"}).token_count == 151552


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "ffn_hidden_size", "num_layers", "kv_channels", "seq_length", "layernorm_epsilon",
     "multi_query_group_num", "add_qkv_bias"],
)  # fmt: skip
def test_chatglm_guesses_nothing(tmp_path: Path, key: str) -> None:
    """A key that the remote code's configuration must hold is an error naming it."""
    with pytest.raises(CheckpointError, match=rf"config\.json: the key '{key}' is missing"):
        read(tmp_path, {name: value for name, value in CHATGLM.items() if name != key})


@pytest.mark.parametrize(
    "change",
    [{"multi_query_attention": False}, {"rmsnorm": False}, {"add_bias_linear": True}, {"post_layer_norm": False},
     {"apply_residual_connection_post_layernorm": True}, {"vision_config": {"layers": 1}}],
)  # fmt: skip
def test_other_chatglm_networks_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """A setting that makes another network of it is an error naming the setting."""
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read(tmp_path, CHATGLM | change)


def test_glm_4_0414(tmp_path: Path) -> None:
    """Glm4 norms what attention and the MLP give, too; its base and epsilon are in config.json."""
    spec = family(tmp_path, "Glm4", head_dim=16, partial_rotary_factor=0.5, rope_theta=10000.0, eos_token_id=[2, 3])
    assert len(spec.norms) == 4
    assert spec.rope(3) == Rope(theta=10000.0, dim=8, interleaved=True, scaling=None)
    assert (spec.rms_norm_eps, spec.layout, spec.attention_bias) == (1e-5, "gate_up", True)


# ---- kin


def test_qwen(tmp_path: Path) -> None:
    """Qwen2 has biases below attention only; Qwen3 norms queries and keys instead, with heads of 128."""
    two, three = family(tmp_path, "Qwen2"), family(tmp_path, "Qwen3")
    assert (two.attention_bias, two.output_bias, two.qk_norm, two.head_dim) == (True, False, False, 16)
    assert (three.attention_bias, three.output_bias, three.qk_norm, three.head_dim) == (False, False, True, 128)
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    assert [family(tmp_path, "Qwen2", **windows).window(layer) for layer in range(4)] == [None, None, None, 32]
    assert family(tmp_path, "Qwen2", sliding_window=32, max_window_layers=3).window(3) is None


def test_qwen3_moe(tmp_path: Path) -> None:
    """Layers have experts by step, but for those listed as plain."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    spec = family(tmp_path, "Qwen3Moe", **sizes, decoder_sparse_step=2, mlp_only_layers=[3])
    assert spec.experts == Experts(count=8, per_token=2, intermediate_size=24, normalize=True, layers=(1,))
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 9, but there are 8"):
        family(tmp_path, "Qwen3Moe", **sizes | {"num_experts_per_tok": 9})


def test_windows_that_are_off_by_null(tmp_path: Path) -> None:
    """Mistral's window has a default where the key is absent, and none where it is null."""
    assert family(tmp_path, "Mistral").window(0) == 4096
    assert family(tmp_path, "Mistral", sliding_window=None).window(0) is None
    assert family(tmp_path, "Phi3").window(0) is None


def test_gemma(tmp_path: Path) -> None:
    """Gemma's offsets, scales and caps; Gemma 3's two rotary bases by kind of layer."""
    two = family(tmp_path, "Gemma2", head_dim=32, query_pre_attn_scalar=144, hidden_activation="gelu_pytorch_tanh")
    assert (two.attention_softcap, two.logit_softcap, two.activation) == (50.0, 30.0, "gelu_tanh")
    assert (two.norm_offset, two.embedding_scale, two.attention_scale) == (1.0, 8.0, 1 / 12)
    assert [two.window(layer) for layer in range(4)] == [4096, None, 4096, None]
    assert two.tie_word_embeddings
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2}
    three = family(tmp_path, "Gemma3", **scaling, sliding_window=512, rope_theta=1e6, rope_local_base_freq=1e4)
    assert [three.window(layer) for layer in range(4)] == [512, None, 512, None]
    assert three.rope(0) == Rope(theta=1e4, dim=256, interleaved=False, scaling=None)
    rope = three.rope(1)
    assert rope is not None and rope.scaling is not None
    assert (rope.theta, rope.scaling.kind, rope.scaling.factor) == (1e6, "linear", 8.0)
    assert (three.attention_softcap, three.logit_softcap, three.qk_norm) == (None, None, True)


def test_gemma_that_embeds_texts_is_refused(tmp_path: Path) -> None:
    """Attention to both sides makes no generator of it."""
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        family(tmp_path, "Gemma3", use_bidirectional_attention=True)


def test_smollm3(tmp_path: Path) -> None:
    """Layers without rotary embedding, by list or by interval."""
    assert [family(tmp_path, "SmolLM3").rope(layer) is None for layer in range(4)] == [False, False, False, True]
    listed = family(tmp_path, "SmolLM3", no_rope_layers=[0, 1, 1, 1])
    assert listed.unrotated_layers == (0,)
    with pytest.raises(CheckpointError, match="no_rope_layers has 2 entries for 4 layers"):
        family(tmp_path, "SmolLM3", no_rope_layers=[1, 1])


def test_unknown_architecture(tmp_path: Path) -> None:
    """The error lists what there is."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"\['MambaForCausalLM'\]; supported are LlamaForCausalLM, Qwen2"):
        read_spec(Checkpoint(kind="hf", path=tmp_path, name="tiny"), "surefoot")


# ---- rotary scaling


def scaling_of(spec: ModelSpec) -> Any:
    rope = spec.rope(0)
    assert rope is not None and rope.scaling is not None
    return rope.scaling


def test_llama3_scaling(tmp_path: Path) -> None:
    """Llama 3.1's numbers, from `rope_scaling` and from `rope_parameters` alike."""
    old = family(tmp_path, "Llama", rope_theta=5e5, rope_scaling=LLAMA3)
    new = family(tmp_path, "Llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert old == new
    scaling = scaling_of(old)
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("llama3", 8.0, 64)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)


def test_yarn_scaling(tmp_path: Path) -> None:
    """Yarn's documented defaults, and a context of the original one times the factor."""
    spec = family(tmp_path, "Qwen2", rope_scaling={"type": "yarn", "factor": 4.0})
    scaling = scaling_of(spec)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (scaling.original_max_position, spec.max_position) == (256, 1024)


def test_longrope_scaling(tmp_path: Path) -> None:
    """Phi-3's factors for short and for long texts, and the scale of attention that goes with their ratio."""
    rope = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2] * 6}
    spec = family(tmp_path, "Phi3", rope_scaling=rope, original_max_position_embeddings=64, partial_rotary_factor=0.75)
    scaling = scaling_of(spec)
    assert (scaling.kind, scaling.short_factor, scaling.long_factor) == ("longrope", (1.0,) * 6, (2.0,) * 6)
    assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert (spec.rotary_dim, spec.max_position, spec.layout) == (12, 256, "fused")


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear"}, "'rope_scaling.factor' is missing"),
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor is 0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'rope_scaling.high_freq_factor' is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'rope_scaling.long_factor' is missing"),
        ({"rope_type": "longrope", "short_factor": ["a"], "long_factor": [1.0]}, "short_factor is 'a'"),
        ({"rope_type": "proportional"}, "'proportional' is not supported; supported are linear"),
        ({"partial_rotary_factor": 0.5}, "heads of this architecture turn whole"),
    ],
)
def test_scaling_that_is_incomplete(tmp_path: Path, rope: dict[str, Any], said: str) -> None:
    """What is missing, wrong or not built is named."""
    with pytest.raises(CheckpointError, match=said):
        family(tmp_path, "Llama", rope_scaling=rope)
