"""The model's numbers, read strictly out of its configuration (config.json or GGUF metadata)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from surefoot import gguf
from surefoot.architecture import Experts, ModelSpec, Rope, RopeScaling, tensor_shapes
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from surefoot.families import FAMILIES, architecture, read_config
from surefoot.generic import read_generic
from surefoot.gguf_spec import read_gguf
from surefoot.reading import Reader, read_json
from surefoot.types import Value

__all__ = [
    "Experts",
    "GenerationDefaults",
    "NO_DEFAULTS",
    "ModelSpec",
    "Rope",
    "RopeScaling",
    "read_generation_defaults",
    "read_json",
    "read_spec",
    "tensor_shapes",
]


def read_spec(checkpoint: Checkpoint, model_impl: str = "auto") -> ModelSpec:
    """The spec of a checkpoint. Raises CheckpointError naming file and key for what is missing or not supported.

    `model_impl` says whose code computes the network: surefoot, transformers, or auto, which is ours where it is built
    here, and transformers' where that is installed.
    """
    if checkpoint.kind == "gguf":
        if model_impl == "transformers":
            raise CheckpointError(f"{checkpoint.path}: model_impl transformers needs a directory, not a GGUF file.")
        return read_gguf(gguf.read_header(checkpoint.path))
    folder = checkpoint.path
    if model_impl == "transformers" or (model_impl == "auto" and _foreign(folder)):
        return read_generic(folder)
    return read_config(folder)


def _foreign(folder: Path) -> bool:
    """Whether a directory's architecture is not built here, and transformers is there to ask."""
    config = Reader(folder / "config.json", read_json(folder / "config.json"))
    name = architecture(config)
    return bool(name) and name not in FAMILIES and find_spec("transformers") is not None


# ---- generation_config.json -----------------------------------------------------------------------------------------


class GenerationDefaults(Value, frozen=True):
    """Sampling that the model's makers recommend; None where they say nothing. Names are those of SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """What the makers do say."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NO_DEFAULTS = GenerationDefaults()


def read_generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """What generation_config.json recommends, as vLLM reads it: max_new_tokens counts, do_sample does not.

    A GGUF has no such file. Raises CheckpointError naming file and key for a value that no request could ask for.
    """
    path = checkpoint.path / "generation_config.json"
    if checkpoint.kind == "gguf" or not path.exists():
        return GenerationDefaults()
    config = Reader(path, read_json(path))
    top_k = config.between("top_k", -1, 2**31)
    return GenerationDefaults(
        temperature=config.between("temperature", 0, 100),
        top_p=config.between("top_p", 1e-6, 1),
        top_k=None if top_k is None else max(int(top_k), 0),
        min_p=config.between("min_p", 0, 1),
        repetition_penalty=config.between("repetition_penalty", 0.01, 100),
        max_tokens=config.size("max_new_tokens") if config.has("max_new_tokens") else None,
    )
