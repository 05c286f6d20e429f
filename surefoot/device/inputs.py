"""From a StepPlan to tensors: everything that a forward pass needs, built once per step and used by every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.device.kvcache import KVCache
from surefoot.ops.attention import LANES, ROWS, Segment, Tile
from surefoot.plan import QUERY_TILE
from surefoot.types import PENDING, SamplingParams, Work


class TokenPool:
    """Tokens of running sequences by [slot, position], int32: history for penalties, and inputs still in flight.

    Written at its position and nowhere else, so that running a step again writes the same.
    """

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.tokens = torch.zeros(slots, max_model_len + 1, dtype=torch.int32)

    def admit(self, work: Work) -> None:
        """Write what a plan brings: tokens below `start` if given, and inputs that are not PENDING."""
        row = self.tokens[work.slot]
        if work.known is not None:
            row[: len(work.known)] = torch.tensor(work.known, dtype=torch.int32)
        given = len(work.tokens) - (work.tokens[-1] == PENDING)
        row[work.start : work.start + given] = torch.tensor(work.tokens[:given], dtype=torch.int32)

    def put(self, slot: int, position: int, token: int) -> None:
        """Note a drawn token, at the position that it is going to have."""
        self.tokens[slot, position] = token

    def inputs(self, work: Work) -> Tensor:
        """Input ids of a work, [tokens] int32."""
        return self.tokens[work.slot, work.start : work.end]

    def history(self, work: Work) -> Tensor:
        """All tokens up to and with this step's inputs, [end] int32."""
        return self.tokens[work.slot, : work.end]


@dataclass(frozen=True)
class StepInputs:
    """One forward pass. `order` lists the works in the order of their rows: decoding rows by length, then prompts.

    `spans` are the rows begin … end of each work, in that order; `store_index` says where keys and values go.
    """

    tokens: Tensor
    positions: Tensor
    store_index: Tensor
    segments: tuple[Segment, ...]
    order: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def build(works: Sequence[Work], pool: TokenPool, cache: KVCache, group: int) -> StepInputs:
    """Tensors of a plan's works; `group` is the number of query heads per key head."""
    order = sorted(range(len(works)), key=lambda at: (len(works[at].tokens) > 1, -works[at].end, at))
    ordered = [works[at] for at in order]
    spans = list(_spans(ordered))
    decoding = [work for work in ordered if len(work.tokens) == 1]
    segments = [_decode_segment(cache, part, begin) for begin, part in _length_groups(decoding)]
    segments += [
        _prompt_segment(cache, work, begin, group)
        for work, (begin, _) in zip(ordered, spans, strict=True)
        if len(work.tokens) > 1
    ]
    positions = torch.cat([torch.arange(work.start, work.end) for work in ordered])
    return StepInputs(
        tokens=torch.cat([pool.inputs(work) for work in ordered]).long(),
        positions=positions,
        store_index=_store_index(cache, ordered, positions),
        segments=tuple(segments),
        order=tuple(order),
        spans=tuple(spans),
    )


def control_work(cache: KVCache, slot: int) -> Work:
    """A padding row on the sink block; `slot` is a row of the pool that no sequence uses."""
    return Work(
        request=-1,
        child=0,
        epoch=0,
        slot=slot,
        start=0,
        tokens=(0,),
        table=(cache.sink,),
        known=None,
        samples=(),
        params=SamplingParams(),
        decoding=False,
    )


def _spans(works: Sequence[Work]) -> Iterator[tuple[int, int]]:
    begin = 0
    for work in works:
        yield begin, begin + len(work.tokens)
        begin += len(work.tokens)


def _length_groups(works: Sequence[Work]) -> Iterator[tuple[int, list[Work]]]:
    """Split works, longest first, where one is under half as long as the longest of its group; with first rows."""
    begin = 0
    while begin < len(works):
        end = begin + 1
        while end < len(works) and 2 * works[end].end >= works[begin].end:
            end += 1
        yield begin, list(works[begin:end])
        begin = end


def _decode_segment(cache: KVCache, works: list[Work], begin: int) -> Segment:
    """One token each of several sequences, padded to the longest; short tables end in the sink."""
    ends = torch.tensor([work.end for work in works])
    blocks = _blocks(cache, int(ends.max()))
    tables = torch.full((len(works), blocks), cache.sink, dtype=torch.int64)
    for row, work in enumerate(works):
        held = min(blocks, len(work.table))
        tables[row, :held] = torch.tensor(work.table[:held])
    length = _padded(int(ends.max()))
    mask_from = int(ends.min())
    mask = torch.arange(mask_from, length)[None, :] >= ends[:, None]
    spread = mask.repeat_interleave(cache.kv_heads, 0)[:, None, :] if mask_from < length else None
    tile = Tile(begin, begin + len(works), len(works), length, spread, mask_from)
    return Segment(cache.head_index(tables), (tile,))


def _prompt_segment(cache: KVCache, work: Work, begin: int, group: int) -> Segment:
    """Several tokens of one sequence, in tiles of QUERY_TILE that each look as far as their last token."""
    blocks = _blocks(cache, work.end)
    table = torch.full((1, blocks), cache.sink, dtype=torch.int64)
    held = min(blocks, len(work.table))
    table[0, :held] = torch.tensor(work.table[:held])
    tiles = []
    for first in range(work.start, work.end, QUERY_TILE):
        end = min(first + QUERY_TILE, work.end)
        length = _padded(end)
        mask = _causal(first, end, length, group)
        row = begin + first - work.start
        tiles.append(Tile(row, row + end - first, 1, length, mask, first))
    return Segment(cache.head_index(table), tuple(tiles))


def _causal(first: int, end: int, length: int, group: int) -> Tensor:
    """True where the queries at positions first … end may not look, among keys first … length: [rows, keys].

    Rows are token-major, `group` per token, and padded as attention pads them (padding rows look at everything).
    """
    future = torch.arange(first, length)[None, :] > torch.arange(first, end)[:, None]
    rows = future.repeat_interleave(group, 0)
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % ROWS))


def _store_index(cache: KVCache, works: Sequence[Work], positions: Tensor) -> Tensor:
    size = cache.block_size
    blocks = []
    for work in works:
        first, last = work.start // size, (work.end - 1) // size
        blocks += [block for at in range(first, last + 1) for block in [work.table[at]] * _within(work, at, size)]
    return cache.token_index(torch.tensor(blocks), positions % size)


def _within(work: Work, block: int, size: int) -> int:
    """How many of the work's new positions lie in its block number `block`."""
    return min(work.end, (block + 1) * size) - max(work.start, block * size)


def _padded(length: int) -> int:
    return -(-length // LANES) * LANES


def _blocks(cache: KVCache, length: int) -> int:
    """Blocks that hold `length` positions, padded to whole lanes."""
    return -(-_padded(length) // cache.block_size)
