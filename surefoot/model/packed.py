"""Packed weights of quantized checkpoints → matrices [out, in], computed in float32.

    code    0    1    2    3    4    5    6    7
    int32   [----|----|----|----|----|----|----|----]  from the low bits on
    GPTQ    eight inputs of an output                  compressed-tensors likewise, in rows
    AWQ     eight outputs of an input, in the order 0 2 4 6 1 3 5 7
    zeros   eight outputs of a group

Layouts: AutoGPTQ's and AutoAWQ's (gemm) files, fp8 as transformers and DeepSeek-V3 have it, compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from surefoot.quantized import Packing

Shape = tuple[int, ...]
PARTS: Mapping[str, tuple[str, ...]] = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "scaled": ("weight", "weight_scale", "weight_scale_inv"),
    "packed": ("weight_packed", "weight_scale"),
}
"""Names of the tensors that make one matrix; the first is always there, and names what is packed."""
OPTIONAL = ("g_idx", "weight_scale", "weight_scale_inv")
UNUSED = ("input_scale", "weight_shape", "input_global_scale")
"""Scales of activations, which are not quantized here, and what follows from other tensors."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the code of output i lies among eight."""


def logical_shape(packing: Packing, shapes: Mapping[str, Shape]) -> Shape | str:
    """[out, in] of the matrix that tensors of these shapes make, or what is wrong with them."""
    per = 32 // packing.bits
    main = shapes[PARTS[packing.kind][0]]
    if len(main) != 2:
        return f"{PARTS[packing.kind][0]} has shape {list(main)}, and two dimensions are needed"
    if packing.kind == "scaled":
        return _scaled_shape(packing, main, shapes)
    if packing.kind == "packed":
        out, size = main[0], main[1] * per
        groups = shapes["weight_scale"]
        whole = len(groups) == 2 and groups[0] == out and groups[1] > 0 and size % groups[1] == 0
        return (out, size) if whole else f"weight_scale {list(groups)} does not fit weights [{out}, {size}]"
    out, size = (main[1] * per, main[0]) if packing.kind == "awq" else (main[1], main[0] * per)
    groups, zeros = shapes["scales"], shapes["qzeros"]
    uneven = "g_idx" not in shapes and (len(groups) != 2 or groups[0] == 0 or size % groups[0] != 0)
    if uneven or groups[1:] != (out,) or zeros != (groups[0], out // per):
        return f"scales {list(groups)} and qzeros {list(zeros)} do not fit weights [{out}, {size}]"
    if shapes.get("g_idx", (size,)) != (size,):
        return f"g_idx {list(shapes['g_idx'])} does not fit {size} inputs"
    return out, size


def _scaled_shape(packing: Packing, main: Shape, shapes: Mapping[str, Shape]) -> Shape | str:
    scale = shapes.get("weight_scale", shapes.get("weight_scale_inv", ()))
    fitting: list[Shape] = [(), (1,), (1, 1), (main[0],), (main[0], 1)]
    if packing.block is not None:
        fitting = [tuple(-(-size // block) for size, block in zip(main, packing.block, strict=True))]
    return main if scale in fitting else f"its scale {list(scale)} does not fit weights {list(main)}"


def dequantize(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    """The matrix [out, in] in float32."""
    return _KINDS[packing.kind](packing, parts)


def codes_along(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned codes of an int32 tensor [a, b], whose `dim` grows by 32 / bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    spread = packed.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)
    return (spread & ((1 << bits) - 1)).flatten(dim, dim + 1)


def _gptq(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    codes = codes_along(parts["qweight"], packing.bits, 0)
    zeros = codes_along(parts["qzeros"], packing.bits, 1) + packing.zero_offset
    zeros &= (1 << packing.bits) - 1  # a zero point of 0, stored less 1, has wrapped around
    scales = parts["scales"].float()
    group = parts.get("g_idx")
    rows = _even(len(codes), len(scales)) if group is None else group.long()
    return ((codes - zeros[rows]).float() * scales[rows]).t().contiguous()


def _awq(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    codes, zeros = (_in_order(codes_along(parts[name], packing.bits, 1)) for name in ("qweight", "qzeros"))
    scales = parts["scales"].float()
    rows = _even(len(codes), len(scales))
    return ((codes - zeros[rows]).float() * scales[rows]).t().contiguous()


def _in_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


def _even(inputs: int, groups: int) -> Tensor:
    """The group of each input."""
    return torch.arange(inputs) // (inputs // groups)


def _packed(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    codes = codes_along(parts["weight_packed"], packing.bits, 1) - (1 << packing.bits - 1)
    scales = parts["weight_scale"].float()
    return codes.float() * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)


def _scaled(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    weight = parts["weight"].float()
    scale = next((parts[name].float() for name in ("weight_scale", "weight_scale_inv") if name in parts), None)
    if scale is None:
        return weight
    if packing.block is not None:
        high, wide = packing.block
        scale = scale.repeat_interleave(high, 0)[: weight.shape[0]].repeat_interleave(wide, 1)[:, : weight.shape[1]]
    elif scale.ndim == 1:
        scale = scale[:, None]
    return weight * scale


_KINDS: Mapping[str, Callable[[Packing, Mapping[str, Tensor]], Tensor]] = {
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
    "scaled": _scaled,
}
