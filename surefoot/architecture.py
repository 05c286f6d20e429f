"""What a network looks like, as numbers: every family in one value, and the tensors that it is made of.

Traits are named for what they do, not for who has them, so that a family's page asks `spec.qk_norm`, not which family
it is. Rows of weights have one naming, whatever the checkpoint calls them (see `model.weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from surefoot.quantized import Packing
from surefoot.types import Value

Shape = tuple[int, ...]
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class RopeScaling(Value, frozen=True):
    """How rotary frequencies are stretched past the context of the first training; fields as in `rope_parameters`.

    "dynamic" changes nothing up to `original_max_position`, which is also where `ModelSpec.max_position` ends: past it
    frequencies follow the length of each sequence, and keys in a cache would have to turn again. "longrope" divides
    frequencies by `short_factor`, or by `long_factor` where the context that is served is longer than
    `original_max_position`: texts of all lengths then turn alike, as their keys are shared and grow.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_max_position: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn, longrope); the documented default where the checkpoint gives none."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Rope(Value, frozen=True):
    """Rotary embedding of a layer (https://arxiv.org/abs/2104.09864). Hashable: layers that share one share a table."""

    theta: float
    dim: int
    """The first `dim` elements of a head turn, the others pass."""
    interleaved: bool
    """Pairs are neighbours (2i, 2i+1), as in GLM; otherwise element i turns with element i + dim/2."""
    scaling: RopeScaling | None


class Experts(Value, frozen=True):
    """Mixture of experts: the MLP of some layers is a router and `count` small MLPs, of which `per_token` are asked."""

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool
    """The weights of the chosen experts are divided by their sum (norm_topk_prob)."""
    layers: tuple[int, ...]
    """Layers that have experts; the others have the usual MLP."""


class ModelSpec(Value, frozen=True):
    """Everything about a network's shape; one of these decides layers, memory and cache.

    Rows of the vocabulary from `token_count` on are padding: they have weights, mean nothing and are never sampled.
    """

    architecture: str
    """The Hugging Face class name, such as LlamaForCausalLM: key of `model.registry`. A ChatGLMModel checkpoint holds
    the network of GlmForCausalLM and has that name here."""
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
    """The projections to queries, keys and values have biases."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """Of the checkpoint: float32, float16, bfloat16 (a quantized GGUF counts as float32)."""

    implementation: Literal["surefoot", "transformers"] = "surefoot"
    """Whose code computes the network. Of one that transformers computes, traits below say nothing but windows."""
    stored_parameters: int | None = None
    """Numbers in the checkpoint, where only they tell how large the network is."""
    packing: Packing | None = None
    """How the checkpoint packs the weights of its linear layers; None: not at all."""
    output_bias: bool = False
    """The projection of attention's output has a bias."""
    layout: Literal["apart", "gate_up", "fused", "chatglm"] = "apart"
    """What the checkpoint stores as one tensor: nothing; gate and up (Glm); those, and q, k and v (Phi-3); the same
    under ChatGLM's names."""
    wrapped: bool = False
    """The checkpoint is of a multimodal model, of which this is the text part: its other tensors are left alone."""
    norms: tuple[str, ...] = PRE_NORMS
    """A layer's norms, by their names in a checkpoint and in the order in which they act: before attention and before
    the MLP; or before and after attention, before and after the MLP (an output is normed, then added to the stream)."""
    norm_offset: float = 0.0
    """Added to the weight of every RMS norm, q_norm and k_norm included: 1 in Gemma."""
    qk_norm: bool = False
    """Each head of queries and of keys is normed (q_norm, k_norm: [head_dim]) before it turns."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    """Multiplies embedded tokens, rounded to the network's dtype first: sqrt(hidden_size) in Gemma."""
    query_scalar: float | None = None
    """Scores are divided by its root; None: by that of head_dim."""
    attention_softcap: float | None = None
    """scores → cap · tanh(scores / cap), before the mask."""
    logit_softcap: float | None = None
    sliding_window: int | None = None
    """In `window_layers` a token sees this many tokens, itself included."""
    window_layers: tuple[int, ...] = ()
    rotary_dim: int | None = None
    """Elements of a head that turn; None: all."""
    rope_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    """Of layers that do not turn by `local_rope_theta`."""
    local_rope_theta: float | None = None
    """Gemma 3: layers of `window_layers` turn by this base, unscaled."""
    unrotated_layers: tuple[int, ...] = ()
    """SmolLM3: layers without rotary embedding."""
    experts: Experts | None = None

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        if self.stored_parameters is not None:
            return self.stored_parameters
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with."""
        return 1 / math.sqrt(self.query_scalar or self.head_dim)

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None: all before it."""
        return self.sliding_window if layer in self.window_layers else None

    def rope(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer; None where it has none."""
        if layer in self.unrotated_layers:
            return None
        theta, scaling = self.rope_theta, self.rope_scaling
        if self.local_rope_theta is not None and layer in self.window_layers:
            theta, scaling = self.local_rope_theta, None
        dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        return Rope(theta=theta, dim=dim, interleaved=self.rope_interleaved, scaling=scaling)


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of this network, by the names of Llama in Hugging Face's naming.

    Projections are apart here, whatever the checkpoint stores as one. Experts are mlp.gate (the router,
    [count, hidden]) and mlp.experts.N.{gate,up,down}_proj.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        parts = (_norms(spec), _attention(spec), _mlp(spec, layer))
        shapes |= {f"model.layers.{layer}.{name}": shape for part in parts for name, shape in part}
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _norms(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    for name in spec.norms:
        yield f"{name}.weight", (spec.hidden_size,)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)


def _attention(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, spec.hidden_size)
        if spec.attention_bias:
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (spec.hidden_size, queries)
    if spec.output_bias:
        yield "self_attn.o_proj.bias", (spec.hidden_size,)


def _mlp(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, experts = spec.hidden_size, spec.experts
    if experts is None or layer not in experts.layers:
        yield from _gated("mlp", hidden, spec.intermediate_size)
        return
    yield "mlp.gate.weight", (experts.count, hidden)
    for number in range(experts.count):
        yield from _gated(f"mlp.experts.{number}", hidden, experts.intermediate_size)


def _gated(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)
