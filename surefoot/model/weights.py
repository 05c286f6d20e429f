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
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surefoot import gguf
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from surefoot.model.layout import gguf_names, ignored, stored_names, text_name
from surefoot.model.quants import Bytes, unpack
from surefoot.spec import ModelSpec, read_json, tensor_shapes

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all and the name of the tensor just read."""

_INDEX = "model.safetensors.index.json"
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
    stored = _indexed(index, spec) if index.exists() else _shard(_only_file(folder), spec)
    return _Source(stored, _opened, stored_names(spec), mapped=True)


def _indexed(index: Path, spec: ModelSpec) -> list[_Stored]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty.")
    files = sorted(set(weight_map.values()))
    stored = [tensor for file in files for tensor in _shard(index.parent / file, spec)]
    present = {(tensor.name, tensor.file.name) for tensor in stored}
    for name, file in weight_map.items():
        if (text_name(name, spec), file) not in present:
            where = index.parent / file
            raise CheckpointError(f"{where}: tensor {name} is missing, though {_INDEX} says that it is there.")
    return stored


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


def _shard(path: Path, spec: ModelSpec) -> list[_Stored]:
    with _opened(path) as handle:
        return [_described(path, handle, name, spec) for name in handle.keys()]  # noqa: SIM118 - it is no mapping


def _described(path: Path, handle: Any, name: str, spec: ModelSpec) -> _Stored:
    about, needed = handle.get_slice(name), text_name(name, spec)
    kind, shape = about.get_dtype(), tuple(about.get_shape())
    if kind not in _DTYPES and not ignored(needed, spec):
        raise CheckpointError(f"{path}: tensor {name} has type {kind}; readable types are {', '.join(_DTYPES)}.")
    nbytes = math.prod(shape) * _DTYPES.get(kind, torch.float32).itemsize
    return _Stored(needed, shape, nbytes, path, lambda file: file.get_tensor(name))


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
