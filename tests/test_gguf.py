"""The GGUF header reader, against the `gguf` package."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.checkpoint import find
from surefoot.errors import CheckpointError
from surefoot.gguf import read_header

oracle = pytest.importorskip("gguf")

METADATA = {
    "a.flag": True,
    "a.text": "naïve ▁ 漢字",
    "a.number": 7,
    "a.real": 0.5,
    "a.ints": [1, 2, 3],
    "a.reals": [0.5, -1.5],
    "a.strings": ["x", "", "Ġthe"],
}


@pytest.fixture
def small(write_gguf: Any) -> Path:
    rows = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
    packed = oracle.quants.quantize(rows, oracle.GGMLQuantizationType.Q8_0)
    path: Path = write_gguf(
        METADATA,
        {
            "plain": rows,
            "half": rows.astype(np.float16),
            "packed": (packed, oracle.GGMLQuantizationType.Q8_0),
            "odd": np.ones(5, np.float32),
        },
    )
    return path


def test_reads_what_the_reference_reads(small: Path) -> None:
    """Every metadata value and every tensor's shape, place and size equal those of the gguf package."""
    header, reference = read_header(small), oracle.GGUFReader(small)
    for key, value in METADATA.items():
        assert header.metadata[key] == value
    assert len(header.tensors) == len(reference.tensors) == 4
    for info, tensor in zip(header.tensors, reference.tensors, strict=True):
        assert info.name == tensor.name
        assert info.shape == tuple(reversed([int(size) for size in tensor.shape]))
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


def test_embedded_model_opens_at_once() -> None:
    """The embedded model's header, with its 98,000 strings, is read in a fraction of a second."""
    path = find("smollm2").path
    started = time.perf_counter()
    header = read_header(path)
    assert time.perf_counter() - started < 2  # 0.1 s when nothing else runs; the gguf package takes 4
    assert len(header.tensors) == 272
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    last = max(header.tensors, key=lambda info: info.offset)
    assert last.offset + last.nbytes == path.stat().st_size


def test_every_truncation_is_an_error(small: Path) -> None:
    """A file cut anywhere is a CheckpointError that names the file; it never reads past the end."""
    data = small.read_bytes()
    header_end = read_header(small).tensors[0].offset
    for size in [*range(0, header_end, 7), header_end + 1, len(data) - 64]:
        small.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            read_header(small)


def test_flipped_bytes_never_escape(small: Path) -> None:
    """Whatever byte of the header is damaged, the outcome is a header or a CheckpointError, soon."""
    data = small.read_bytes()
    rng = np.random.default_rng(0)
    header_end = read_header(small).tensors[0].offset
    errors = 0
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.integers(header_end)] ^= 1 << int(rng.integers(8))
        small.write_bytes(damaged)
        try:
            read_header(small)
        except CheckpointError:
            errors += 1
    assert errors > 50


def header_bytes(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, keys) + rest


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read as GGUF"),
        (b"PK" + bytes(30), "instead of b'GGUF'"),
        (header_bytes(version=1), "version 1"),
        (header_bytes(version=struct.unpack(">I", struct.pack("<I", 3))[0]), "little endian"),
        (header_bytes(keys=1, rest=key(b"a.b", 99, b"")), r"a\.b has value type 99"),
        (header_bytes(keys=1, rest=key(b"a.b", 9, struct.pack("<IQ", 4, 1 << 60))), r"a\.b needs"),
        (header_bytes(keys=1, rest=key(b"a.b", 9, struct.pack("<IQ", 8, 1 << 60))), r"a\.b is corrupt"),
        (header_bytes(keys=1, rest=key(b"a.b", 9, struct.pack("<IQ", 9, 1) * 40)), "nests arrays deeper"),
        (header_bytes(keys=1, rest=key(b"a.b", 8, struct.pack("<Q", 2) + b"\xff\xfe")), r"a\.b is corrupt"),
        (header_bytes(keys=1, rest=key(b"general.alignment", 4, bytes(4))), "general.alignment 0"),
        (header_bytes(tensors=1, rest=key(b"t", 5, b"")), "t has 5 dimensions"),
        (header_bytes(tensors=1, rest=key(b"t", 1, struct.pack("<QIQ", 256, 13, 0))), "t has type Q5_K"),
        (header_bytes(tensors=1, rest=key(b"t", 1, struct.pack("<QIQ", 33, 8, 0))), "blocks of 32"),
        (header_bytes(tensors=1, rest=key(b"t", 1, struct.pack("<QIQ", 32, 0, 0))), "tensor t ends at byte"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, data: bytes, said: str) -> None:
    """Damage and unsupported versions, values and types are a CheckpointError naming the key or tensor."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        read_header(path)
