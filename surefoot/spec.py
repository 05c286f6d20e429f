"""The model's numbers, read strictly out of its configuration (config.json or GGUF metadata)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from surefoot import gguf
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from surefoot.types import Value

T = TypeVar("T")
_DTYPES = ("float32", "float16", "bfloat16")
_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LLAMA = "LlamaForCausalLM"
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")
"""Tokens that end an assistant's turn, where a GGUF's chat template writes them: its metadata has room for one end."""


class ModelSpec(Value, frozen=True):
    """Everything about a network's shape; one of these decides layers, memory and cache.

    Rows of the vocabulary from `token_count` on are padding: they have weights, mean nothing and are never sampled.
    """

    architecture: str
    """The Hugging Face class name, such as LlamaForCausalLM: key of `model.registry`."""
    vocab_size: int
    token_count: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """Of the checkpoint: float32, float16, bfloat16 (a quantized GGUF counts as float32)."""

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must hold, by its Hugging Face name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = (hidden, queries)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, shape in attention.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = shape
            if spec.attention_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in mlp.items():
            shapes[f"{prefix}mlp.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint. Raises CheckpointError naming file and key for what is missing or not supported."""
    if checkpoint.kind == "gguf":
        return _read_gguf(gguf.read_header(checkpoint.path))
    return _read_hf(checkpoint.path)


