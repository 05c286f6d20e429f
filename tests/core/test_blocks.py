"""Blocks are counted exactly, and a lease ends once."""

from __future__ import annotations

from collections import Counter

import pytest

from surefoot.core.blocks import BlockPool, Lease

A, B = (1, 0), (2, 0)


def test_take_hands_out_the_lowest_ids() -> None:
    """Free blocks leave in order of id, so that the tail of the cache stays free and can be given back."""
    pool = BlockPool(4)
    pool.drop(pool.take(2) or ())
    assert pool.take(3) == (0, 1, 2)


def test_take_is_all_or_nothing() -> None:
    """A request for more than is free takes nothing."""
    pool = BlockPool(2)
    assert pool.take(3) is None
    assert pool.free == 2


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    """Each holder counts once."""
    pool = BlockPool(1)
    blocks = pool.take(1) or ()
    pool.share(blocks)
    pool.drop(blocks)
    assert pool.free == 0
    assert not pool.shared(0)
    pool.drop(blocks)
    assert pool.free == 1


def test_blocks_dropped_in_flight_wait_for_the_newest_plan() -> None:
    """A block dropped while plans 1 and 2 are in flight is free only when both have retired."""
    pool = BlockPool(1)
    blocks = pool.take(1) or ()
    pool.launched(1)
    pool.launched(2)
    pool.drop(blocks)
    pool.retired(1)
    assert (pool.free, pool.limbo) == (0, 1)
    pool.retired(2)
    assert (pool.free, pool.limbo) == (1, 0)


def test_resize_never_hands_out_unmapped_ids() -> None:
    """After shrinking to two blocks there are two, and growing brings the others back."""
    pool = BlockPool(4)
    pool.resize(2)
    assert pool.take(3) is None
    pool.resize(4)
    assert pool.take(4) == (0, 1, 2, 3)


def test_shrinking_below_a_holder_is_refused() -> None:
    """Blocks that somebody holds cannot be unmapped."""
    pool = BlockPool(2)
    pool.take(2)
    with pytest.raises(AssertionError, match="still held"):
        pool.resize(1)


def test_faults_name_what_does_not_add_up_and_repair_mends_it() -> None:
    """A leaked block is found by comparing with its holders, and is free after repair."""
    pool = BlockPool(2)
    pool.take(1)
    assert pool.faults(Counter()) == ["block 0: 1 references, 0 holders, 0 times idle"]
    pool.repair(Counter())
    assert pool.faults(Counter()) == []
    assert pool.free == 2


def test_a_lease_keeps_for_some_and_releases_for_others() -> None:
    """On commit, rows that are gone give their fresh blocks back."""
    pool = BlockPool(3)
    lease = Lease(pool)
    lease.take(A, 1)
    lease.take(B, 2)
    lease.keep({A})
    assert pool.free == 2


def test_a_lease_ends_once() -> None:
    """Neither keep nor release can follow the end of a lease, and nothing can be taken under it any more."""
    lease = Lease(BlockPool(1))
    lease.release()
    for again in (lease.release, lambda: lease.keep(()), lambda: lease.take(A, 1)):
        with pytest.raises(AssertionError, match="lease"):
            again()


def test_a_published_block_is_cached_and_comes_back() -> None:
    """The last holder's leaving keeps a published block findable; sharing it again takes it out of the cache."""
    pool = BlockPool(2)
    blocks = pool.take(1) or ()
    pool.index.publish(b"name", 0)
    pool.drop(blocks)
    assert (pool.free, pool.cached, pool.used) == (1, 1, 0)
    assert pool.index.match([b"name", b"other"]) == (0,)
    pool.share((0,))
    assert (pool.cached, pool.used) == (0, 1)
    assert pool.faults(Counter({0: 1})) == []


def test_eviction_takes_the_longest_unused_first() -> None:
    """Evicted blocks are free and are not found any more."""
    pool = BlockPool(3)
    pool.take(3)
    for block in range(3):
        pool.index.publish(bytes([block]), block)
    pool.drop((1, 0, 2))
    pool.evict(2)
    assert pool.free == 2
    assert [bool(pool.index.match([bytes([block])])) for block in range(3)] == [False, False, True]
