"""From a StepPlan to tensors: everything that a forward pass needs, built once per step and used by every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.device.kvcache import KVCache
from surefoot.ops.attention import LANES, ROWS, VALUE_TILE, Mask, Segment, Tile
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
    `segments` says what attention reads, for each window that layers have.
    """

    tokens: Tensor
    positions: Tensor
    store_index: Tensor
    segments: Mapping[int | None, Sequence[Segment]]
    order: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def build(
    works: Sequence[Work], pool: TokenPool, cache: KVCache, group: int, windows: Iterable[int | None] = (None,)
) -> StepInputs:
    """Tensors of a plan's works; `group` is the number of query heads per key head, `windows` are those of layers."""
    order = sorted(range(len(works)), key=lambda at: (len(works[at].tokens) > 1, -works[at].end, at))
    ordered = [works[at] for at in order]
    spans = list(_spans(ordered))
    positions = torch.cat([torch.arange(work.start, work.end) for work in ordered])
    return StepInputs(
        tokens=torch.cat([pool.inputs(work) for work in ordered]).long(),
        positions=positions,
        store_index=_store_index(cache, ordered, positions),
        segments=_segments(cache, ordered, group, windows),
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


# ---- what attention reads -------------------------------------------------------------------------------------------


def _segments(
    cache: KVCache, works: Sequence[Work], group: int, windows: Iterable[int | None]
) -> dict[int | None, list[Segment]]:
    """For each window; those that no sequence has outgrown share the segments of layers that see everything."""
    longest = max(work.end for work in works)
    made: dict[int | None, list[Segment]] = {}
    found: dict[int | None, list[Segment]] = {}
    for window in windows:
        felt = window if window is not None and window < longest else None
        if felt not in made:
            made[felt] = list(_window_segments(cache, works, group, felt))
        found[window] = made[felt]
    return found


def _window_segments(cache: KVCache, works: Sequence[Work], group: int, window: int | None) -> Iterator[Segment]:
    decoding = [work for work in works if len(work.tokens) == 1]
    for begin, part in _length_groups(cache, decoding, window):
        yield _decode_segment(cache, part, begin, window)
    for work, (begin, _) in zip(works, _spans(works), strict=True):
        if len(work.tokens) > 1:
            yield _prompt_segment(cache, work, begin, group, window)


def _first_seen(cache: KVCache, position: int, window: int | None) -> int:
    """Where gathering begins for queries at `position` and later: at a block that is also the first of a value tile.

    0      first           position - window + 1     position
    [ out of sight )[ gathered, masked )[ the window         ]
    """
    if window is None:
        return 0
    step = math.lcm(cache.block_size, VALUE_TILE)
    return max(0, position - window + 1) // step * step


def _length_groups(cache: KVCache, works: Sequence[Work], window: int | None) -> Iterator[tuple[int, list[Work]]]:
    """Split works where one sees under half as many positions as another of its group; with first rows."""
    seen = [work.end - _first_seen(cache, work.end - 1, window) for work in works]
    begin = 0
    while begin < len(works):
        end = begin + 1
        while end < len(works) and 2 * min(seen[begin : end + 1]) >= max(seen[begin : end + 1]):
            end += 1
        yield begin, list(works[begin:end])
        begin = end


def _decode_segment(cache: KVCache, works: list[Work], begin: int, window: int | None) -> Segment:
    """One token each of several sequences, padded to the longest; positions count from the first that each sees."""
    firsts = [_first_seen(cache, work.end - 1, window) for work in works]
    ends = torch.tensor([work.end - first for work, first in zip(works, firsts, strict=True)])
    length = _padded(int(ends.max()))
    masks = _masks(ends - 1, length, window, lambda hidden: hidden.repeat_interleave(cache.kv_heads, 0).unsqueeze(1))
    tile = Tile(begin, begin + len(works), len(works), 0, length, masks)
    return Segment(cache.head_index(_tables(cache, works, firsts, length)), (tile,))


def _prompt_segment(cache: KVCache, work: Work, begin: int, group: int, window: int | None) -> Segment:
    """Several tokens of one sequence, in tiles of QUERY_TILE that each look as far as their last token."""
    origin = _first_seen(cache, work.start, window)
    tiles = []
    for start in range(work.start, work.end, QUERY_TILE):
        end = min(start + QUERY_TILE, work.end)
        first = origin if window is None else max(0, start - window + 1) // VALUE_TILE * VALUE_TILE
        length = _padded(end - first)
        masks = _masks(torch.arange(start, end) - first, length, window, lambda hidden: _token_major(hidden, group))
        row = begin + start - work.start
        tiles.append(Tile(row, row + end - start, 1, first - origin, length, masks))
    return Segment(cache.head_index(_tables(cache, [work], [origin], _padded(work.end - origin))), tiles)


def _tables(cache: KVCache, works: Sequence[Work], firsts: Sequence[int], length: int) -> Tensor:
    """Blocks of `length` positions from each work's first on, [works, blocks] int64; short tables end in the sink."""
    blocks = -(-length // cache.block_size)
    tables = torch.full((len(works), blocks), cache.sink, dtype=torch.int64)
    for row, (work, first) in enumerate(zip(works, firsts, strict=True)):
        held = work.table[first // cache.block_size :][:blocks]
        tables[row, : len(held)] = torch.tensor(held)
    return tables


def _masks(queries: Tensor, length: int, window: int | None, spread: Callable[[Tensor], Tensor]) -> tuple[Mask, ...]:
    """What queries at these positions may not see of `length` keys, at both ends; between those all see all.

    0          last - window + 1         first + 1         length
    [ left behind by some )[ seen by all )[ future of some )
    """
    behind = 0 if window is None else max(0, int(queries.max()) - window + 1)
    edges = ((0, behind), (int(queries.min()) + 1, length))
    return tuple(
        Mask(begin, spread(_hidden(torch.arange(begin, end), queries, window))) for begin, end in edges if begin < end
    )


def _hidden(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """[queries, keys]: True where a key comes after the query, or lies before its window."""
    keys, queries = keys[None, :], queries[:, None]
    return keys > queries if window is None else (keys > queries) | (keys <= queries - window)


def _token_major(hidden: Tensor, group: int) -> Tensor:
    """`group` rows per token, and padded as attention pads them (padding rows look at everything)."""
    rows = hidden.repeat_interleave(group, 0)
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % ROWS))


def _padded(length: int) -> int:
    return -(-length // LANES) * LANES


# ---- where keys and values go ---------------------------------------------------------------------------------------


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
