"""Reading a model's numbers, strictly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from surefoot.checkpoint import Checkpoint, find
from surefoot.errors import CheckpointError
from surefoot.ops.norm_rope import frequencies
from surefoot.spec import NO_DEFAULTS, ModelSpec, read_generation_defaults, read_spec, tensor_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def read(folder: Path, config: dict[str, Any], **files: Any) -> ModelSpec:
    """The spec of a directory with this config.json and other JSON files."""
    (folder / "config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return read_spec(Checkpoint(kind="hf", path=folder, name="tiny"))


def test_embedded_model() -> None:
    """The embedded GGUF is the SmolLM2-135M that its card describes."""
    spec = read_spec(find("smollm2"))
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("LlamaForCausalLM", 30, 9, 3)
    assert (spec.hidden_size, spec.head_dim, spec.intermediate_size) == (576, 64, 1536)
    assert (spec.vocab_size, spec.token_count, spec.max_position) == (49152, 49152, 8192)
    assert (spec.rms_norm_eps, spec.rope_theta, spec.dtype) == (1e-5, 100000.0, "float32")
    assert spec.tie_word_embeddings
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2,), 1)
    assert spec.parameters == 134_515_008


def test_config_json(tmp_path: Path) -> None:
    """Every number comes from config.json, and what Llama documents a default for may be absent."""
    spec = read(tmp_path, CONFIG)
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=96, token_count=96, hidden_size=32, intermediate_size=64,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False, attention_bias=False, eos_token_ids=(2,), bos_token_id=1,
        dtype="bfloat16",
    )  # fmt: skip
    bare = {key: value for key, value in CONFIG.items() if key not in ("num_key_value_heads", "rope_theta")}
    assert read(tmp_path, bare).num_kv_heads == 4
    assert read(tmp_path, bare).rope_theta == 10000.0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1000000},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_rope_theta_of_either_generation(tmp_path: Path, rope: dict[str, Any]) -> None:
    """rope_theta is read from its own key, and from rope_parameters as transformers 5 writes it."""
    config = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    assert read(tmp_path, config | rope).rope_theta == 1e6


def test_ends_of_text_are_united(tmp_path: Path) -> None:
    """End tokens of config.json and generation_config.json both count, single or in a list, each once."""
    assert read(tmp_path, CONFIG, generation_config={"eos_token_id": [2, 7, 9]}).eos_token_ids == (2, 7, 9)
    assert read(tmp_path, CONFIG | {"eos_token_id": None}, generation_config={}).eos_token_ids == ()


def test_rows_without_a_token_are_padding(tmp_path: Path) -> None:
    """token_count is what the tokenizer knows, added tokens included, and never more than there are rows."""
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 79, "content": "<x>"}]}
    assert read(tmp_path, CONFIG, tokenizer=tokenizer).token_count == 80
    tokenizer["added_tokens"] = [{"id": 200, "content": "<x>"}]
    assert read(tmp_path, CONFIG, tokenizer=tokenizer).token_count == 96
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its vocabulary"):
        read(tmp_path, CONFIG, tokenizer={"model": {}})


def test_generation_defaults(tmp_path: Path) -> None:
    """Sampling that generation_config.json recommends, by the names of requests; -1 is how top_k is off."""
    checkpoint = Checkpoint(kind="hf", path=tmp_path, name="tiny")
    assert read_generation_defaults(checkpoint) == NO_DEFAULTS
    written = {"do_sample": True, "temperature": 0.8, "top_p": 1, "top_k": -1, "max_new_tokens": 64, "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    wanted = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": 64}
    assert read_generation_defaults(checkpoint).given() == wanted
    assert read_generation_defaults(find("smollm2")) == NO_DEFAULTS


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": "1"}, {"repetition_penalty": 0}, {"max_new_tokens": 0}]
)
def test_generation_defaults_that_no_request_could_ask_for(tmp_path: Path, bad: dict[str, Any]) -> None:
    """A recommendation out of range is an error at start, not at each request."""
    (tmp_path / "generation_config.json").write_text(json.dumps(bad))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(bad))} is"):
        read_generation_defaults(Checkpoint(kind="hf", path=tmp_path, name="tiny"))


@pytest.mark.parametrize("key", ["architectures", "vocab_size", "hidden_size", "num_hidden_layers"])
def test_missing_key_is_named(tmp_path: Path, key: str) -> None:
    """A key without a documented default is not guessed."""
    with pytest.raises(CheckpointError, match=rf"config\.json: the key '{key}' is missing"):
        read(tmp_path, {name: value for name, value in CONFIG.items() if name != key})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": []}, r"architectures is \[\]"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 7}, "head size is 7"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "the key 'rope_scaling.low_freq_factor' is missing"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope scaling 'axial' is not"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, 96]}, "special token 96 is outside"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_unsupported_values_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """A value that is wrong, or that means another network, is an error naming the key; nothing is ignored."""
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, CONFIG | change)


def test_an_architecture_that_is_not_built_here(tmp_path: Path) -> None:
    """It is transformers' where that is installed, unless it is ours that is asked for; then the error lists ours."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["OlmoForCausalLM"]}))
    checkpoint = Checkpoint(kind="hf", path=tmp_path, name="tiny")
    spec = read_spec(checkpoint)
    assert (spec.implementation, spec.num_layers, spec.head_dim) == ("transformers", 2, 8)
    with pytest.raises(CheckpointError, match="supported are LlamaForCausalLM, "):
        read_spec(checkpoint, "surefoot")


