"""GGUF metadata → ModelSpec: llama.cpp's names and constants, an entry for each architecture.

What llama.cpp knows of an architecture without it being in the file is written here: who norms what it adds, who has
windows where. Its converter changes some tensors, too: a Gemma's norms come with their 1 added; the rows of q and k of
Llama and SmolLM3 lie in another order, which `model.weights` puts back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from surefoot import gguf
from surefoot.architecture import GEMMA_NORMS, GLM4_NORMS, Experts, ModelSpec, RopeScaling
from surefoot.families import checked
from surefoot.reading import Reader

Fields = dict[str, Any]
"""Fields of ModelSpec."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|user|>", "<|observation|>")
"""Tokens that end an assistant's turn, where a GGUF's chat template writes them: its metadata has room for one end."""


class _File(NamedTuple):
    """What families read: metadata below the architecture's name, and tensors by name."""

    own: Reader
    header: gguf.Header
    tensors: Mapping[str, gguf.TensorInfo]


def read_gguf(header: gguf.Header) -> ModelSpec:
    """The spec of a GGUF file. Raises CheckpointError naming file and key for what is missing or not supported."""
    data = Reader(header.path, header.metadata)
    architecture = data.get("general.architecture", str)
    if architecture not in FAMILIES:
        supported = ", ".join(map(repr, FAMILIES))
        raise data.error(f"the architecture is {architecture!r}; supported are {supported}")
    if (parts := data.get("split.count", int, 1)) > 1:
        raise data.error(f"this is one of {parts} parts; merge them into one file (llama-gguf-split --merge)")
    start = f"{architecture}."
    own = {key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)}
    file = _File(Reader(header.path, own, start), header, {info.name: info for info in header.tensors})
    if "token_embd.weight" not in file.tensors:
        raise data.error("the tensor token_embd.weight is missing")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    fields: Fields = {
        "vocab_size": vocab_size,
        "token_count": min(vocab_size, len(data.get("tokenizer.ggml.tokens", list))),
        "eos_token_ids": _ends(data),
        "bos_token_id": next(iter(data.token_ids("tokenizer.ggml.bos_token_id")), None),
        "dtype": _dtype(header),
    }
    return checked(ModelSpec(**fields | FAMILIES[architecture](file)), data)


# ---- families -------------------------------------------------------------------------------------------------------


def _llama(file: _File) -> Fields:
    if experts := file.own.get("expert_count", int, 0):
        raise file.own.error(f"a mixture of {experts} experts is not supported yet")
    return _whole_heads(file) | {"architecture": "LlamaForCausalLM"}


def _smollm3(file: _File) -> Fields:
    fields = _whole_heads(file)
    unrotated = tuple(range(3, fields["num_layers"], 4))
    return fields | {"architecture": "SmolLM3ForCausalLM", "unrotated_layers": unrotated}


def _qwen2(file: _File) -> Fields:
    return _whole_heads(file) | {"architecture": "Qwen2ForCausalLM"}


def _qwen3(file: _File) -> Fields:
    return _whole_heads(file) | {"architecture": "Qwen3ForCausalLM", "qk_norm": True}


def _qwen3_moe(file: _File) -> Fields:
    own, fields = file.own, _whole_heads(file)
    count, asked = own.size("expert_count"), own.size("expert_used_count")
    if asked > count:
        raise own.error(f"expert_used_count is {asked}, but there are {count} experts")
    inner, layers = own.size("expert_feed_forward_length"), tuple(range(fields["num_layers"]))
    experts = Experts(count=count, per_token=asked, intermediate_size=inner, normalize=True, layers=layers)
    return fields | {"architecture": "Qwen3MoeForCausalLM", "qk_norm": True, "experts": experts}


def _gemma(file: _File) -> Fields:
    fields = _whole_heads(file) | {"architecture": "GemmaForCausalLM"}
    return fields | {"activation": "gelu_tanh", "embedding_scale": math.sqrt(fields["hidden_size"])}


def _gemma2(file: _File) -> Fields:
    fields = _gemma(file) | {"architecture": "Gemma2ForCausalLM", "norms": GEMMA_NORMS}
    return (
        fields
        | _gemma_scale(fields, largest=46)
        | _windows(file, [layer % 2 == 0 for layer in range(fields["num_layers"])])
        | {
            "attention_softcap": file.own.positive("attn_logit_softcapping", 50.0),
            "logit_softcap": file.own.positive("final_logit_softcapping", 30.0),
        }
    )


def _gemma3(file: _File) -> Fields:
    fields = _gemma(file) | {"architecture": "Gemma3ForCausalLM", "norms": GEMMA_NORMS, "qk_norm": True}
    fields["logit_softcap"] = file.own.optional_positive("final_logit_softcapping", None)
    fields["local_rope_theta"] = file.own.positive("rope.freq_base_swa", 1e4)
    windows = [(layer + 1) % 6 != 0 for layer in range(fields["num_layers"])]
    return fields | _gemma_scale(fields, largest=62) | _windows(file, windows)


