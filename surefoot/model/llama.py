"""Llama (https://arxiv.org/abs/2302.13971), and every checkpoint of its shape: Llama 2 and 3, SmolLM2, TinyLlama …

Each layer adds to the stream of hidden rows twice:

    hidden += o( attention( rotate( qkv( norm(hidden) ) ) ) )
    hidden += down( silu(gate) · up ),   gate, up = gate_up( norm(hidden) )

Queries have `num_heads` heads, keys and values `num_kv_heads`, each serving a group of queries (grouped-query
attention). Projections of one input are one matrix. The embedding may serve as the output projection, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.model.layers import Attend, Part, assemble, stack
from surefoot.ops.activation import silu_and_mul
from surefoot.ops.linear import Linear, make_linear
from surefoot.ops.norm_rope import pair_up, rms_norm, rotate_, rotations
from surefoot.spec import ModelSpec


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """The network with its weights; see `model.layers.Network`."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Any], device: torch.device) -> None:
        self.spec = spec
        self.embedding: Tensor = weights["embedding"]
        self.layers = [Layer(**weights[f"layer {index}"]) for index in range(spec.num_layers)]
        self.norm: Tensor = weights["norm"]
        self.lm_head: Linear = weights["lm_head"]
        self.turns = rotations(spec.max_position, spec.head_dim, spec.rope_theta, device)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> Llama:
        """Build from a stream of Hugging Face names and tensors, repacking each as it comes."""
        moved = ((name, tensor.to(device=device, dtype=dtype)) for name, tensor in tensors)
        made = assemble(parts(spec, quantization), moved)
        weights: dict[str, Any] = {name: value for name, value in made.items() if "." not in name}
        if spec.tie_word_embeddings:
            weights["embedding"], weights["lm_head"] = made["embedding"]  # type: ignore[misc]
        for index in range(spec.num_layers):
            prefix = f"{index}."
            weights[f"layer {index}"] = {
                name.removeprefix(prefix): value for name, value in made.items() if name.startswith(prefix)
            }
        return cls(spec, weights, device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Ids and positions [n] → hidden rows [n, hidden] after the last norm."""
        spec = self.spec
        turns = self.turns[positions]
        rotated = spec.num_heads + spec.num_kv_heads
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, spec.rms_norm_eps)).view(len(tokens), -1, spec.head_dim)
            rotate_(qkv[:, :rotated], turns)
            hidden += layer.o(attend(index, qkv))
            normed = rms_norm(hidden, layer.post_norm, spec.rms_norm_eps)
            hidden += layer.down(silu_and_mul(layer.gate_up(normed)))
        return rms_norm(hidden, self.norm, spec.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] → float32 [rows, vocabulary]."""
        return self.lm_head(hidden).float()


def parts(spec: ModelSpec, quantization: str) -> Iterator[Part]:
    """Which tensors of the checkpoint make which parameter."""
    linear = partial(make_linear, quantization=quantization)
    if spec.tie_word_embeddings:
        yield Part("embedding", ("model.embed_tokens.weight",), lambda weight: (weight, linear(weight)))
    else:
        yield Part("embedding", ("model.embed_tokens.weight",), _itself)
        yield Part("lm_head", ("lm_head.weight",), linear)
    yield Part("norm", ("model.norm.weight",), _itself)
    for index in range(spec.num_layers):
        yield from _layer_parts(spec, index, linear)


def _layer_parts(spec: ModelSpec, index: int, linear: partial[Linear]) -> Iterator[Part]:
    """Query and key rows are paired up for `rotate_`, then joined with the values below them."""
    layer = f"model.layers.{index}."
    qkv = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
    names = [f"{name}.weight" for name in qkv]
    if spec.attention_bias:
        names += [f"{name}.bias" for name in qkv]

    def make_qkv(*tensors: Tensor) -> Linear:
        paired = [pair_up(x, spec.head_dim) if at % 3 < 2 else x for at, x in enumerate(tensors)]
        return linear(stack(*paired[:3]), stack(*paired[3:]) if spec.attention_bias else None)

    o = (f"{layer}self_attn.o_proj.weight", *([f"{layer}self_attn.o_proj.bias"] if spec.attention_bias else []))
    gate_up = tuple(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up"))
    yield Part(f"{index}.input_norm", (f"{layer}input_layernorm.weight",), _itself)
    yield Part(f"{index}.qkv", tuple(names), make_qkv)
    yield Part(f"{index}.o", o, linear)
    yield Part(f"{index}.post_norm", (f"{layer}post_attention_layernorm.weight",), _itself)
    yield Part(f"{index}.gate_up", gate_up, lambda gate, up: linear(stack(gate, up)))
    yield Part(f"{index}.down", (f"{layer}mlp.down_proj.weight",), linear)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
