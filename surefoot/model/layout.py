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
_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_ROOTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
    """Tensors that are not needed: rotary frequencies follow from the configuration, a tied output is the embedding,
    and the part of a multimodal model that sees images is not built."""
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")):
        return True
    if spec.wrapped and name.startswith(_NOT_TEXT):
        return True
    return spec.tie_word_embeddings and name in ("lm_head.weight", "transformer.output_layer.weight")


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; names that are not known stay as they are."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_GGUF_NAMES[part]}.{kind}" if part in _GGUF_NAMES else name
    root, _, kind = name.rpartition(".")
    return f"{_GGUF_ROOTS[root]}.{kind}" if root in _GGUF_ROOTS else name
