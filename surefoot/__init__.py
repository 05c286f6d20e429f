"""Surefoot: an LLM inference engine and OpenAI-compatible server where a request that fails, fails alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.types import SamplingParams

if TYPE_CHECKING:
    from surefoot.api.offline import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # loaded on demand: `import surefoot` stays instant
        from surefoot.api.offline import LLM

        return LLM
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