class _Reader:
    """Typed reads of a mapping: a missing key without a default, or a value of another type, names file and key."""

    def __init__(self, where: Path, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def get(self, key: str, kind: type[T], *default: T) -> T:
        value = self.values.get(key)
        if value is None:
            if not default:
                raise self.error(f"the key {key!r} is missing")
            return default[0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is {value!r}; a value of type {kind.__name__} is needed")
        return value

    def size(self, key: str, *default: int) -> int:
        value = self.get(key, int, *default)
        if value <= 0:
            raise self.error(f"{key} is {value}; a positive number is needed")
        return value

    def positive(self, key: str, *default: float) -> float:
        value = self.get(key, float, *default)
        if not (0 < value < math.inf):
            raise self.error(f"{key} is {value}; a positive number is needed")
        return value

    def only(self, key: str, allowed: object, default: object) -> None:
        """Refuse a setting that changes the network into one that is not built here."""
        value = self.values.get(key, default)
        if value is not None and value != allowed:
            raise self.error(f"{key} is {value!r}; only {allowed!r} is supported")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise self.error(f"{key} is {value!r}; a token id or a list of them is needed")
        return tuple(ids)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}.")


def _checked(spec: ModelSpec, reader: _Reader) -> ModelSpec:
    """`spec`, if its numbers agree with each other."""
    if spec.num_heads % spec.num_kv_heads:
        raise reader.error(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads")
    if spec.head_dim % 2:
        raise reader.error(f"the head size is {spec.head_dim}; rotary embedding needs an even one")
    specials = [*spec.eos_token_ids, *(() if spec.bos_token_id is None else (spec.bos_token_id,))]
    if bad := [token for token in specials if token >= spec.vocab_size]:
        raise reader.error(f"special token {bad[0]} is outside of the vocabulary of {spec.vocab_size:,}")
    return spec


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: an object is needed, not {type(value).__name__}.")
    return value


def _read_hf(folder: Path) -> ModelSpec:
    config = _Reader(folder / "config.json", read_json(folder / "config.json"))
    architectures = config.get("architectures", list)
    if architectures != [_LLAMA]:
        raise config.error(f"architectures is {architectures}; supported is {_LLAMA}")
    config.only("hidden_act", "silu", "silu")
    config.only("mlp_bias", False, False)
    config.only("quantization_config", None, None)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    vocab_size = config.size("vocab_size")
    # Defaults are those that transformers documents for LlamaConfig.
    spec = ModelSpec(
        architecture=_LLAMA,
        vocab_size=vocab_size,
        token_count=min(vocab_size, _token_count(folder, vocab_size)),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", heads),
        head_dim=config.size("head_dim", hidden // heads),
        max_position=config.size("max_position_embeddings"),
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope_theta=_hf_rope_theta(config),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        attention_bias=config.get("attention_bias", bool, False),
        eos_token_ids=_hf_eos(folder, config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        dtype=_hf_dtype(config),
    )
    return _checked(spec, config)


def _hf_dtype(config: _Reader) -> str:
    """`dtype` since transformers 5, `torch_dtype` before; float32 where neither is there, as transformers has it."""
    dtype = config.get("dtype", str, config.get("torch_dtype", str, "float32"))
    if dtype not in _DTYPES:
        raise config.error(f"dtype is {dtype!r}; supported are {', '.join(_DTYPES)}")
    return dtype


def _hf_rope_theta(config: _Reader) -> float:
    """From `rope_parameters` (transformers 5) or from `rope_theta` beside `rope_scaling` (before)."""
    rope = config.get("rope_parameters", dict, {}) or config.get("rope_scaling", dict, {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise config.error(f"rope scaling {kind!r} is not supported yet; only plain rotary embedding is")
    nested = _Reader(config.where, rope)
    return nested.positive("rope_theta", config.positive("rope_theta", 10000.0))


def _hf_eos(folder: Path, config: _Reader) -> tuple[int, ...]:
    """Every token that ends a text, by config.json or by generation_config.json."""
    ids = config.token_ids("eos_token_id")
    path = folder / "generation_config.json"
    if path.exists():
        ids += _Reader(path, read_json(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _token_count(folder: Path, vocab_size: int) -> int:
    """One more than the largest id that the tokenizer knows; without a tokenizer every row counts."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return vocab_size
    values = read_json(path)
    try:
        vocab = values["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return max(ids + [token["id"] for token in values.get("added_tokens", ())]) + 1
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its vocabulary cannot be read: {error!r}") from error


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def _read_gguf(header: gguf.Header) -> ModelSpec:
    data = _Reader(header.path, header.metadata)
    architecture = data.get("general.architecture", str)
    if architecture != "llama":
        raise data.error(f"the architecture is {architecture!r}; supported is 'llama'")
    tensors = {info.name: info for info in header.tensors}
    _refuse_gguf_variants(data, tensors)
    if "token_embd.weight" not in tensors:
        raise data.error("the tensor token_embd.weight is missing")
    vocab_size = tensors["token_embd.weight"].shape[0]
    hidden, heads = data.size("llama.embedding_length"), data.size("llama.attention.head_count")
    head_dim = data.size("llama.attention.key_length", hidden // heads)
    data.only("llama.rope.dimension_count", head_dim, head_dim)
    # Defaults are those of the GGUF specification.
    spec = ModelSpec(
        architecture=_LLAMA,
        vocab_size=vocab_size,
        token_count=min(vocab_size, len(data.get("tokenizer.ggml.tokens", list))),
        hidden_size=hidden,
        intermediate_size=data.size("llama.feed_forward_length"),
        num_layers=data.size("llama.block_count"),
        num_heads=heads,
        num_kv_heads=data.size("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=data.size("llama.context_length"),
        rms_norm_eps=_shortest(data.positive("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=data.positive("llama.rope.freq_base", 10000.0),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        eos_token_ids=_gguf_eos(data),
        bos_token_id=next(iter(data.token_ids("tokenizer.ggml.bos_token_id")), None),
        dtype=_gguf_dtype(header),
    )
    return _checked(spec, data)


def _refuse_gguf_variants(data: _Reader, tensors: Mapping[str, gguf.TensorInfo]) -> None:
    scaling = data.get("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        kind = "llama3" if scaling == "none" else scaling
        raise data.error(f"rope scaling {kind!r} is not supported yet; only plain rotary embedding is")
    if experts := data.get("llama.expert_count", int, 0):
        raise data.error(f"a mixture of {experts} experts is not supported yet")
    if (parts := data.get("split.count", int, 1)) > 1:
        raise data.error(f"this is one of {parts} parts; merge them into one file (llama-gguf-split --merge)")


def _shortest(value: float) -> float:
    """The decimal number that was meant: metadata is float32, where 1e-05 reads back as 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _gguf_eos(data: _Reader) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [token for key in keys for token in data.token_ids(f"tokenizer.ggml.{key}")]
    template = data.get("tokenizer.chat_template", str, "")
    tokens = data.get("tokenizer.ggml.tokens", list)
    ids += [tokens.index(end) for end in END_OF_TURN if end in template and end in tokens]
    return tuple(dict.fromkeys(ids))


def _gguf_dtype(header: gguf.Header) -> str:
    """The type of the matrices; float32 where they are mixed or quantized, since they are dequantized to it."""
    kinds = {info.type for info in header.tensors if len(info.shape) > 1}
    return _GGUF_DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
