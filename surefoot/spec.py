"""The model's numbers, read strictly out of its configuration (config.json or GGUF metadata)."""

from __future__ import annotations

from surefoot.types import Value


class ModelSpec(Value):
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
