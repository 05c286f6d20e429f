"""Inputs of a step on a GPU: packed on the host, copied at once, laid out alike for eager steps and captured graphs.

Rows come in two kinds, and kernels too: rows of one token first (decode), then rows of several (prefill).

    rows     [ decode ...... )[ prefill ......... )
    tokens   [ one each ..... )[ row by row ................ )
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.ops.sample_triton import Rows
from surefoot.types import Sample, Work

Array = npt.NDArray[Any]

ALIGNMENT = 16
"""Of every field: kernels are compiled once for pointers so aligned, and once more for others."""

_FIELDS: dict[str, tuple[str, str]] = {
    "seed": ("int64", "samples"),
    "index": ("int64", "samples"),
    "kv_slots": ("int64", "tokens"),
    "token": ("int32", "tokens"),
    "position": ("int32", "tokens"),
    "pool_row": ("int32", "tokens"),
    "row_slot": ("int32", "rows"),
    "length": ("int32", "rows"),
    "starts": ("int32", "bounds"),
    "source": ("int32", "samples"),
    "temperature": ("float32", "samples"),
    "top_k": ("int32", "samples"),
    "top_p": ("float32", "samples"),
    "min_p": ("float32", "samples"),
    "draw_slot": ("int32", "samples"),
    "draw_position": ("int32", "samples"),
}


@dataclass(frozen=True)
class Shape:
    """How many of each there are in a step. Equal shapes have equal addresses, which is what a graph needs."""

    tokens: int
    decode_rows: int
    rows: int
    samples: int
    padded: bool = False
    """A graph's shape, which a step may fill in part: there is a sample for each row, used or not."""

    def count(self, what: str) -> int:
        return {
            "tokens": self.tokens,
            "rows": self.rows,
            "bounds": self.rows + 1,
            "samples": self.samples,
        }[what]

    def fields(self) -> list[tuple[str, str, int, int]]:
        """(name, dtype, first byte, count) of each field."""
        found, offset = [], 0
        for name, (dtype, what) in _FIELDS.items():
            found.append((name, dtype, offset, self.count(what)))
            offset += np.dtype(dtype).itemsize * self.count(what)
            offset += -offset % ALIGNMENT
        return found

    @property
    def bytes(self) -> int:
        _, dtype, offset, count = self.fields()[-1]
        return offset + np.dtype(dtype).itemsize * count


@dataclass(frozen=True)
class StepTensors:
    """Views of the device's copy of a step's inputs; see `_FIELDS` for their dtypes."""

    shape: Shape
    token: Tensor
    position: Tensor
    pool_row: Tensor
    kv_slots: Tensor
    row_slot: Tensor
    length: Tensor
    starts: Tensor
    source: Tensor
    """The token whose logits a sample is drawn from."""
    rows: Rows


