"""config.json → ModelSpec, a function for each family. Defaults are those that transformers documents for its class.

Anything that changes the network and is not built here is refused; a key that only training reads is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from surefoot.architecture import GEMMA_NORMS, GLM4_NORMS, PRE_NORMS, Experts, ModelSpec, RopeScaling
from surefoot.quantized import read_packing
from surefoot.reading import Reader, read_json, token_count

Fields = dict[str, Any]
"""Fields of ModelSpec."""
_DTYPES = ("float32", "float16", "bfloat16")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu")
_CHATGLM = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
_GLM = ("GlmForCausalLM", "Glm4ForCausalLM")
_WRAPPED = "Gemma3ForConditionalGeneration"
_GLM4_ENDS = (151329, 151336, 151338)
_ROPE_KINDS: Mapping[str, Literal["linear", "dynamic", "llama3", "yarn", "longrope"]] = {
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def read_config(folder: Path) -> ModelSpec:
    """The spec of a Hugging Face directory. Raises CheckpointError naming file and key."""
    config = Reader(folder / "config.json", read_json(folder / "config.json"))
    name = architecture(config)
    if name not in FAMILIES:
        raise config.error(f"architectures is {config.values['architectures']}; supported are {', '.join(FAMILIES)}")
    packing = read_packing(config)
    if name == _WRAPPED:
        config = _gemma3_text(config)
    fields: Fields = {"architecture": name, "wrapped": name == _WRAPPED, "packing": packing} | FAMILIES[name](config)
    return completed(folder, config, fields, _GLM4_ENDS if name in _GLM else ())


def architecture(config: Reader) -> str:
    """The one class that config.json names, or nothing."""
    names = config.get("architectures", list)
    return str(names[0]) if len(names) == 1 else ""


def completed(folder: Path, config: Reader, fields: Fields, ends: tuple[int, ...]) -> ModelSpec:
    """The spec of `fields` and of what all families share; `ends` are the class's own ends of a text."""
    count = token_count(folder) or fields["vocab_size"]
    shared: Fields = {
        "dtype": _dtype(config),
        "eos_token_ids": _eos(folder, config, ends),
        "bos_token_id": next(iter(config.token_ids("bos_token_id")), None),
        "token_count": min(fields["vocab_size"], count),
    }
    return checked(ModelSpec(**shared | fields), config)


