"""Which request kills: bookkeeping alone."""

from __future__ import annotations

import random

import pytest

from surefoot.bridge.suspicion import CERTAIN, PAST, Suspicion


def play(requests: int, killers: set[int], *, outside: float = 0.0, seed: int = 0) -> tuple[list[int], int]:
    """Serve requests to their end on workers that killers end; returns whom it convicted, and the deaths."""
    draw = random.Random(seed)
    suspicion, position = Suspicion(), dict.fromkeys(range(requests), 5)
    convicted, deaths = [], 0
    while position:
        running = {r: at for r, at in position.items() if r not in suspicion.held}
        assert running, "nobody may wait for nobody"
        if killers & set(running) or draw.random() < outside:
            deaths += 1
            assert deaths < 100
            guilty = suspicion.died(running)
            if guilty is not None:
                convicted.append(guilty)
                del position[guilty]
            continue
        for request in running:
            position[request] += 1
            suspicion.progressed(request, position[request])
            if position[request] >= 60:
                del position[request]
                suspicion.forget(request)
    return convicted, deaths


@pytest.mark.parametrize("requests", [1, 2, 7, 32, 256])
def test_one_killer_is_found(requests: int) -> None:
    """It is convicted, alone, after about log2 of the requests deaths."""
    convicted, deaths = play(requests, {requests // 2})
    assert convicted == [requests // 2]
    assert deaths <= CERTAIN + requests.bit_length()


def test_two_killers_are_found() -> None:
    """Each is convicted, and nobody else."""
    convicted, _ = play(20, {3, 17})
    assert sorted(convicted) == [3, 17]


@pytest.mark.parametrize("seed", range(20))
def test_kills_from_outside_convict_nobody(seed: int) -> None:
    """Workers that are killed now and then, whatever they run, cost no request its life."""
    convicted, deaths = play(12, set(), outside=0.02, seed=seed)
    assert convicted == []
    assert deaths < 30


def test_a_suspect_is_cleared_by_coming_further() -> None:
    """One that gets PAST tokens beyond its death is no suspect; the next death starts anew, with everybody."""
    suspicion = Suspicion()
    suspicion.died({1: 10, 2: 10})
    suspicion.died({1: 10, 2: 10})
    assert suspicion.held == {2}
    assert not suspicion.progressed(1, 10 + PAST - 1)
    assert suspicion.progressed(1, 10 + PAST)
    assert (suspicion.held, suspicion.trial) == (frozenset(), (2,))
