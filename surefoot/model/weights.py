"""Weights on disk → tensors under their Hugging Face names, one at a time: host memory holds about one tensor.

What a checkpoint holds is compared with what the model needs before the first byte of data is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from surefoot import gguf
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from surefoot.spec import ModelSpec, read_json, tensor_shapes

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all and the name of the tensor just read."""
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 12  # blocks dequantized at a time: 512 KiB of float32, which stays in the cache
_DUMMY_STD = 0.02
_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_ROOTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class _Stored(NamedTuple):
    """One tensor of a checkpoint, not read yet."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    where: str
    read: Callable[[], torch.Tensor]


def load(
    checkpoint: Checkpoint, spec: ModelSpec, *, dtype: torch.dtype, progress: Progress | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model in the file's order, cast to `dtype`, in memory of its own on the CPU.

    Raises CheckpointError naming the tensor or file where one is missing, unexpected, twice there, of a wrong shape, of
    a type that cannot be read, or cut off; the comparison comes before the first tensor.
    """
    with ExitStack() as open_files:
        stored = _gguf(checkpoint, spec) if checkpoint.kind == "gguf" else _safetensors(checkpoint.path, open_files)
        needed = _checked(spec, stored)
        done, total = 0, sum(tensor.nbytes for tensor in needed)
        for tensor in needed:
            yield tensor.name, tensor.read().to(dtype)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total, tensor.name)


def dummy(spec: ModelSpec, *, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights in the shapes of `spec`, the same for the same seed: normal of std 0.02, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(spec).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype)
        elif name.endswith(".bias"):
            yield name, torch.zeros(shape, dtype=dtype)
        else:
            yield name, torch.empty(shape, dtype=dtype).normal_(std=_DUMMY_STD, generator=generator)


def expected_names(spec: ModelSpec) -> frozenset[str]:
    """Names that `load` yields for this spec, each once."""
    return frozenset(tensor_shapes(spec))


def _checked(spec: ModelSpec, stored: Iterable[_Stored]) -> list[_Stored]:
    """Those of `stored` that the model needs, if they are all of them. Raises CheckpointError naming what differs."""
    shapes = tensor_shapes(spec)
    needed: dict[str, _Stored] = {}
    for tensor in stored:
        if _ignored(tensor.name, spec):
            continue
        if tensor.name not in shapes:
            raise CheckpointError(f"{tensor.where}: tensor {tensor.name} is not part of {spec.architecture}.")
        if tensor.name in needed:
            first = needed[tensor.name].where
            raise CheckpointError(f"{tensor.where}: tensor {tensor.name} is there twice, first in {first}.")
        if tensor.shape != shapes[tensor.name]:
            raise CheckpointError(
                f"{tensor.where}: tensor {tensor.name} has shape {list(tensor.shape)}; "
                f"its configuration asks for {list(shapes[tensor.name])}."
            )
        needed[tensor.name] = tensor
    if missing := [name for name in shapes if name not in needed]:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(f"The checkpoint is incomplete: tensor {missing[0]}{more} missing.")
    return list(needed.values())


def _ignored(name: str, spec: ModelSpec) -> bool:
    """Tensors that carry nothing: rotary frequencies follow from the configuration, a tied output is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == "lm_head.weight")


# ---- safetensors ----------------------------------------------------------------------------------------------------


def _safetensors(folder: Path, open_files: ExitStack) -> list[_Stored]:
    """Tensors of a Hugging Face directory: of the files its index names, or of its only file."""
    index = folder / _INDEX
    if not index.exists():
        return _shard(_only_file(folder), open_files)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty.")
    stored = [tensor for name in sorted(set(weight_map.values())) for tensor in _shard(folder / name, open_files)]
    present = {(tensor.name, Path(tensor.where).name) for tensor in stored}
    for name, file in weight_map.items():
        if (name, file) not in present:
            raise CheckpointError(f"{folder / file}: tensor {name} is missing, though {_INDEX} says that it is there.")
    return stored


def _only_file(folder: Path) -> Path:
    if (folder / "model.safetensors").exists():
        return folder / "model.safetensors"
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise CheckpointError(f"{folder}: several *.safetensors need a {_INDEX} that says what is where. Found: {names}.")


def _shard(path: Path, open_files: ExitStack) -> list[_Stored]:
    try:
        handle: Any = open_files.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing, though {_INDEX} names it.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error}); fetch it again.") from error
    return [_stored_tensor(path, handle, name) for name in handle.keys()]  # noqa: SIM118 - the handle is no mapping


def _stored_tensor(path: Path, handle: Any, name: str) -> _Stored:
    about = handle.get_slice(name)
    kind, shape = about.get_dtype(), tuple(about.get_shape())
    if kind not in _DTYPES and not name.endswith("rotary_emb.inv_freq"):
        raise CheckpointError(f"{path}: tensor {name} has type {kind}; readable types are {', '.join(_DTYPES)}.")
    nbytes = math.prod(shape) * _DTYPES.get(kind, torch.float32).itemsize
    # Mapped pages are copied: a file that is replaced while serving must not reach into a running model.
    return _Stored(name, shape, nbytes, str(path), lambda: handle.get_tensor(name).clone())


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def _gguf(checkpoint: Checkpoint, spec: ModelSpec) -> list[_Stored]:
    path = checkpoint.path
    data = np.memmap(path, dtype=np.uint8, mode="r")
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}

    def stored(info: gguf.TensorInfo) -> _Stored:
        name = huggingface_name(info.name)
        rotated = heads.get(name.split(".")[-2]) if name.count(".") > 1 else None
        return _Stored(name, info.shape, info.nbytes, str(path), lambda: dequantize(data, info, rotated_heads=rotated))

    return [stored(info) for info in gguf.read_header(path).tensors]


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; names that are not known stay as they are."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_GGUF_NAMES[part]}.{kind}" if part in _GGUF_NAMES else name
    root, _, kind = name.rpartition(".")
    return f"{_GGUF_ROOTS[root]}.{kind}" if root in _GGUF_ROOTS else name


def dequantize(data: Bytes, info: gguf.TensorInfo, *, rotated_heads: int | None = None) -> torch.Tensor:
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
    unpack, (elements, nbytes) = _UNPACK[info.type], gguf.BLOCKS[info.type]
    blocks = raw.reshape(-1, nbytes)
    values: Floats = np.empty((len(blocks), elements), dtype=np.float32)
    for start in range(0, len(blocks), _CHUNK):
        unpack(blocks[start : start + _CHUNK], values[start : start + _CHUNK])
    return torch.from_numpy(values.reshape(info.shape))


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """16 bytes → 32 numbers: the low nibbles come first, then the high ones."""
    np.copyto(out[:, :16], packed & 15)
    np.copyto(out[:, 16:], packed >> 4)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


_UNPACK: Mapping[str, Callable[[Bytes, Floats], None]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
