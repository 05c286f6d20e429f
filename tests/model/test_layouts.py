"""Checkpoints as every family's makers store them: written by transformers, or by renaming and fusing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.checkpoint import Checkpoint, find
from surefoot.errors import CheckpointError
from surefoot.model.layout import stored_names
from surefoot.model.weights import dummy, load
from surefoot.spec import ModelSpec, read_spec, tensor_shapes
from tests.model.tiny import CASES, CHATGLM, Case, Tensors, write, write_chatglm


def read(folder: Path) -> tuple[ModelSpec, Tensors]:
    checkpoint = find(str(folder))
    spec = read_spec(checkpoint)
    return spec, dict(load(checkpoint, spec, dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_transformers_writes_is_read_whole(tmp_path: Path, case: Case) -> None:
    """Every tensor that transformers saves is needed and found, and pieces stacked again are what was stored."""
    model = write(tmp_path, case)
    spec, found = read(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == tensor_shapes(spec)
    stored = load_file(tmp_path / "model.safetensors")
    names = stored_names(spec)
    assert stored.keys() == names.keys()
    for name, pieces in names.items():
        assert torch.equal(torch.cat([found[piece] for piece in pieces]), stored[name]), name
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spec.eos_token_ids == (2, 3)


@pytest.mark.slow
def test_chatglm_is_glm_under_other_names(tmp_path: Path) -> None:
    """A ChatGLM checkpoint of several files gives the tensors and the numbers of the GLM one it was made of."""
    (tmp_path / "glm").mkdir()
    (tmp_path / "chatglm").mkdir()
    write(tmp_path / "glm", CASES["glm"])
    wanted_spec, wanted = read(tmp_path / "glm")
    write_chatglm(tmp_path / "chatglm", tmp_path / "glm")
    spec, found = read(tmp_path / "chatglm")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    same = {name: getattr(spec, name) for name in spec.__struct_fields__}
    differs = {name for name, value in same.items() if value != getattr(wanted_spec, name)}
    assert differs == {"layout", "dtype", "bos_token_id"}
    assert (spec.layout, spec.rope_theta, spec.dtype) == ("chatglm", 5e6, "bfloat16")


def test_a_fused_tensor_of_another_height_is_named(tmp_path: Path) -> None:
    """The error names the tensor as the file does, with both shapes."""
    (tmp_path / "config.json").write_text(json.dumps(CHATGLM))
    checkpoint_spec = read_spec_of(tmp_path)
    parts = dict(dummy(checkpoint_spec, dtype=torch.float32))
    tensors = {
        name: torch.cat([parts[piece] for piece in pieces]) for name, pieces in stored_names(checkpoint_spec).items()
    }
    name = "transformer.encoder.layers.1.self_attention.query_key_value.weight"
    tensors[name] = torch.ones(255, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[255, 64\].*\[256, 64\]"):
        read(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"incomplete: tensor {name} is missing"):
        read(tmp_path)


def read_spec_of(folder: Path) -> ModelSpec:
    return read_spec(Checkpoint(kind="hf", path=folder, name="tiny"))


@pytest.mark.slow
def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """Gemma 3 with vision: the text part is read from either generation's names, the rest is left alone."""
    write(tmp_path, CASES["gemma-3"])
    _, wanted = read(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [2, 3], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    stored = load_file(tmp_path / "model.safetensors")
    for before, after in (("model.", "language_model.model."), ("model.", "model.language_model.")):
        renamed = {after + name.removeprefix(before): tensor for name, tensor in stored.items()}
        renamed["vision_tower.x.weight"] = torch.ones(2)
        save_file(renamed, tmp_path / "model.safetensors")
        spec, found = read(tmp_path)
        assert spec.architecture == "Gemma3ForCausalLM"
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
