"""The cache changes its size while rows run on it: who has to move, who has to wait, and that nobody notices."""

from __future__ import annotations

from tests.core.test_engine import Bench


def shrink(bench: Bench, blocks: int) -> None:
    events, refusal = bench.engine.fit(blocks, bench.now)
    assert (events, refusal) == ([], None)
    assert bench.engine.faults() == []


def test_blocks_in_use_move_below_the_new_end() -> None:
    """Rows that fit into the smaller cache are moved there, and not a token of theirs is computed again."""
    bench = Bench(num_blocks=64, prefix_caching=False)
    for id in range(3):
        bench.add(id, 64, max_tokens=40)
    while bench.engine.snapshot().tokens_emitted < 30:
        bench.step()
    bench.engine.cancel(0)  # leaves a hole below
    used = bench.engine.snapshot().blocks_used
    shrink(bench, used)
    bench.engine.fit(64, bench.now)
    bench.run()
    after = bench.engine.snapshot()
    assert (after.preemptions, after.shrinks) == (0, 1)
    assert after.blocks_moved > 0
    for id in (1, 2):
        assert bench.texts[id, 0] == bench.expected(id, 64, 40)


def test_the_newest_makes_way_where_not_all_fit() -> None:
    """Where the smaller cache cannot hold every row the newest is computed again later, and the oldest never is."""
    bench = Bench(num_blocks=64)
    for id in range(4):
        bench.add(id, 64, max_tokens=30)
    while bench.engine.snapshot().tokens_emitted < 8:
        bench.step()
    shrink(bench, 12)
    assert [key[0] for key in bench.engine._scheduler.running] == [0, 1]
    bench.run()
    assert bench.failed == {}
    for id in range(4):
        assert bench.texts[id, 0] == bench.expected(id, 64, 30)


def test_cached_prefixes_make_way_before_rows_do() -> None:
    """A published prefix that nobody uses is dropped where a row in use needs its place."""
    bench = Bench(num_blocks=32)
    bench.add(0, 160, max_tokens=2)
    bench.run()
    bench.add(1, 64, max_tokens=20)
    bench.step()
    shrink(bench, 6)
    bench.run()
    assert bench.engine.snapshot().preemptions == 0
    assert bench.texts[1, 0] == bench.expected(1, 64, 20)


def test_what_runs_is_not_left_without_its_blocks() -> None:
    """A size below what one running sequence needs is refused, with the least that can be, and that is taken."""
    bench = Bench(num_blocks=64)
    bench.add(0, 160, max_tokens=20)
    bench.step()
    events, refusal = bench.engine.fit(10, bench.now)
    assert (events, refusal) == ([], "a request that has begun needs 11")
    assert (bench.engine.snapshot().blocks_total, bench.engine.least_blocks) == (64, 11)
    shrink(bench, 11)
    bench.engine.fit(64, bench.now)
    bench.run()
    assert bench.texts[0, 0] == bench.expected(0, 160, 20)


def test_what_the_device_refuses_is_asked_for_again() -> None:
    """After a rest the cache takes what the device has, serves with that, and grows when there is more."""
    bench = Bench(num_blocks=64)
    bench.engine.rest(bench.now)
    assert (bench.engine.snapshot().blocks_total, bench.engine.snapshot().blocks_idle) == (0, 64)
    bench.executor.most_blocks = 20
    bench.add(0, 64, max_tokens=20)
    bench.add(1, 400, max_tokens=20)
    while (0, 0) not in bench.finish:
        bench.step()
    assert 16 <= bench.engine.snapshot().blocks_total <= 20
    assert bench.texts[1, 0] == []
    bench.executor.most_blocks = 64
    bench.run()
    assert bench.engine.snapshot().blocks_total == 64
    for id, length in ((0, 64), (1, 400)):
        assert bench.texts[id, 0] == bench.expected(id, length, 20)


def test_rows_whose_blocks_cannot_be_moved_are_computed_again() -> None:
    """A copy that fails costs time, and no request."""
    bench = Bench(num_blocks=64, prefix_caching=False)
    bench.executor.moves = False
    for id in range(3):
        bench.add(id, 64, max_tokens=20)
    bench.step()
    bench.engine.cancel(0)
    shrink(bench, 11)
    assert bench.engine.snapshot().preemptions == 1
    bench.run()
    assert (bench.engine.snapshot().blocks_moved, bench.failed) == (0, {})
    for id in (1, 2):
        assert bench.texts[id, 0] == bench.expected(id, 64, 20)
