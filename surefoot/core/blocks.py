"""KV blocks: who holds them, and the lease under which a step borrows new ones.

Every block is accounted for (law 2). With `refs(b)` counting the sequences and leases that hold b:

    refs > 0                    held
    refs = 0, published         cached: holds a prefix that may be asked for again, until it is evicted
    refs = 0, not published     free, or in limbo while a plan still in flight may name it
    past the capacity           unmapped: never handed out
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable

from surefoot.core.prefix import PrefixIndex

Key = tuple[int, int]
"""(request, child): names a sequence everywhere in core."""


class BlockPool:
    """Counts holders of each block and hands out free ones, lowest id first so that the tail can be given back."""

    def __init__(self, num_blocks: int) -> None:
        self.capacity = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap: sorted is one
        self._limbo: deque[tuple[int, int]] = deque()  # (newest plan in flight when it was dropped, block)
        self._in_flight: list[int] = []  # plan ids, oldest first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.index = PrefixIndex()

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def limbo(self) -> int:
        """Blocks that become free when the plans in flight retire."""
        return len(self._limbo)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds but that keep a published prefix; they can be evicted."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that somebody holds, or that a plan in flight may still name."""
        return self.capacity - len(self._free) - len(self._cached)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks with one holder each, or None and nothing taken."""
        if count > len(self._free):
            return None
        blocks = tuple(heapq.heappop(self._free) for _ in range(count))
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these are cached, so that sharing them takes them out of what can be evicted."""
        return sum(self._refs[block] == 0 for block in blocks)

    def shared(self, block: int) -> bool:
        """True where more than one sequence holds the block, so that nobody may write in it."""
        return self._refs[block] > 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One holder less for each block. When the last one leaves, a published block is cached, any other freed."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self.index:  # full and never written again: nothing in flight can hurt it
                    self._cached[block] = None
                else:
                    self._release(block)

    def evict(self, count: int) -> None:
        """Free up to `count` cached blocks, the longest unused first. Only in make_room, never inside plan."""
        for _ in range(min(count, len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            self.index.remove(block)
            self._release(block)

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Nobody shall find these blocks any more: what they hold cannot be trusted."""
        for block in blocks:
            self.index.remove(block)
            if block in self._cached:
                del self._cached[block]
                self._release(block)

    def launched(self, plan: int) -> None:
        """From here to `retired(plan)` the device may touch any block that was held until now."""
        self._in_flight.append(plan)

    def retired(self, plan: int) -> None:
        """The device is done with `plan`; blocks that waited for it, and for no other, become free."""
        self._in_flight.remove(plan)
        oldest = self._in_flight[0] if self._in_flight else None
        while self._limbo and (oldest is None or self._limbo[0][0] < oldest):
            heapq.heappush(self._free, self._limbo.popleft()[1])

    def moves(self, capacity: int) -> list[tuple[int, int]]:
        """(from, to) of each held block past `capacity`, into free ones below it, for which cached ones make way.

        Needs an empty pipeline, and no more than `capacity` held blocks. Nothing moves before `rename`.
        """
        sources = [block for block in range(capacity, self.capacity) if self._refs[block]]
        places = [block for block in self._free if block < capacity]
        unneeded = [block for block in self._cached if block < capacity]  # the longest unused first
        self.unpublish(unneeded[: len(sources) - len(places)] if len(sources) > len(places) else ())
        places = heapq.nsmallest(len(sources), (block for block in self._free if block < capacity))
        return list(zip(sources, places, strict=True))

    def rename(self, moved: Iterable[tuple[int, int]]) -> None:
        """What was held as the first block of each pair is held as the second, which was free."""
        pairs = list(moved)
        for old, new in pairs:
            self._refs[new], self._refs[old] = self._refs[old], 0
            self.index.rename(old, new)
        taken = {new for _, new in pairs}
        self._free = [block for block in self._free if block not in taken] + [old for old, _ in pairs]
        heapq.heapify(self._free)

    def resize(self, capacity: int) -> None:
        """Map more or fewer blocks. Shrinking needs an empty pipeline and no holder past the new capacity."""
        if capacity < self.capacity:
            self.unpublish([block for block in self._cached if block >= capacity])
            assert not (self._limbo or any(self._refs[capacity:])), "blocks past the new capacity are still held"
            self._free = [block for block in self._free if block < capacity]
            heapq.heapify(self._free)
            del self._refs[capacity:]
        for block in range(self.capacity, capacity):
            self._refs.append(0)
            heapq.heappush(self._free, block)
        self.capacity = capacity

    def faults(self, held: Counter[int]) -> list[str]:
        """What does not add up, given how many hold each block; empty when all is well."""
        idle = Counter(self._free) + Counter(block for _, block in self._limbo) + Counter(self._cached.keys())
        return [
            f"block {block}: {self._refs[block]} references, {held[block]} holders, {idle[block]} times idle"
            for block in range(self.capacity)
            if self._refs[block] != held[block]
            or idle[block] != (self._refs[block] == 0)
            or (block in self._cached) != (self._refs[block] == 0 and block in self.index)
        ]

    def repair(self, held: Counter[int]) -> None:
        """Make the books agree with the holders; only for an empty pipeline, after `faults` found something."""
        self._refs = [held[block] for block in range(self.capacity)]
        self.index = PrefixIndex()
        self._cached.clear()
        self._limbo.clear()
        self._free = [block for block in range(self.capacity) if not held[block]]

    def _release(self, block: int) -> None:
        """Free, by way of limbo while plans are in flight."""
        if self._in_flight:
            self._limbo.append((self._in_flight[-1], block))
        else:
            heapq.heappush(self._free, block)


class Lease:
    """The blocks that one plan borrowed. Ends once, in `keep` (commit) or `release` (rollback)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._fresh: dict[Key, tuple[int, ...]] | None = {}

    def take(self, key: Key, count: int) -> tuple[int, ...] | None:
        """`count` fresh blocks for one row, or None where the pool has fewer."""
        assert self._fresh is not None, "this lease has ended"
        blocks = self._pool.take(count)
        if blocks:
            self._fresh[key] = self._fresh.get(key, ()) + blocks
        return blocks

    def keep(self, keys: Collection[Key] | None = None) -> None:
        """Hand the blocks of `keys` (None: of all) to their sequences, which now hold them; give the rest back."""
        for key, blocks in self._end().items():
            if keys is not None and key not in keys:
                self._pool.drop(blocks)

    def release(self) -> None:
        """Give every block back."""
        self.keep(())

    def held(self) -> Iterable[int]:
        """Blocks under this lease now."""
        for blocks in (self._fresh or {}).values():
            yield from blocks

    def _end(self) -> dict[Key, tuple[int, ...]]:
        assert self._fresh is not None, "a lease ends once"
        fresh, self._fresh = self._fresh, None
        return fresh
