"""Architecture names of Hugging Face configurations → the page that implements them."""

from __future__ import annotations

from surefoot.errors import CheckpointError
from surefoot.model.llama import Llama

NETWORKS = {"LlamaForCausalLM": Llama}


def network_class(architecture: str) -> type[Llama]:
    """The class for `architecture`. Raises CheckpointError naming those that are supported."""
    if architecture not in NETWORKS:
        known = ", ".join(sorted(NETWORKS))
        raise CheckpointError(f"The architecture {architecture!r} is not supported; supported: {known}.")
    return NETWORKS[architecture]
