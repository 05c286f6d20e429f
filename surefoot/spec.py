"""The model's numbers, read strictly out of its configuration (config.json or GGUF metadata)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot import gguf
from surefoot.architecture import Experts, ModelSpec, Rope, RopeScaling, tensor_shapes
from surefoot.checkpoint import Checkpoint
from surefoot.families import checked, read_config
from surefoot.reading import Reader, read_json
from surefoot.types import Value

__all__ = [
    "END_OF_TURN",
    "Experts",
    "GenerationDefaults",
    "NO_DEFAULTS",
    "ModelSpec",
    "Rope",
    "RopeScaling",
    "read_generation_defaults",
    "read_json",
    "read_spec",
    "tensor_shapes",
]
_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")
"""Tokens that end an assistant's turn, where a GGUF's chat template writes them: its metadata has room for one end."""


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint. Raises CheckpointError naming file and key for what is missing or not supported."""
    if checkpoint.kind == "gguf":
        return _read_gguf(gguf.read_header(checkpoint.path))
    return read_config(checkpoint.path)


# ---- generation_config.json -----------------------------------------------------------------------------------------


class GenerationDefaults(Value, frozen=True):
    """Sampling that the model's makers recommend; None where they say nothing. Names are those of SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """What the makers do say."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NO_DEFAULTS = GenerationDefaults()


def read_generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """What generation_config.json recommends, as vLLM reads it: max_new_tokens counts, do_sample does not.

    A GGUF has no such file. Raises CheckpointError naming file and key for a value that no request could ask for.
    """
    path = checkpoint.path / "generation_config.json"
    if checkpoint.kind == "gguf" or not path.exists():
        return GenerationDefaults()
    config = Reader(path, read_json(path))
    top_k = config.between("top_k", -1, 2**31)
    return GenerationDefaults(
        temperature=config.between("temperature", 0, 100),
        top_p=config.between("top_p", 1e-6, 1),
        top_k=None if top_k is None else max(int(top_k), 0),
        min_p=config.between("min_p", 0, 1),
        repetition_penalty=config.between("repetition_penalty", 0.01, 100),
        max_tokens=config.size("max_new_tokens") if config.has("max_new_tokens") else None,
    )


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def _read_gguf(header: gguf.Header) -> ModelSpec:
    data = Reader(header.path, header.metadata)
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
        architecture="LlamaForCausalLM",
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
    return checked(spec, data)


def _refuse_gguf_variants(data: Reader, tensors: Mapping[str, gguf.TensorInfo]) -> None:
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


def _gguf_eos(data: Reader) -> tuple[int, ...]:
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