def _phi3(file: _File) -> Fields:
    fields = _heads(file) | {"architecture": "Phi3ForCausalLM", "layout": "fused"}
    return fields | _windows(file, [True] * fields["num_layers"])


def _chatglm(file: _File) -> Fields:
    layout = "fused" if "blk.0.attn_qkv.weight" in file.tensors else "gate_up"
    return _heads(file) | {"architecture": "GlmForCausalLM", "layout": layout, "rope_interleaved": True}


def _glm4(file: _File) -> Fields:
    return _chatglm(file) | {"architecture": "Glm4ForCausalLM", "norms": GLM4_NORMS}


FAMILIES: Mapping[str, Callable[[_File], Fields]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "chatglm": _chatglm,
    "glm4": _glm4,
}


# ---- what families share --------------------------------------------------------------------------------------------


def _heads(file: _File) -> Fields:
    """Sizes and rotary embedding; defaults are those of the GGUF specification."""
    own, tensors = file.own, file.tensors
    hidden, heads = own.size("embedding_length"), own.size("attention.head_count")
    head_dim = own.size("attention.key_length", hidden // heads)
    own.only("attention.value_length", head_dim, head_dim)
    turned = own.size("rope.dimension_count", head_dim)
    length = own.size("context_length")
    scaling = _scaling(file, length)
    if scaling is not None and scaling.kind == "yarn":
        length = max(length, int(scaling.original_max_position * scaling.factor))
    return {
        "hidden_size": hidden,
        "intermediate_size": own.size("feed_forward_length"),
        "num_layers": own.size("block_count"),
        "num_heads": heads,
        "num_kv_heads": own.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position": length,
        "rms_norm_eps": _shortest(own.positive("attention.layer_norm_rms_epsilon")),
        "rope_theta": own.positive("rope.freq_base", 10000.0),
        "rope_scaling": scaling,
        "rotary_dim": None if turned == head_dim else turned,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
    }


def _whole_heads(file: _File) -> Fields:
    fields = _heads(file)
    file.own.only("rope.dimension_count", fields["head_dim"], fields["head_dim"])
    return fields


def _gemma_scale(fields: Fields, *, largest: int) -> Fields:
    """Scores of the largest model of a generation, known by its layers, are divided by the root of hidden / heads."""
    share = fields["hidden_size"] / fields["num_heads"] if fields["num_layers"] == largest else fields["head_dim"]
    return {"query_scalar": float(share)}


def _windows(file: _File, local: list[bool]) -> Fields:
    """Layers with a window: `local` by default, or as the file says, by a pattern's length or layer by layer."""
    key = "attention.sliding_window"
    if not file.own.get(key, int, 0):
        return {}
    pattern = file.own.values.get(f"{key}_pattern")
    if isinstance(pattern, list):
        local = [bool(each) for each in pattern]
    elif pattern is not None:
        every = file.own.size(f"{key}_pattern")
        local = [(layer + 1) % every != 0 for layer in range(len(local))]
    return {"sliding_window": file.own.size(key), "window_layers": tuple(at for at, each in enumerate(local) if each)}


def _scaling(file: _File, length: int) -> RopeScaling | None:
    """How rotary frequencies are stretched: by divisors in a tensor of their own, or by a rule of the metadata."""
    own, tensors = file.own, file.tensors
    original = own.size("rope.scaling.original_context_length", length)
    kind = own.get("rope.scaling.type", str, "none")
    if "rope_factors_long.weight" in tensors:
        usual = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
        short, long = (gguf.floats(file.header, f"rope_factors_{each}.weight") for each in ("short", "long"))
        factor = own.positive("rope.scaling.attn_factor", usual)
        return _divided(short, long, original, factor)
    if "rope_freqs.weight" in tensors:  # Llama 3's rule, worked out by the converter
        divisors = gguf.floats(file.header, "rope_freqs.weight")
        return _divided(divisors, divisors, length, 1.0)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise own.error(f"rope scaling {kind!r} is not supported; supported are none, linear, yarn and longrope")
    factor = own.positive("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, original_max_position=length)
    usual = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=usual * own.positive("rope.scaling.attn_factor", 1.0),
    )


def _divided(short: tuple[float, ...], long: tuple[float, ...], original: int, length: float) -> RopeScaling:
    return RopeScaling(
        kind="longrope",
        factor=1.0,
        original_max_position=original,
        attention_factor=length,
        short_factor=short,
        long_factor=long,
    )


def _shortest(value: float) -> float:
    """The decimal number that was meant: metadata is float32, where 1e-05 reads back as 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _ends(data: Reader) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [token for key in keys for token in data.token_ids(f"tokenizer.ggml.{key}")]
    template = data.get("tokenizer.chat_template", str, "")
    tokens = data.get("tokenizer.ggml.tokens", list)
    ids += [tokens.index(end) for end in END_OF_TURN if end in template and end in tokens]
    return tuple(dict.fromkeys(ids))


def _dtype(header: gguf.Header) -> str:
    """The type of the matrices; float32 where they are mixed or quantized, since they are dequantized to it."""
    kinds = {info.type for info in header.tensors if len(info.shape) > 1}
    return _DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
