"""The decoder that nearly every open model is: Llama (https://arxiv.org/abs/2302.13971) and its kin.

Each layer reads a stream of hidden rows twice, and adds to it twice:

    stream += o( attention( qkv( norm(stream) ) ) )
    stream += down( act(gate) · up ),   gate, up = gate_up( norm(stream) )

Queries have `num_heads` heads, keys and values `num_kv_heads`, each serving a group of queries (grouped-query
attention). Projections of one input are one matrix; the embedding may serve as the output projection, too. Families
differ in traits, which `spec` names: biases, norms of heads (Qwen3) or of what is added (GLM-4-0414, Gemma), how far
and in which order heads turn (GLM), windows and caps of attention (Mistral, Gemma), experts in place of one MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.architecture import Rope
from surefoot.errors import CheckpointError
from surefoot.model.experts import MixtureOfExperts
from surefoot.model.layers import Attend, Attention, FeedForward, Part, Stream, assemble, stack
from surefoot.ops.linear import Linear, make_linear
from surefoot.ops.norm_rope import pair_up, rotations
from surefoot.spec import ModelSpec

Make = Callable[..., Linear]


@dataclass(frozen=True)
class Layer:
    """One layer; norms of what is added are None where the family has none."""

    before_attention: Tensor
    qkv: Linear
    attention: Attention
    o: Linear
    after_attention: Tensor | None
    before_mlp: Tensor
    mlp: FeedForward | MixtureOfExperts
    after_mlp: Tensor | None


class Decoder:
    """The network with its weights; see `model.layers.Network`."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Any], device: torch.device) -> None:
        self.spec = spec
        self.embedding: Tensor = weights["embedding"]
        self.lm_head: Linear = weights["lm_head"]
        self.norm: Tensor = weights["norm"]
        turns = cache(partial(_turns, spec.max_position, device))
        self.layers = [_layer(spec, weights, index, turns) for index in range(spec.num_layers)]

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> Decoder:
        """Build from a stream of Hugging Face names and tensors, repacking each as it comes."""
        _refuse_unknown_traits(spec, device)
        moved = ((name, tensor.to(device=device, dtype=dtype)) for name, tensor in tensors)
        made = assemble(parts(spec, partial(make_linear, quantization=quantization)), moved)
        if spec.tie_word_embeddings:
            made["embedding"], made["lm_head"] = made["embedding"]  # type: ignore[misc]
        return cls(spec, made, device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Ids [n] → hidden rows [n, hidden] after the last norm, or [k, hidden] of the tokens `keep` [k].

        `positions` are not looked at: `attend` turns queries and keys.
        """
        hidden = F.embedding(tokens, self.embedding)
        if self.spec.embedding_scale != 1.0:
            hidden *= torch.tensor(self.spec.embedding_scale, dtype=hidden.dtype)
        stream = Stream(hidden, self.spec.rms_norm_eps)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(stream.normed(layer.before_attention)).view(len(tokens), -1, self.spec.head_dim)
            attended = attend(index, qkv, layer.attention)
            if keep is not None and index == len(self.layers) - 1:
                attended = attended.index_select(0, keep)
                stream.keep(keep)
            stream.add(layer.o(attended), layer.after_attention)
            stream.add(layer.mlp(stream.normed(layer.before_mlp)), layer.after_mlp)
        return stream.normed(self.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden rows [rows, hidden] → [rows, vocabulary], into `out` if given."""
        logits = self.lm_head(hidden, out)
        if self.spec.logit_softcap is not None:
            logits.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        return logits


def _refuse_unknown_traits(spec: ModelSpec, device: torch.device) -> None:
    """Raises CheckpointError for what the kernels of a GPU do not compute yet."""
    missing = {
        "a mixture of experts": spec.experts is not None,
        "layers that do not turn": bool(spec.unrotated_layers),
        "sliding windows shorter than the context": spec.sliding_window is not None
        and spec.sliding_window < spec.max_position,
        "capped attention scores": spec.attention_softcap is not None,
    }
    for trait, present in missing.items():
        if present and device.type != "cpu":
            raise CheckpointError(f"{spec.architecture} with {trait} runs on the CPU only, for now: --device cpu.")


def _turns(max_position: int, device: torch.device, rope: Rope) -> Tensor:
    return rotations(rope, max_position, device)


def _layer(spec: ModelSpec, weights: dict[str, Any], index: int, turns: Callable[[Rope], Tensor]) -> Layer:
    def own(name: str) -> Any:
        return weights.get(f"{index}.{name}")

    rope = spec.rope(index)
    norms = [own(name) for name in spec.norms]
    before_attention, after_attention, before_mlp, after_mlp = (
        (norms[0], None, norms[1], None) if len(norms) == 2 else norms
    )
    attention = Attention(
        turns=None if rope is None else turns(rope),
        q_norm=own("q_norm"),
        k_norm=own("k_norm"),
        eps=spec.rms_norm_eps,
        scale=spec.attention_scale,
        window=spec.window(index),
        softcap=spec.attention_softcap,
    )
    mlp = _mlp(spec, own, index)
    return Layer(before_attention, own("qkv"), attention, own("o"), after_attention, before_mlp, mlp, after_mlp)


def _mlp(spec: ModelSpec, own: Callable[[str], Any], index: int) -> FeedForward | MixtureOfExperts:
    experts = spec.experts
    if experts is None or index not in experts.layers:
        return FeedForward(own("mlp.gate_up"), own("mlp.down"), spec.activation)
    names = [f"mlp.experts.{number}" for number in range(experts.count)]
    asked = [FeedForward(own(f"{name}.gate_up"), own(f"{name}.down"), spec.activation) for name in names]
    return MixtureOfExperts(own("mlp.gate"), asked, experts.per_token, experts.normalize)


# ---- which tensors of the checkpoint make which parameter -----------------------------------------------------------


def parts(spec: ModelSpec, linear: Make) -> Iterator[Part]:
    """Every parameter, with the tensors that it is made of."""
    norm = partial(_norm, spec.norm_offset)
    if spec.tie_word_embeddings:
        yield Part("embedding", ("model.embed_tokens.weight",), lambda weight: (weight, linear(weight)))
    else:
        yield Part("embedding", ("model.embed_tokens.weight",), _itself)
        yield Part("lm_head", ("lm_head.weight",), linear)
    yield Part("norm", ("model.norm.weight",), norm)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        yield from (Part(f"{index}.{name}", (f"{layer}{name}.weight",), norm) for name in spec.norms)
        yield from _attention_parts(spec, index, f"{layer}self_attn.", linear)
        yield from _mlp_parts(spec, index, layer, linear)


def _attention_parts(spec: ModelSpec, index: int, prefix: str, linear: Make) -> Iterator[Part]:
    """Query and key rows are paired up for turning, then joined with the values below them."""
    rope = spec.rope(index)

    def paired(tensor: Tensor) -> Tensor:
        return tensor if rope is None or rope.interleaved else pair_up(tensor, spec.head_dim, rope.dim)

    def make_qkv(*tensors: Tensor) -> Linear:
        turned = [paired(x) if at % 3 < 2 else x for at, x in enumerate(tensors)]
        return linear(stack(*turned[:3]), stack(*turned[3:]) if spec.attention_bias else None)

    kinds = ("weight", "bias") if spec.attention_bias else ("weight",)
    yield Part(f"{index}.qkv", tuple(f"{prefix}{name}_proj.{kind}" for kind in kinds for name in "qkv"), make_qkv)
    kinds = ("weight", "bias") if spec.output_bias else ("weight",)
    yield Part(f"{index}.o", tuple(f"{prefix}o_proj.{kind}" for kind in kinds), linear)
    if spec.qk_norm:
        norm = partial(_norm, spec.norm_offset)
        for name in ("q_norm", "k_norm"):
            yield Part(f"{index}.{name}", (f"{prefix}{name}.weight",), lambda weight: paired(norm(weight)))


def _mlp_parts(spec: ModelSpec, index: int, layer: str, linear: Make) -> Iterator[Part]:
    """A router is small, and decides: it is never quantized."""
    names, experts = ["mlp"], spec.experts
    if experts is not None and index in experts.layers:
        names = [f"mlp.experts.{number}" for number in range(experts.count)]
        yield Part(f"{index}.mlp.gate", (f"{layer}mlp.gate.weight",), make_linear)
    for name in names:
        gate_up = tuple(f"{layer}{name}.{half}_proj.weight" for half in ("gate", "up"))
        yield Part(f"{index}.{name}.gate_up", gate_up, lambda gate, up: linear(stack(gate, up)))
        yield Part(f"{index}.{name}.down", (f"{layer}{name}.down_proj.weight",), linear)


def _norm(offset: float, weight: Tensor) -> Tensor:
    """A norm's weight; with an offset it stays float32, as the reference implementation adds it there."""
    return weight if offset == 0 else weight.float() + offset


def _itself(tensor: Tensor) -> Tensor:
    return tensor
