"""Packed GGUF blocks → float32, bit for bit as the gguf package unpacks them.

Q8_0 [d | 32 × int8]                       d·q
Q4_0 [d | 16 bytes]                        d·(q - 8)         low nibbles first, then the high ones
Q4_1 [d | m | 16 bytes]                    d·q + m
Q4_K [d | dmin | 12 bytes | 128 bytes]     d·s·q - dmin·m    8 groups of 32, scales s and minima m of 6 bits
Q6_K [128 bytes | 64 bytes | 16 × s | d]   d·s·(q - 32)      16 groups of 16, q of 4 + 2 bits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from surefoot import gguf

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_CHUNK = 1 << 17  # elements unpacked at a time: 512 KiB of float32, which stays in the cache


def unpack(raw: Bytes, kind: str) -> Floats:
    """The elements [n] of packed bytes; `kind` is one of the quantized types of `gguf.BLOCKS`."""
    elements, nbytes = gguf.BLOCKS[kind]
    blocks = raw.reshape(-1, nbytes)
    values: Floats = np.empty((len(blocks), elements), dtype=np.float32)
    step = _CHUNK // elements
    for start in range(0, len(blocks), step):
        _UNPACK[kind](blocks[start : start + step], values[start : start + step])
    return values.reshape(-1)


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


def _q4_k(blocks: Bytes, out: Floats) -> None:
    # The 12 bytes hold the low 6 bits of s0…s3 and m0…m3, then s4…s7 and m4…m7 as nibbles whose upper two bits fill the
    # tops of the first eight bytes.
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 8, 32)
    np.copyto(groups[:, 0::2], packed & 15)
    np.copyto(groups[:, 1::2], packed >> 4)
    groups *= (_half(blocks, 0) * scales)[:, :, None]
    groups -= (_half(blocks, 2) * minima)[:, :, None]


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    halves = out.reshape(-1, 2, 4, 32)  # each half: four runs of 32, by nibble and by pair of upper bits
    for run in range(4):
        nibble = low[:, :, run % 2] >> (4 * (run // 2)) & 15
        np.copyto(halves[:, :, run], nibble | (high >> (2 * run) & 3) << 4)
    out -= 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    out.reshape(-1, 16, 16)[...] *= scales[:, :, None]


_UNPACK: Mapping[str, Callable[[Bytes, Floats], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
