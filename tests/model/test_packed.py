"""Quantized checkpoints, packed here number by number as their makers define it, against the numbers themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.checkpoint import find
from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from surefoot.errors import CheckpointError
from surefoot.model.weights import load
from surefoot.spec import read_spec
from tests.device.driver import Driver
from tests.model.test_exactness import reference, text
from tests.model.tiny import CASES, Tensors, write

GROUP = 16
Made = tuple[Tensors, torch.Tensor]
"""Tensors by the names after a layer's, and the matrix [out, in] that they stand for."""


def wrapped(value: int) -> int:
    """The int32 with the bits of a number below 2³²."""
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_columns(codes: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """[a, b] → int32 [a, b·bits/32]: place p of a word holds its column order[p]."""
    per = 32 // bits
    rows = [
        [
            wrapped(sum(int(row[word * per + order[place]]) << (bits * place) for place in range(per)))
            for word in range(len(row) // per)
        ]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32)


def drawn(shape: tuple[int, int], bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [in, out], zero points [groups, out] and scales [groups, out] of a weight [out, in]."""
    generator = torch.Generator().manual_seed(seed)
    out, size = shape
    codes = torch.randint(0, 1 << bits, (size, out), generator=generator)
    zeros = torch.randint(0, 1 << bits, (size // GROUP, out), generator=generator)
    return codes, zeros, (torch.rand(size // GROUP, out, generator=generator) * 0.02 + 0.01).half()


def awq(shape: tuple[int, int], seed: int) -> Made:
    codes, zeros, scales = drawn(shape, 4, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    group = torch.arange(shape[1]) // GROUP
    weight = (codes - zeros[group]) * scales.float()[group]
    tensors = {"qweight": pack_columns(codes, 4, order), "qzeros": pack_columns(zeros, 4, order), "scales": scales}
    return tensors, weight.t()


def gptq(shape: tuple[int, int], seed: int, bits: int = 4, offset: int = 1, *, shuffled: bool = True) -> Made:
    codes, zeros, scales = drawn(shape, bits, seed)
    order = tuple(range(32 // bits))
    group = torch.arange(shape[1]) // GROUP
    if shuffled:
        group = group[torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))]
    weight = (codes - zeros[group]) * scales.float()[group]
    stored = (zeros - offset) % (1 << bits)
    tensors = {
        "qweight": pack_columns(codes.t(), bits, order).t().contiguous(),
        "qzeros": pack_columns(stored, bits, order),
        "scales": scales,
        "g_idx": group.int(),
        "bias": torch.zeros(shape[0]).half(),
    }
    return tensors, weight.t()


def fp8(shape: tuple[int, int], seed: int, block: tuple[int, int] | None) -> Made:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    if block is None:
        scale = torch.tensor(0.03)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}, codes.float() * scale
    scales = torch.rand(*(-(-size // each) for size, each in zip(shape, block, strict=True)), generator=generator) / 10
    weight = torch.tensor([
        [float(codes[at, to]) * float(scales[at // block[0], to // block[1]]) for to in range(shape[1])]
        for at in range(shape[0])
    ])  # fmt: skip
    return {"weight": codes, "weight_scale_inv": scales}, weight


def channels(shape: tuple[int, int], seed: int, dtype: torch.dtype) -> Made:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(shape, generator=generator) * 30).clamp(-127, 127).to(dtype)
    scales = torch.rand(shape[0], 1, generator=generator).bfloat16() / 100
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def packed(shape: tuple[int, int], seed: int) -> Made:
    codes, _, scales = drawn(shape, 4, seed)
    weight = (codes - 8) * scales.float().repeat_interleave(GROUP, 0)
    tensors = {
        "weight_packed": pack_columns(codes.t(), 4, tuple(range(8))),
        "weight_scale": scales.t().contiguous(),
        "weight_shape": torch.tensor(shape),
    }
    return tensors, weight.t()


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"symmetric": True, **weights}, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
METHODS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (GPTQ, gptq),
    "gptq-in-order": (GPTQ | {"desc_act": False}, lambda shape, seed: gptq(shape, seed, shuffled=False)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda shape, seed: gptq(shape, seed, offset=0)),
    "gptq-8": (GPTQ | {"bits": 8}, lambda shape, seed: gptq(shape, seed, bits=8)),
    "gptq-2": (GPTQ | {"bits": 2}, lambda shape, seed: gptq(shape, seed, bits=2)),
    "fp8-tensor": ({"quant_method": "fp8"}, lambda shape, seed: fp8(shape, seed, None)),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [32, 20]},
        lambda shape, seed: fp8(shape, seed, (32, 20)),
    ),
    "compressed-int8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        lambda shape, seed: channels(shape, seed, torch.int8),
    ),
    "compressed-fp8": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda shape, seed: channels(shape, seed, torch.float8_e4m3fn),
    ),
    "compressed-int4": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
        packed,
    ),
}


def quantized(folder: Path, method: str) -> tuple[Any, Tensors]:
    """A tiny Llama whose linear layers are packed; transformers' model with the same numbers, and these."""
    config, make = METHODS[method]
    model = write(folder, CASES["llama-2"], std=0.1)
    stored, plain = load_file(folder / "model.safetensors"), {}
    tensors: Tensors = {}
    for at, (name, tensor) in enumerate(stored.items()):
        plain[name] = tensor
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        parts, plain[name] = make(tuple(tensor.shape), at)
        stem = name.removesuffix("weight")
        real = stored.get(f"{stem}bias")
        tensors |= {f"{stem}{part}": value for part, value in parts.items() if part != "bias" or real is None}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    model.load_state_dict(plain)
    return model, plain


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_packed_weights_are_the_numbers_they_stand_for(tmp_path: Path, method: str) -> None:
    """Codes, zero points, scales and the order of groups give each weight, to the last bit of a float32 product."""
    _, plain = quantized(tmp_path, method)
    checkpoint = find(str(tmp_path))
    found = dict(load(checkpoint, read_spec(checkpoint), dtype=torch.float32))
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "gptq", "fp8-block"])
def test_a_quantized_checkpoint_computes_what_its_numbers_do(tmp_path: Path, method: str) -> None:
    """Logits are those of transformers with the unpacked weights."""
    theirs, _ = quantized(tmp_path, method)
    config = EngineConfig(model=str(tmp_path), dtype="float32", memory=300 << 20)
    ours = Driver(open_device(config, progress=lambda what, part: None))
    expected = reference(theirs, text())
    assert (ours.logits(text(), 100) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name", "change", "said"),
    [
        ("awq", "qzeros", None, r"tensor model\.layers\.0\.mlp\.down_proj\.qzeros is missing beside .*qweight"),
        ("gptq", "g_idx", torch.zeros(7, dtype=torch.int32), r"down_proj\.qweight: g_idx \[7\] does not fit 48 inputs"),
        ("gptq", "scales", torch.ones(2, 64).half(), r"down_proj\.qweight: scales \[2, 64\] and qzeros \[3, 8\]"),
        ("fp8-block", "weight_scale_inv", torch.ones(1, 1), r"down_proj\.weight: its scale \[1, 1\] does not fit"),
        ("compressed-int4", "weight_scale", torch.ones(64, 5), r"weight_scale \[64, 5\] does not fit"),
        ("awq", "qweight", torch.zeros(48, 7, dtype=torch.int32), r"do not fit weights \[56, 48\]"),
        ("gptq", "extra", torch.ones(1), r"down_proj\.extra is not part of"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, method: str, name: str, change: torch.Tensor | None, said: str
) -> None:
    """A part that is missing, or of a shape that the others do not have, is an error naming file and tensor."""
    quantized(tmp_path, method)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    key = f"model.layers.0.mlp.down_proj.{name}"
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change
    save_file(tensors, path)
    checkpoint = find(str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{said}"):
        next(load(checkpoint, read_spec(checkpoint), dtype=torch.float32))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; readable are awq, gptq, fp8, compressed-tensors"),
        ({"bits": 4}, r"the key 'quantization_config\.quant_method' is missing"),
        (GPTQ | {"bits": 3}, "bits is 3; readable are 2, 4 and 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (compressed("marlin-24", num_bits=4), "format is 'marlin-24' of 4 bits"),
        (compressed("int-quantized", num_bits=8, symmetric=False), "symmetric is False"),
    ],
)
def test_packings_that_cannot_be_read_are_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """Another method, width or format is an error naming the key."""
    write_config = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(write_config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=said):
        read_spec(find(str(tmp_path)))
