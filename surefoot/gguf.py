"""Read a GGUF header: metadata and where each tensor lies. No tensor is touched, so a large file opens at once.

    "GGUF" version n_tensors n_metadata | key type value … | name dims type offset … | padding | tensor data …
                                                                       └─ counted from here ──┘

Numbers are little endian; strings are a 64-bit length and UTF-8. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from surefoot.errors import CheckpointError
from surefoot.types import Value

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Readable tensor types: elements and bytes of a block."""
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 39: "MXFP4",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_DIMS = 4


class TensorInfo(Value, frozen=True):
    """One tensor of the file. `shape` is in torch's order: the last dimension is contiguous, quantized by blocks."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class Header(Value, frozen=True):
    """What a GGUF file says about itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Metadata and tensor table of a GGUF file, every length checked against the file's size.

    Raises CheckpointError naming the file and what was being read where it is truncated, corrupt or of a type that
    cannot be read here.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        raise CheckpointError(f"{path}: cannot be read as GGUF: {error}") from error


def floats(header: Header, name: str) -> tuple[float, ...]:
    """The numbers of a small F32 tensor. Raises CheckpointError where it is not there, or of another type."""
    info = next((info for info in header.tensors if info.name == name), None)
    if info is None or info.type != "F32":
        kind = "missing" if info is None else f"of type {info.type}, not F32"
        raise CheckpointError(f"{header.path}: tensor {name} is {kind}.")
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return struct.unpack(f"<{info.nbytes // 4}f", file.read(info.nbytes))


class _Reader:
    """A cursor over the file that knows what it is reading, for the error's sake."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.at = 0
        self.reading = "the header"

    def header(self) -> Header:
        magic, version, n_tensors, n_metadata = self.unpack("<4sIQQ")
        if magic != b"GGUF":
            raise self.error(f"starts with {magic!r} instead of b'GGUF'")
        if version not in (2, 3):
            raise self.error(f"is GGUF version {version}; 2 and 3 (little endian) can be read")
        metadata: dict[str, Any] = {}
        for index in range(n_metadata):
            self.reading = f"metadata key {index + 1} of {n_metadata}"
            key = self.string()
            self.reading = f"metadata {key}"
            metadata[key] = self.value(*self.unpack("<I"))
        tensors = [self.tensor_info(index, n_tensors) for index in range(n_tensors)]
        base = self.data_start(metadata)
        return Header(path=self.path, metadata=metadata, tensors=tuple(self.located(info, base) for info in tensors))

    def data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self.error(f"has general.alignment {alignment!r}, which is not a positive number")
        return -(-self.at // alignment) * alignment

    def tensor_info(self, index: int, count: int) -> TensorInfo:
        self.reading = f"tensor {index + 1} of {count}"
        name = self.string()
        self.reading = f"tensor {name}"
        (n_dims,) = self.unpack("<I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self.error(f"has {n_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        *dims, number, offset = self.unpack(f"<{n_dims}QIQ")
        type_name = _TYPE_NAMES.get(number, f"number {number}")
        if type_name not in BLOCKS:
            raise self.error(f"has type {type_name}; readable types are {', '.join(BLOCKS)}")
        block, block_bytes = BLOCKS[type_name]
        if dims[0] % block:
            raise self.error(f"has rows of {dims[0]} elements, which blocks of {block} ({type_name}) do not divide")
        shape = tuple(reversed(dims))
        nbytes = math.prod(shape) // block * block_bytes
        return TensorInfo(name=name, type=type_name, shape=shape, offset=offset, nbytes=nbytes)

    def located(self, info: TensorInfo, base: int) -> TensorInfo:
        """`info` with its offset counted from the start of the file."""
        offset = base + info.offset
        if offset + info.nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: tensor {info.name} ends at byte {offset + info.nbytes:,}, but the file has "
                f"{self.size:,} bytes: it is truncated; fetch it again."
            )
        return TensorInfo(name=info.name, type=info.type, shape=info.shape, offset=offset, nbytes=info.nbytes)

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(nesting + 1)
        if kind not in _SCALARS:
            raise self.error(f"has value type {kind}, which GGUF does not define")
        return self.unpack("<" + _SCALARS[kind])[0]

    def array(self, nesting: int) -> list[Any]:
        if nesting > _MAX_NESTING:
            raise self.error(f"nests arrays deeper than {_MAX_NESTING}")
        kind, count = self.unpack("<IQ")
        if kind in _SCALARS:
            # The count comes from the file: check it before struct is asked for a format of that size.
            self.require(count * struct.calcsize("<" + _SCALARS[kind]))
            return list(self.unpack(f"<{count}{_SCALARS[kind]}"))
        if kind == _STRING:
            return self.strings(count)
        return [self.value(kind, nesting) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """`count` strings in one tight loop: vocabularies and merges are what a header is made of."""
        length_at, data, at, size = struct.Struct("<Q").unpack_from, self.data, self.at, self.size
        found = []
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                if end > size:
                    break
                found.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError) as error:
            raise self.error(f"is corrupt at its string {len(found) + 1:,} of {count:,}: {error}") from error
        if len(found) < count:
            raise self.error(f"ends within its string {len(found) + 1:,} of {count:,}")
        self.at = at
        return found

    def string(self) -> str:
        return self.strings(1)[0]

    def unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        self.require(size)
        values = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return values

    def require(self, size: int) -> None:
        if self.at + size > self.size:
            raise self.error(f"needs {size:,} bytes at byte {self.at:,}, but the file has {self.size:,} bytes")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.reading} {what}. The file is truncated, corrupt or not supported.")
