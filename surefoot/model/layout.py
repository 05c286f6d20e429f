"""What checkpoints call the tensors of `tensor_shapes`, and which of them they store as one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from surefoot.spec import ModelSpec, tensor_shapes

_GATE_UP = {"mlp.gate_proj.": "mlp.gate_up_proj.", "mlp.up_proj.": "mlp.gate_up_proj."}
_LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "apart": {},
    "gate_up": _GATE_UP,
    "fused": _GATE_UP | {f"self_attn.{name}_proj.": "self_attn.qkv_proj." for name in "qkv"},
    "chatglm": {f"self_attn.{name}_proj.": "self_attention.query_key_value." for name in "qkv"}
    | {
        "self_attn.o_proj.": "self_attention.dense.",
        "mlp.gate_proj.": "mlp.dense_h_to_4h.",
        "mlp.up_proj.": "mlp.dense_h_to_4h.",
        "mlp.down_proj.": "mlp.dense_4h_to_h.",
        "model.embed_tokens.": "transformer.embedding.word_embeddings.",
        "model.layers.": "transformer.encoder.layers.",
        "model.norm.": "transformer.encoder.final_layernorm.",
        "lm_head.": "transformer.output_layer.",
    },
}
"""Parts of our names → parts of the checkpoint's; names that become equal are rows of one tensor, in our order."""
_GGUF_PARTS = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GGUF_NORMS = {
    2: ("attn_norm", "ffn_norm"),
    4: ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
}
"""By how many a layer has, in the order of `ModelSpec.norms`."""
_GGUF_ROOTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GGUF_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def stored_names(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Every tensor of a Hugging Face directory → the tensors of ours that it holds, below each other."""
    renames = _LAYOUTS[spec.layout].items()
    found: dict[str, tuple[str, ...]] = {}
    for name in tensor_shapes(spec):
        stored = name
        for ours, theirs in renames:
            stored = stored.replace(ours, theirs)
        found[stored] = (*found.get(stored, ()), name)
    return found


def text_name(name: str, spec: ModelSpec) -> str:
    """A stored name without what a multimodal checkpoint puts before it."""
    if not spec.wrapped:
        return name
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def ignored(name: str, spec: ModelSpec) -> bool:
    """Tensors that are not needed here: rotary frequencies are in the spec, a tied output is the embedding, and the
    part of a multimodal model that sees images is not built."""
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")) or name in _GGUF_ROTARY:
        return True
    if spec.wrapped and name.startswith(_NOT_TEXT):
        return True
    return spec.tie_word_embeddings and name in ("lm_head.weight", "transformer.output_layer.weight")


def gguf_names(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Every tensor of a GGUF file → the tensors of ours that it holds, below each other; experts are one tensor."""
    parts = _GGUF_PARTS | dict(zip(spec.norms, _GGUF_NORMS[len(spec.norms)], strict=True))
    found: dict[str, tuple[str, ...]] = {}
    for stored, ours in stored_names(spec).items():
        root, _, kind = stored.rpartition(".")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", root):
            part = re.sub(r"experts\.\d+", "experts", match[2])
            name = f"blk.{match[1]}.{parts[part]}.{kind}"
        else:
            name = f"{_GGUF_ROOTS[root]}.{kind}"
        found[name] = (*found.get(name, ()), *ours)
    return found