def checked(spec: ModelSpec, reader: Reader) -> ModelSpec:
    """`spec`, if its numbers agree with each other; `reader` names the file."""
    if spec.num_heads % spec.num_kv_heads:
        raise reader.error(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads")
    if spec.head_dim % 2:
        raise reader.error(f"the head size is {spec.head_dim}; rotary embedding needs an even one")
    if spec.rotary_dim is not None and (spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= spec.head_dim):
        raise reader.error(f"{spec.rotary_dim} elements of a head of {spec.head_dim} cannot turn in pairs")
    specials = [*spec.eos_token_ids, *(() if spec.bos_token_id is None else (spec.bos_token_id,))]
    if bad := [token for token in specials if token >= spec.vocab_size]:
        raise reader.error(f"special token {bad[0]} is outside of the vocabulary of {spec.vocab_size:,}")
    return spec


# ---- families -------------------------------------------------------------------------------------------------------


def _llama(config: Reader) -> Fields:
    config.only("mlp_bias", False, False)
    bias = config.get("attention_bias", bool, False)
    return _transformer(config) | _rope(config) | {"attention_bias": bias, "output_bias": bias}


def _qwen2(config: Reader) -> Fields:
    return _transformer(config) | _rope(config) | _upper_windows(config) | {"attention_bias": True}


def _qwen3(config: Reader) -> Fields:
    fields = _transformer(config, head_dim=128) | _rope(config) | _upper_windows(config)
    bias = config.get("attention_bias", bool, False)
    return fields | {"attention_bias": bias, "output_bias": bias, "qk_norm": True}


def _qwen3_moe(config: Reader) -> Fields:
    fields = _transformer(config) | _rope(config)
    bias = config.get("attention_bias", bool, False)
    fields |= {"attention_bias": bias, "output_bias": bias, "qk_norm": True}
    window = config.optional_size("sliding_window", 4096) if config.get("use_sliding_window", bool, False) else None
    fields |= _windows(window, range(fields["num_layers"]))
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers", list, [])
    count = config.size("num_experts", config.size("num_local_experts", 128))
    experts = Experts(
        count=count,
        per_token=config.size("num_experts_per_tok", 8),
        intermediate_size=config.size("moe_intermediate_size", 768),
        normalize=config.get("norm_topk_prob", bool, False),
        layers=tuple(at for at in range(fields["num_layers"]) if at not in dense and (at + 1) % step == 0),
    )
    if experts.per_token > experts.count:
        raise config.error(f"num_experts_per_tok is {experts.per_token}, but there are {experts.count} experts")
    return fields | {"experts": experts}


def _mistral(config: Reader) -> Fields:
    fields = _transformer(config) | _rope(config) | {"attention_bias": False}
    return fields | _windows(config.optional_size("sliding_window", 4096), range(fields["num_layers"]))


def _phi3(config: Reader) -> Fields:
    fields = _transformer(config, norm_eps=1e-5) | {"attention_bias": False, "layout": "fused"}
    fields |= _windows(config.optional_size("sliding_window", None), range(fields["num_layers"]))
    return fields | _rope(config, head_dim=fields["head_dim"], partial=1.0, extended="longrope")


def _gemma1(config: Reader) -> Fields:
    return _gemma(config) | _rope(config) | {"norms": PRE_NORMS, "query_scalar": None}


def _gemma2(config: Reader) -> Fields:
    fields = _gemma(config) | _rope(config)
    every_other = range(0, fields["num_layers"], 2)
    fields |= _windows(config.optional_size("sliding_window", 4096), _sliding_layers(config, fields, every_other))
    return fields | {
        "attention_softcap": config.optional_positive("attn_logit_softcapping", 50.0),
        "logit_softcap": config.optional_positive("final_logit_softcapping", 30.0),
    }


def _gemma3(config: Reader) -> Fields:
    config.only("attn_logit_softcapping", None, None)
    fields = _gemma(config) | {"architecture": "Gemma3ForCausalLM", "qk_norm": True}
    pattern = config.size("sliding_window_pattern", 6)
    local = [at for at in range(fields["num_layers"]) if (at + 1) % pattern]
    fields |= _windows(config.optional_size("sliding_window", 4096), _sliding_layers(config, fields, local))
    fields["logit_softcap"] = config.optional_positive("final_logit_softcapping", None)
    rope = config.nested("rope_parameters", {})
    if rope.has("full_attention"):  # transformers 5 has one set for each kind of layer
        whole = Reader(config.where, {"rope_parameters": rope.get("full_attention", dict), **_context(config)})
        local_rope = rope.nested("sliding_attention", {})
        local_rope.only("rope_type", "default", "default")
        return fields | _rope(whole, theta=1e6) | {"local_rope_theta": local_rope.positive("rope_theta", 1e4)}
    return fields | _rope(config, theta=1e6) | {"local_rope_theta": config.positive("rope_local_base_freq", 1e4)}


def _smollm3(config: Reader) -> Fields:
    config.only("mlp_bias", False, False)
    fields = _transformer(config, tied=True) | _rope(config, theta=2e6)
    bias = config.get("attention_bias", bool, False)
    layers, interval = range(fields["num_layers"]), config.size("no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers", list, [int((at + 1) % interval != 0) for at in layers])
    if len(turned) < len(layers):
        raise config.error(f"no_rope_layers has {len(turned)} entries for {len(layers)} layers")
    unrotated = tuple(at for at in layers if not turned[at])
    if config.get("use_sliding_window", bool, False):
        window = config.optional_size("sliding_window", None)
        fields |= _windows(window, _sliding_layers(config, fields, unrotated))
    return fields | {"attention_bias": bias, "output_bias": bias, "unrotated_layers": unrotated}


def _glm(config: Reader) -> Fields:
    fields = _transformer(config, head_dim=128, norm_eps=1.5625e-7)
    fields |= {"attention_bias": config.get("attention_bias", bool, True), "layout": "gate_up"}
    return fields | _rope(config, head_dim=fields["head_dim"], partial=0.5) | {"rope_interleaved": True}


def _glm4(config: Reader) -> Fields:
    return _glm(config) | {"norms": GLM4_NORMS}


def _chatglm(config: Reader) -> Fields:
    """The configuration of the code that such a checkpoint brings along, which is not run."""
    for key, needed in (("rmsnorm", True), ("post_layer_norm", True), ("add_bias_linear", False)):
        config.only(key, needed, needed)
    config.only("apply_residual_connection_post_layernorm", False, False)
    config.only("multi_query_attention", True, False)  # without it, q, k and v alternate by head
    config.only("vision_config", None, None)
    head_dim = config.size("kv_channels")
    return {
        "architecture": "GlmForCausalLM",
        "layout": "chatglm",
        "vocab_size": config.size("padded_vocab_size", config.size("vocab_size", 1)),
        "hidden_size": config.size("hidden_size"),
        "intermediate_size": config.size("ffn_hidden_size"),
        "num_layers": config.size("num_layers"),
        "num_heads": config.size("num_attention_heads"),
        "num_kv_heads": config.size("multi_query_group_num"),
        "head_dim": head_dim,
        "max_position": config.size("seq_length"),
        "rms_norm_eps": config.positive("layernorm_epsilon"),
        "rope_theta": 10000.0 * config.positive("rope_ratio", 1.0),
        "rotary_dim": head_dim // 2,
        "rope_interleaved": config.get("original_rope", bool, True),
        "tie_word_embeddings": config.get("tie_word_embeddings", bool, False),
        "attention_bias": config.get("add_qkv_bias", bool),
    }


FAMILIES: Mapping[str, Callable[[Reader], Fields]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MistralForCausalLM": _mistral,
    "Phi3ForCausalLM": _phi3,
    "GemmaForCausalLM": _gemma1,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    _WRAPPED: _gemma3,
    "SmolLM3ForCausalLM": _smollm3,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    **dict.fromkeys(_CHATGLM, _chatglm),
}


# ---- what families share --------------------------------------------------------------------------------------------


def _transformer(config: Reader, *, head_dim: int | None = None, norm_eps: float = 1e-6, tied: bool = False) -> Fields:
    """Sizes under the usual names, of an MLP gated by SiLU. Arguments are the family's defaults."""
    config.only("hidden_act", "silu", "silu")
    return _sizes(config, head_dim=head_dim, norm_eps=norm_eps, tied=tied)


def _sizes(config: Reader, *, head_dim: int | None, norm_eps: float, tied: bool) -> Fields:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    return {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.size("intermediate_size"),
        "num_layers": config.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim", head_dim or max(hidden // heads, 1)),
        "rms_norm_eps": config.positive("rms_norm_eps", norm_eps),
        "tie_word_embeddings": config.get("tie_word_embeddings", bool, tied),
    }


def _gemma(config: Reader) -> Fields:
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    activation = config.get(key, str, "gelu_pytorch_tanh")
    if activation not in _GELU_TANH:  # early files say gelu and mean its tanh form, as transformers reads them
        raise config.error(f"{key} is {activation!r}; only 'gelu_pytorch_tanh' is supported")
    if config.get("use_bidirectional_attention", bool, False):
        raise config.error("use_bidirectional_attention is true: this model embeds texts and does not generate")
    fields = _sizes(config, head_dim=256, norm_eps=1e-6, tied=True)
    bias = config.get("attention_bias", bool, False)
    return fields | {
        "activation": "gelu_tanh",
        "attention_bias": bias,
        "output_bias": bias,
        "norms": GEMMA_NORMS,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "query_scalar": config.positive("query_pre_attn_scalar", 256.0),
    }


def _gemma3_text(config: Reader) -> Reader:
    """The text part of a multimodal configuration, which leaves out what has the class's default."""
    defaults = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 26}
    defaults |= {"hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 131072}
    outer = {key: value for key, value in config.values.items() if key.endswith(("_token_id", "dtype"))}
    return Reader(config.where, defaults | outer | dict(config.nested("text_config").values))


def _windows(window: int | None, layers: Iterable[int]) -> Fields:
    return {} if window is None else {"sliding_window": window, "window_layers": tuple(layers)}


def _sliding_layers(config: Reader, fields: Fields, default: Iterable[int]) -> tuple[int, ...]:
    """Layers that `layer_types` calls sliding_attention."""
    count = fields["num_layers"]
    if not config.has("layer_types"):
        return tuple(default)
    kinds = config.numbers("layer_types", str)
    if len(kinds) != count or set(kinds) - {"sliding_attention", "full_attention"}:
        raise config.error(f"layer_types is {list(kinds)}; {count} of sliding_attention, full_attention are needed")
    return tuple(at for at, kind in enumerate(kinds) if kind == "sliding_attention")


def _upper_windows(config: Reader) -> Fields:
    """Qwen: with use_sliding_window, layers from max_window_layers on."""
    layers = config.size("num_hidden_layers")
    if not config.get("use_sliding_window", bool, False):
        return {}
    upper = range(config.get("max_window_layers", int, 28), layers)
    return _windows(
        config.optional_size("sliding_window", 4096), _sliding_layers(config, {"num_layers": layers}, upper)
    )


# ---- rotary embedding -----------------------------------------------------------------------------------------------


def _context(config: Reader) -> dict[str, Any]:
    keys = ("max_position_embeddings", "original_max_position_embeddings")
    return {key: config.values[key] for key in keys if key in config.values}


def _rope(
    config: Reader,
    *,
    theta: float = 10000.0,
    head_dim: int | None = None,
    partial: float | None = None,
    extended: str | None = None,
) -> Fields:
    """From `rope_parameters` (transformers 5), or from `rope_theta` beside `rope_scaling` (before).

    `partial` is the family's default for the share of a head that turns (None: heads turn whole); `extended` is what
    it reads "yarn" as.
    """
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    rope = config.nested(key, {})
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind == "yarn" and extended is not None:
        kind = extended
    length = config.size("max_position_embeddings")
    fields: Fields = {"rope_theta": rope.positive("rope_theta", config.positive("rope_theta", theta))}
    if kind != "default":
        default = None if extended is None else 4096  # Phi3Config's own
        scaling = _scaling(kind, rope, length, config.optional_size("original_max_position_embeddings", default))
        fields["rope_scaling"] = scaling
        if scaling.kind == "yarn":  # files edited by hand often keep the length of the first training
            length = max(length, int(scaling.original_max_position * scaling.factor))
    share = rope.positive("partial_rotary_factor", config.positive("partial_rotary_factor", partial or 1.0))
    if partial is not None and head_dim is not None:
        fields["rotary_dim"] = int(head_dim * share)
    elif share != 1.0:
        raise config.error(f"partial_rotary_factor is {share}; heads of this architecture turn whole")
    return fields | {"max_position": length}


def _scaling(kind: str, rope: Reader, length: int, original: int | None) -> RopeScaling:
    if kind not in _ROPE_KINDS:
        raise rope.error(f"rope scaling {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    name = _ROPE_KINDS[kind]
    original = original or rope.size("original_max_position_embeddings", length)
    if name in ("linear", "dynamic"):
        # The length that dynamic scaling starts from is the configured one, whatever else is there.
        return RopeScaling(kind=name, factor=rope.positive("factor"), original_max_position=length)
    if name == "llama3":
        return RopeScaling(
            kind=name,
            factor=rope.positive("factor"),
            original_max_position=original,
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
        )
    return (_yarn if name == "yarn" else _longrope)(rope, length, original)


def _yarn(rope: Reader, length: int, original: int) -> RopeScaling:
    """https://arxiv.org/abs/2309.00071"""
    factor = rope.positive("factor", length / original)

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    usual = mscale(1.0)
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        over, under = rope.get("mscale", float), rope.get("mscale_all_dim", float)
        usual = mscale(over) / mscale(under) if over and under else usual
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        truncate=rope.get("truncate", bool, True),
        attention_factor=rope.positive("attention_factor", usual),
    )


def _longrope(rope: Reader, length: int, original: int) -> RopeScaling:
    """https://arxiv.org/abs/2402.13753"""
    factor = rope.positive("factor", length / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.positive("attention_factor", usual),
        short_factor=rope.numbers("short_factor", float),
        long_factor=rope.numbers("long_factor", float),
    )


# ---- beside the network ---------------------------------------------------------------------------------------------


def _dtype(config: Reader) -> str:
    """`dtype` since transformers 5, `torch_dtype` before; float32 where neither is there, as transformers has it."""
    dtype = config.get("dtype", str, config.get("torch_dtype", str, "float32"))
    if dtype not in _DTYPES:
        raise config.error(f"dtype is {dtype!r}; supported are {', '.join(_DTYPES)}")
    return dtype


def _eos(folder: Path, config: Reader, default: tuple[int, ...]) -> tuple[int, ...]:
    """Every token that ends a text, by config.json (else the class's `default`) or by generation_config.json."""
    ids = config.token_ids("eos_token_id") or default
    path = folder / "generation_config.json"
    if path.exists():
        ids += Reader(path, read_json(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