def test_config_that_is_no_json(tmp_path: Path) -> None:
    """A damaged config.json is named."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_spec(Checkpoint(kind="hf", path=tmp_path, name="tiny"))


GGUF: dict[str, Any] = {
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.tokens": ["<s>", "<|im_end|>", "a", "<|eot_id|>"],
    "tokenizer.ggml.eos_token_id": 0,
}


def gguf_spec(write_gguf: Any, metadata: dict[str, Any], dtype: type = np.float32, **tensors: Any) -> ModelSpec:
    tensors = {"token_embd.weight": np.zeros((6, 32), dtype)} | {
        name.replace("__", "."): value for name, value in tensors.items()
    }
    return read_spec(Checkpoint(kind="gguf", path=write_gguf(metadata, tensors), name="tiny"))


def test_gguf_metadata(write_gguf: Any) -> None:
    """GGUF defaults are applied, padding rows and the type of the matrices come from the tensors."""
    spec = gguf_spec(write_gguf, GGUF, np.float16)
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta, spec.rms_norm_eps) == (4, 8, 10000.0, 1e-6)
    assert (spec.vocab_size, spec.token_count, spec.dtype) == (6, 4, "float16")
    assert spec.tie_word_embeddings
    assert not gguf_spec(write_gguf, GGUF, output__weight=np.zeros((6, 32), np.float32)).tie_word_embeddings


def test_gguf_turn_end_of_the_template_ends_a_text(write_gguf: Any) -> None:
    """An end-of-turn token that the chat template writes counts as an end beside the one in the metadata."""
    template = {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    assert gguf_spec(write_gguf, GGUF | template).eos_token_ids == (0, 1)
    assert gguf_spec(write_gguf, GGUF | {"tokenizer.ggml.eot_token_id": 3}).eos_token_ids == (0, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"general.architecture": "mamba"}, "architecture is 'mamba'"),
        ({"llama.rope.scaling.type": "axial"}, "rope scaling 'axial'"),
        ({"llama.rope.scaling.type": "yarn"}, r"the key 'llama\.rope\.scaling\.factor' is missing"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4"),
        ({"llama.block_count": "x"}, "llama.block_count is 'x'"),
    ],
)
def test_gguf_variants_are_refused(write_gguf: Any, change: dict[str, Any], said: str) -> None:
    """Another architecture, scaled rotary embedding, experts and split files are errors naming themselves."""
    with pytest.raises(CheckpointError, match=said):
        gguf_spec(write_gguf, GGUF | change)


def test_gguf_rope_factors(write_gguf: Any) -> None:
    """What a file with rope_freqs divides Llama 3's frequencies by is read out of that tensor."""
    divisors = np.array([1, 1, 3.5, 8], np.float32)
    rope = gguf_spec(write_gguf, GGUF, rope_freqs__weight=divisors).rope(0)
    assert rope is not None and rope.scaling is not None
    plain = frequencies(replace(rope, scaling=None), 128)
    assert torch.equal(frequencies(rope, 128), plain / torch.from_numpy(divisors))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is of type F16"):
        gguf_spec(write_gguf, GGUF, rope_freqs__weight=divisors.astype(np.float16))


def test_tensor_shapes_follow_the_spec(tmp_path: Path) -> None:
    """Tied embeddings leave lm_head out, attention biases are listed, and parameters is their sum."""
    spec = read(tmp_path, CONFIG | {"attention_bias": True})
    shapes = tensor_shapes(spec)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (16,)
    assert shapes["lm_head.weight"] == (96, 32)
    assert "lm_head.weight" not in tensor_shapes(read(tmp_path, CONFIG | {"tie_word_embeddings": True}))
    assert spec.parameters == sum(math.prod(shape) for shape in shapes.values())
