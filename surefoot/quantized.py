"""`quantization_config` of config.json: how the weights of a checkpoint's linear layers are packed.

    awq                  qweight, qzeros, scales             4 bits, groups of inputs, zero points
    gptq                 qweight, qzeros, scales, g_idx      2, 4 or 8 bits, groups in any order of inputs
    fp8                  weight, weight_scale(_inv)          8 bits, a scale per tensor or per block
    compressed-tensors   weight, weight_scale                8 bits, a scale per tensor, channel or block
                         weight_packed, weight_scale         4 or 8 bits, groups of inputs

Which tensors of a file are packed is told by their names; here is what names do not tell. Activations stay as they
are: settings about theirs are not looked at.
"""

from __future__ import annotations

from typing import Any, Literal

from surefoot.reading import Reader
from surefoot.types import Value


class Packing(Value, frozen=True):
    """How packed weights become numbers again: (code - zero) · scale."""

    kind: Literal["awq", "gptq", "scaled", "packed"]
    """The tensors' layout; "scaled" has one code per element, "packed" is that of compressed-tensors."""
    bits: int
    zero_offset: int = 0
    """Added to a stored zero point: GPTQ's first format stores them less 1."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, where scales are per block; the last blocks may be smaller."""


def read_packing(config: Reader) -> Packing | None:
    """None where nothing is packed. Raises CheckpointError naming file and key for what cannot be read."""
    if not config.has("quantization_config"):
        return None
    about = config.nested("quantization_config")
    method = about.get("quant_method", str)
    if method not in _METHODS:
        raise about.error(f"quantization_config.quant_method is {method!r}; readable are {', '.join(_METHODS)}")
    return _METHODS[method](about)


def _awq(about: Reader) -> Packing:
    about.only("version", "gemm", "gemm")
    about.only("bits", 4, None)
    return Packing(kind="awq", bits=about.size("bits"))


def _gptq(about: Reader) -> Packing:
    bits = about.size("bits")
    if bits not in (2, 4, 8):
        raise about.error(f"quantization_config.bits is {bits}; readable are 2, 4 and 8")
    form = about.get("checkpoint_format", str, "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise about.error(f"quantization_config.checkpoint_format is {form!r}; readable are gptq and gptq_v2")
    return Packing(kind="gptq", bits=bits, zero_offset=int(form == "gptq"))


def _fp8(about: Reader) -> Packing:
    return Packing(kind="scaled", bits=8, block=_block(about, "weight_block_size"))


def _block(about: Reader, key: str) -> tuple[int, int] | None:
    if not about.has(key):
        return None
    sizes = about.numbers(key, int)
    if len(sizes) != 2 or min(sizes) <= 0:
        raise about.error(f"quantization_config.{key} is {list(sizes)}; two positive numbers are needed")
    return sizes[0], sizes[1]


def _compressed(about: Reader) -> Packing:
    form = about.get("format", str)
    groups = about.get("config_groups", dict)
    weights = [_weights(about, group) for group in groups.values()]
    if len(weights) != 1:
        raise about.error(f"quantization_config.config_groups has {len(weights)} groups; one is readable")
    bits = weights[0].size("num_bits")
    weights[0].only("symmetric", True, True)
    if form == "pack-quantized" and bits in (4, 8):
        return Packing(kind="packed", bits=bits)
    if form in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8:
        return Packing(kind="scaled", bits=8, block=_block(weights[0], "block_structure"))
    raise about.error(f"quantization_config.format is {form!r} of {bits} bits, which cannot be read")


def _weights(about: Reader, group: Any) -> Reader:
    return (
        Reader(about.where, {"config_groups": group}, "quantization_config.").nested("config_groups").nested("weights")
    )


_METHODS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
