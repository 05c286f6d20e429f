"""Architecture names of Hugging Face configurations → the page that implements them."""

from __future__ import annotations

from surefoot.errors import CheckpointError
from surefoot.model.decoder import Decoder

NETWORKS = dict.fromkeys(
    (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Phi3ForCausalLM",
        "SmolLM3ForCausalLM",
        "GlmForCausalLM",
        "Glm4ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    ),
    Decoder,
)


def network_class(architecture: str) -> type[Decoder]:
    """The class for `architecture`. Raises CheckpointError naming those that are supported."""
    if architecture not in NETWORKS:
        known = ", ".join(sorted(NETWORKS))
        raise CheckpointError(f"The architecture {architecture!r} is not supported; supported: {known}.")
    return NETWORKS[architecture]