class Staging:
    """Pinned buffers, two in turn (a plan may be in flight while the next is packed), and their copy on the device.

    A buffer is written again two launches later, when the plan that read it has been collected.
    """

    def __init__(self, *, tokens: int, rows: int, samples: int, device: torch.device) -> None:
        most = Shape(tokens, 0, rows, samples).bytes + ALIGNMENT * len(_FIELDS)
        self._hosts = [torch.empty(most, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._device = torch.empty(most, dtype=torch.uint8, device=device)
        self._turn = 0

    def begin(self, shape: Shape) -> dict[str, Array]:
        """Host arrays to fill for this step."""
        self._turn = 1 - self._turn
        buffer = self._hosts[self._turn].numpy()
        return {
            name: buffer[at : at + np.dtype(dtype).itemsize * count].view(dtype)
            for name, dtype, at, count in shape.fields()
        }

    def send(self, shape: Shape) -> None:
        """Copy what was filled; kernels launched from now on see it, those before do not."""
        self._device[: shape.bytes].copy_(self._hosts[self._turn][: shape.bytes], non_blocking=True)

    def tensors(self, shape: Shape) -> StepTensors:
        """The device's views for steps of this shape."""
        views = {
            name: self._device[at : at + np.dtype(dtype).itemsize * count].view(getattr(torch, dtype))
            for name, dtype, at, count in shape.fields()
        }
        draws = Rows(
            temperature=views.pop("temperature"),
            top_k=views.pop("top_k"),
            top_p=views.pop("top_p"),
            min_p=views.pop("min_p"),
            seed=views.pop("seed"),
            index=views.pop("index"),
            slot=views.pop("draw_slot"),
            position=views.pop("draw_position"),
        )
        return StepTensors(shape=shape, rows=draws, **views)


class BlockTables:
    """The device's block tables by slot, and what of them it has been told.

    `updates` yields only what changed; after a failure `forget` makes everything be told again, since nobody knows
    what arrived.
    """

    def __init__(self, slots: int, width: int, *, sink: int, device: torch.device) -> None:
        self.device = torch.full((slots, width), sink, dtype=torch.int32, device=device)
        self._width = width
        self._told: list[tuple[int, ...]] = [()] * slots

    def forget(self) -> None:
        self._told = [()] * len(self._told)

    def updates(self, works: Iterable[Work]) -> list[tuple[int, int]]:
        """(index in the flattened tables, block) of each entry to write."""
        found: list[tuple[int, int]] = []
        for work in works:
            told, table = self._told[work.slot], work.table
            if told is table:
                continue
            known = len(told) if table[: len(told)] == told else 0
            base = work.slot * self._width
            found += [(base + at, table[at]) for at in range(known, len(table))]
            self._told[work.slot] = table
        return found


@dataclass(frozen=True)
class Draw:
    """One token to draw: for which sample of which work, and from which row of the step's logits."""

    work: Work
    sample: Sample
    place: int


def pack(
    arrays: dict[str, Array], works: Sequence[Work], shape: Shape, *, block_size: int, pad_slot: int
) -> list[Draw]:
    """Fill the arrays of a step of `shape` for `works`, decode rows first; returns its draws.

    Where the shape has more of something than the works, the rest is padding: rows of length 0 that read the table of
    slot `pad_slot`, tokens that are stored nowhere, draws that are greedy and go nowhere.

        tokens   [ decodes )[ prefills .... )[ padding )
        rows     [ decodes )[ padding )| decode_rows |[ prefills )[ padding )
        samples  one per row in a padded shape (a graph's), else one per draw
    """
    decodes = [work for work in works if len(work.tokens) == 1]
    prefills = works[len(decodes) :]
    count = len(decodes)
    arrays["row_slot"][count:] = pad_slot
    arrays["length"][count:] = 0
    _fill_decodes(arrays, decodes, block_size)
    at, starts = count, [*range(count), *[count] * (shape.decode_rows - count)]
    for row, work in enumerate(prefills, shape.decode_rows):
        _fill_prefill(arrays, work, row, at, block_size)
        starts.append(at)
        at += len(work.tokens)
    arrays["starts"][:] = [*starts, *[at] * (shape.rows + 1 - len(starts))]
    for name, value in (("token", 0), ("position", 0), ("kv_slots", -1), ("pool_row", pad_slot)):
        arrays[name][at:] = value
    rows = [*range(count), *range(shape.decode_rows, shape.decode_rows + len(prefills))]
    draws = [Draw(work, sample, row) for work, row in zip(works, rows, strict=True) for sample in work.samples]
    if not shape.padded:
        draws = [Draw(draw.work, draw.sample, place) for place, draw in enumerate(draws)]
    lasts = {work.key: last for work, last in zip(works, _lasts(count, prefills), strict=True)}
    _fill_samples(arrays, draws, [lasts[draw.work.key] for draw in draws])
    return draws


def _lasts(count: int, prefills: Sequence[Work]) -> Iterable[int]:
    """The index of each work's last token."""
    yield from range(count)
    for work in prefills:
        count += len(work.tokens)
        yield count - 1


def _fill_decodes(arrays: dict[str, Array], works: Sequence[Work], block_size: int) -> None:
    starts = [work.start for work in works]
    rows = slice(0, len(works))
    arrays["token"][rows] = [work.tokens[0] for work in works]
    arrays["position"][rows] = starts
    arrays["length"][rows] = [start + 1 for start in starts]
    arrays["pool_row"][rows] = arrays["row_slot"][rows] = [work.slot for work in works]
    arrays["kv_slots"][rows] = [
        work.table[start // block_size] * block_size + start % block_size
        for work, start in zip(works, starts, strict=True)
    ]


def _fill_prefill(arrays: dict[str, Array], work: Work, row: int, at: int, block_size: int) -> None:
    span = slice(at, at + len(work.tokens))
    positions = np.arange(work.start, work.end)
    arrays["token"][span] = work.tokens
    arrays["position"][span] = positions
    arrays["pool_row"][span] = work.slot
    blocks = np.asarray(work.table, dtype=np.int64)[positions // block_size]
    arrays["kv_slots"][span] = blocks * block_size + positions % block_size
    arrays["row_slot"][row] = work.slot
    arrays["length"][row] = work.end


def _fill_samples(arrays: dict[str, Array], draws: Sequence[Draw], lasts: Sequence[int]) -> None:
    """Parameters of each draw at its place; all other places are greedy and go nowhere."""
    neutral = {"top_p": 1.0, "draw_slot": -1}
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "index", "draw_slot", "draw_position", "source"):
        arrays[name][:] = neutral.get(name, 0)
    places = [draw.place for draw in draws]
    params = [draw.work.params for draw in draws]
    arrays["temperature"][places] = [0.0 if each.greedy else each.temperature for each in params]
    arrays["top_k"][places] = [each.top_k for each in params]
    arrays["top_p"][places] = [each.top_p for each in params]
    arrays["min_p"][places] = [each.min_p for each in params]
    arrays["seed"][places] = np.array([draw.sample.seed for draw in draws], dtype=np.uint64).view(np.int64)
    arrays["index"][places] = [draw.sample.index for draw in draws]
    arrays["draw_slot"][places] = [draw.work.slot if draw.sample.child == draw.work.child else -1 for draw in draws]
    arrays["draw_position"][places] = [draw.work.end for draw in draws]
    arrays["source"][places] = lasts
