"""Weights on disk → tensors under the names of `tensor_shapes`, one at a time: host memory holds about one tensor.

What a checkpoint holds is compared with what the model needs before the first byte of data is read. A tensor that holds
several of ours below each other (q, k, v; gate, up) is yielded in pieces:

    transformer.encoder.layers.0.self_attention.query_key_value.weight
    [ model.layers.0.self_attn.q_proj.weight | ….k_proj.weight | ….v_proj.weight ]   rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surefoot import gguf
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from surefoot.model import packed
from surefoot.model.layout import gguf_names, ignored, stored_names, text_name
from surefoot.model.quants import Bytes, unpack
from surefoot.quantized import Packing
from surefoot.spec import ModelSpec, read_json, tensor_shapes

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all and the name of the tensor just read."""

_INDEX = "model.safetensors.index.json"
_ITEM = {"F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "F64": 8, "I64": 8}
"""Bytes of an element, where not 4."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DUMMY_STD = 0.02


class _Stored(NamedTuple):
    """One tensor of a checkpoint, not read yet. `name` is without the prefixes of a multimodal model."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    read: Callable[[Any], Tensor]
    """Takes the opened file."""


class _Source(NamedTuple):
    stored: list[_Stored]
    open: Callable[[Path], AbstractContextManager[Any]]
    pieces: Mapping[str, tuple[str, ...]]
    """Stored name → our names, as `layout.stored_names`."""
    mapped: bool
    """What is read lies in mapped pages of the file."""


def load(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in the files' order, cast to `dtype`, in memory of its own on `device`.

    One file is mapped at a time. Raises CheckpointError naming the tensor or file where one is missing, unexpected,
    twice there, of a wrong shape, of a type that cannot be read, or cut off; the comparison comes before the first
    tensor.
    """
    source = _gguf(checkpoint.path, spec) if checkpoint.kind == "gguf" else _safetensors(checkpoint.path, spec)
    shapes = tensor_shapes(spec)
    needed = _checked(source, shapes, spec)
    done, total = 0, sum(tensor.nbytes for tensor in needed)
    for path, tensors in groupby(needed, key=lambda tensor: tensor.file):
        with source.open(path) as file:
            for tensor in tensors:
                rows = {name: shapes[name][0] for name in source.pieces[tensor.name]}
                for name, piece in zip(rows, torch.split(tensor.read(file), list(rows.values())), strict=True):
                    yield name, _moved(piece, device, dtype, mapped=source.mapped)
                del piece  # it holds the file's mapping, and the next file is opened soon
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total, tensor.name)


def _moved(piece: Tensor, device: torch.device | str, dtype: torch.dtype, *, mapped: bool) -> Tensor:
    """`piece` on the device and of the dtype. Mapped pages are always copied: a file that is replaced while serving
    must not reach into a running model."""
    moved = piece.to(device)
    return moved.to(dtype, copy=mapped and moved is piece)


def dummy(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Random weights in the shapes of `spec`, drawn on `device`, the same there for the same seed: normal of std 0.02,
    biases 0, norms that multiply by 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in tensor_shapes(spec).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1 - spec.norm_offset)
        elif name.endswith(".bias"):
            yield name, tensor.zero_()
        else:
            yield name, tensor.normal_(std=_DUMMY_STD, generator=generator)


def expected_names(spec: ModelSpec) -> frozenset[str]:
    """Names that `load` yields for this spec, each once."""
    return frozenset(tensor_shapes(spec))


def _checked(source: _Source, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> list[_Stored]:
    """The stored tensors that the model needs, if they are all of them. Raises CheckpointError naming what differs."""
    needed: dict[str, _Stored] = {}
    for tensor in source.stored:
        name, where = tensor.name, tensor.file
        if ignored(name, spec):
            continue
        if name not in source.pieces:
            raise CheckpointError(f"{where}: tensor {name} is not part of {spec.architecture}.")
        if name in needed:
            raise CheckpointError(f"{where}: tensor {name} is there twice, first in {needed[name].file}.")
        pieces = [shapes[piece] for piece in source.pieces[name]]
        shape = (sum(piece[0] for piece in pieces), *pieces[0][1:])
        if tensor.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}; its configuration asks for {list(shape)}."
            )
        needed[name] = tensor
    if missing := [name for name in source.pieces if name not in needed]:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(f"The checkpoint is incomplete: tensor {missing[0]}{more} missing.")
    return list(needed.values())


# ---- safetensors ----------------------------------------------------------------------------------------------------


def _safetensors(folder: Path, spec: ModelSpec) -> _Source:
    """Tensors of a Hugging Face directory: of the files its index names, or of its only file."""
    index = folder / _INDEX
    found = _indexed(index, spec) if index.exists() else _shard(_only_file(folder), spec)
    return _Source(list(_described(found, spec)), _opened, stored_names(spec), mapped=True)


class _Found(NamedTuple):
    """One tensor of a safetensors file. `name` is without the prefixes of a multimodal model, `key` with them."""

    name: str
    key: str
    kind: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM.get(self.kind, 4)


def _indexed(index: Path, spec: ModelSpec) -> list[_Found]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty.")
    files = sorted(set(weight_map.values()))
    found = [tensor for file in files for tensor in _shard(index.parent / file, spec)]
    present = {(tensor.name, tensor.file.name) for tensor in found}
    for name, file in weight_map.items():
        if (text_name(name, spec), file) not in present:
            where = index.parent / file
            raise CheckpointError(f"{where}: tensor {name} is missing, though {_INDEX} says that it is there.")
    return found


def _only_file(folder: Path) -> Path:
    if (folder / "model.safetensors").exists():
        return folder / "model.safetensors"
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise CheckpointError(f"{folder}: several *.safetensors need a {_INDEX} that says what is where. Found: {names}.")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        handle: Any = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing, though {_INDEX} names it.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error}); fetch it again.") from error
    with handle:
        yield handle


def _shard(path: Path, spec: ModelSpec) -> list[_Found]:
    with _opened(path) as handle:
        found = []
        for key in handle.keys():  # noqa: SIM118 - it is no mapping
            about = handle.get_slice(key)
            found.append(_Found(text_name(key, spec), key, about.get_dtype(), tuple(about.get_shape()), path))
        return found


def _described(found: list[_Found], spec: ModelSpec) -> Iterator[_Stored]:
    """Tensors as the network knows them: those that make one matrix together are one, those that nobody needs left."""
    packing, needed = spec.packing, stored_names(spec)
    packs = {} if packing is None else _packs(packing, found)
    members = {part.name for parts in packs.values() for part in parts.values()}
    if packing is not None:
        yield from (_packed(packing, name, parts) for name, parts in packs.items())
    for tensor in found:
        stem, _, part = tensor.name.rpartition(".")
        moot = f"{stem}.weight" in packs and (
            part in packed.UNUSED or (tensor.name not in needed and part == "bias" and _empty(tensor))
        )
        if tensor.name not in members and not moot:
            yield _plain(tensor, spec)


def _plain(tensor: _Found, spec: ModelSpec) -> _Stored:
    name, key, kind, shape, path = tensor
    if kind not in _DTYPES and not ignored(name, spec):
        raise CheckpointError(f"{path}: tensor {key} has type {kind}; readable types are {', '.join(_DTYPES)}.")
    return _Stored(name, shape, tensor.nbytes, path, lambda file: file.get_tensor(key))


def _packs(packing: Packing, found: list[_Found]) -> dict[str, dict[str, _Found]]:
    """Name of a matrix → the tensors that make it."""
    by_name = {tensor.name: tensor for tensor in found}
    main, *others = packed.PARTS[packing.kind]
    packs: dict[str, dict[str, _Found]] = {}
    for tensor in found:
        stem, _, part = tensor.name.rpartition(".")
        if part != main or (packing.kind == "scaled" and tensor.kind not in ("F8_E4M3", "I8")):
            continue
        there = {other: by_name[f"{stem}.{other}"] for other in others if f"{stem}.{other}" in by_name}
        if missing := [other for other in others if other not in there and other not in packed.OPTIONAL]:
            raise CheckpointError(f"{tensor.file}: tensor {stem}.{missing[0]} is missing beside {tensor.name}.")
        packs[f"{stem}.weight"] = {main: tensor, **there}
    return packs


def _packed(packing: Packing, name: str, parts: Mapping[str, _Found]) -> _Stored:
    first = next(iter(parts.values()))
    shape = packed.logical_shape(packing, {part: tensor.shape for part, tensor in parts.items()})
    if isinstance(shape, str):
        raise CheckpointError(f"{first.file}: tensor {first.name}: {shape}.")

    def read(file: Any) -> Tensor:
        return packed.dequantize(packing, {part: _tensor_of(tensor, first, file) for part, tensor in parts.items()})

    return _Stored(name, shape, sum(tensor.nbytes for tensor in parts.values()), first.file, read)


def _tensor_of(tensor: _Found, first: _Found, file: Any) -> Tensor:
    """A part of a matrix, out of the opened `file` of its first part or out of another."""
    if tensor.file == first.file:
        return cast(Tensor, file.get_tensor(tensor.key))
    with _opened(tensor.file) as other:
        return cast(Tensor, other.get_tensor(tensor.key)).clone()


def _empty(bias: _Found) -> bool:
    """Whether it is all zeros: AutoGPTQ stores such a bias for every layer, whether the network has it or not."""
    with _opened(bias.file) as file:
        return not bool(file.get_tensor(bias.key).any())


# ---- GGUF -----------------------------------------------------------------------------------------------------------


_REORDERED = ("LlamaForCausalLM", "SmolLM3ForCausalLM")
"""Of whose rows of q and k llama.cpp's converter changes the order."""


def _gguf(path: Path, spec: ModelSpec) -> _Source:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    reordered = spec.architecture in _REORDERED
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if reordered else {}

    def stored(info: gguf.TensorInfo) -> _Stored:
        rotated = heads.get(info.name.split(".")[-2])
        shape = info.shape if len(info.shape) < 3 else (math.prod(info.shape[:-1]), info.shape[-1])
        return _Stored(
            info.name,
            shape,
            info.nbytes,
            path,
            lambda file: dequantize(file, info, rotated_heads=rotated).reshape(shape),
        )

    found = [stored(info) for info in gguf.read_header(path).tensors]
    return _Source(found, lambda _: nullcontext(data), gguf_names(spec), mapped=False)


def dequantize(data: Bytes, info: gguf.TensorInfo, *, rotated_heads: int | None = None) -> Tensor:
    """The tensor at `info.offset` of the file's bytes: float32, or float16 and bfloat16 as stored.

    llama.cpp rotates neighbouring pairs where Hugging Face rotates the two halves of a head, so its files hold the rows
    of q and k in another order: row 2i+j of a head there is row j·head_dim/2+i here. `rotated_heads` (the number of
    heads) puts them back, on the packed rows, which are smallest.
    """
    raw = np.asarray(data[info.offset : info.offset + info.nbytes])
    if rotated_heads is not None:
        rows = raw.reshape(rotated_heads, info.shape[0] // rotated_heads // 2, 2, -1)
        raw = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
    if info.type in _DTYPES:
        return torch.from_numpy(raw.copy()).view(_DTYPES[info.type]).reshape(info.shape)
    return torch.from_numpy(unpack(raw, info.type)).reshape(info.shape)
