"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import surefoot.device  # noqa: F401 - before any test imports torch, since it sets what torch's libraries read once

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """`write_gguf(metadata, tensors)` → path of a file written by the `gguf` package, which is the oracle.

    Tensors are arrays, or pairs of packed rows and a `gguf.GGMLQuantizationType`.
    """
    gguf = pytest.importorskip("gguf")

    def write(metadata: Mapping[str, Any], tensors: Mapping[str, Any], *, name: str = "model.gguf") -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, arch=str(metadata.get("general.architecture", "llama")))
        for key, value in metadata.items():
            add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32, list: writer.add_array}
            add.get(type(value), writer.add_uint32)(key, value)
        for key, value in tensors.items():
            data, kind = value if isinstance(value, tuple) else (value, None)
            writer.add_tensor(key, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write
