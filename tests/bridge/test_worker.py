"""The worker's loop: what it waits for, what it says, and how it ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import structlog

from surefoot.bridge import wire
from surefoot.bridge.worker import Connection, log_step, obey, patience, run, serve
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.testing import FakeExecutor
from surefoot.types import Failed, FailureKind, Request, Snapshot, StepFailed, StepPlan
from tests.bridge.support import LIMITS, ThreadWorker, params

START = wire.Start(config=EngineConfig())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs:
        yield ours, Connection(theirs)


def say(sock: socket.socket, *messages: wire.ToWorker) -> None:
    sock.sendall(b"".join(map(wire.frame, messages)))


def hear(sock: socket.socket) -> list[wire.FromWorker]:
    """Everything that the worker says until it closes its end."""
    unframer, bodies = wire.Unframer(), []
    while data := sock.recv(1 << 16):
        bodies += unframer.feed(data)
    return [wire.decode_from_worker(body) for body in bodies]


def request(number: int = 1, **fields: object) -> Request:
    return Request(id=number, prompt=wire.pack_ids([5, 6]), params=params(**fields))


def test_receive_takes_all_that_has_arrived(pair: tuple[socket.socket, Connection]) -> None:
    """One call returns every complete message, in order, and keeps the incomplete rest for later."""
    ours, connection = pair
    frames = wire.frame(wire.Cancel(request=1)) + wire.frame(wire.Cancel(request=2))
    ours.sendall(frames[:-3])
    assert connection.receive(1) == [wire.Cancel(request=1)]
    assert connection.receive(0) == []
    ours.sendall(frames[-3:])
    assert connection.receive(1) == [wire.Cancel(request=2)]


def test_receive_raises_at_the_end_of_file(pair: tuple[socket.socket, Connection]) -> None:
    """A closed socket is told apart from silence."""
    ours, connection = pair
    assert connection.receive(0) == []
    ours.close()
    with pytest.raises(ConnectionResetError):
        connection.receive(None)


def test_the_end_of_file_ends_the_worker() -> None:
    """When the API process is gone the worker exits with status 0, whatever it was doing."""
    worker = ThreadWorker()
    say(
        worker.socket,
        START,
    )
    say(worker.socket, wire.Add(request=request(max_tokens=400)))
    worker.socket.close()
    assert worker.join() == 0


def test_an_idle_worker_uses_no_processor() -> None:
    """With nothing to do the loop blocks: no step is tried and no time is spent."""
    worker = ThreadWorker()
    say(worker.socket, START)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    assert worker.executor.plans == []
    worker.socket.close()
    worker.join()


def test_one_message_per_step() -> None:
    """A step's events, of all rows, come in one message together with the counts after it."""
    worker = ThreadWorker()
    say(worker.socket, START)
    time.sleep(0.1)
    say(worker.socket, wire.Add(request=request(1)), wire.Add(request=request(2)))
    time.sleep(0.3)
    say(worker.socket, wire.Stop())
    steps = [message for message in hear(worker.socket) if isinstance(message, wire.Step)]
    worker.socket.close()
    assert [sorted(event.request for event in step.events) for step in steps if step.events] == [[1, 2]] * 8
    assert steps[-1].snapshot.running == 0


def test_the_first_message_is_start(pair: tuple[socket.socket, Connection]) -> None:
    """Anything before Start ends the worker with an explanation."""
    ours, connection = pair
    say(ours, wire.Cancel(request=1))
    assert serve(connection) == 70
    connection._socket.close()
    (fatal,) = hear(ours)
    assert isinstance(fatal, wire.Fatal) and "Expected Start" in fatal.message


def test_a_lost_device_ends_the_worker_with_its_reason(pair: tuple[socket.socket, Connection]) -> None:
    """DeviceLost travels as Fatal with exit code 70, so that the API process can say why."""
    ours, connection = pair

    def lose(plan: StepPlan) -> StepFailed:
        return StepFailed(plan=plan.id, kind=FailureKind.LOST, reason="it fell off the bus")

    say(ours, START)
    thread = threading.Timer(0.05, say, [ours, wire.Add(request=request())])
    thread.start()
    assert serve(connection, lambda config, _: Engine(FakeExecutor(LIMITS, fails=lose), LIMITS)) == 70
    thread.join()
    connection._socket.close()
    fatal = hear(ours)[-1]
    assert isinstance(fatal, wire.Fatal) and "it fell off the bus" in fatal.message


def test_a_second_start_is_out_of_place() -> None:
    """Once ready the worker takes requests, cancellations and Stop only."""
    with pytest.raises(wire.WireError, match="Start is out of place"):
        obey(Engine(FakeExecutor(LIMITS), LIMITS), START, 0.0)


def test_patience() -> None:
    """Nothing to do: wait for a message; work: do not wait; a full card: wait until it may have room."""

    def full(plan: StepPlan) -> StepFailed:
        return StepFailed(plan=plan.id, kind=FailureKind.OOM, reason="full for everybody", needed=9, free=1)

    engine = Engine(FakeExecutor(LIMITS, fails=full), LIMITS)
    assert patience(engine, 0.0) is None
    engine.add(request(), 0.0)
    assert patience(engine, 0.0) == 0.0
    while (until := engine.idle_until(0.0)) is None:
        engine.step(0.0)
    assert patience(engine, 0.0) == until > 0


def test_patience_ends_when_it_is_time_to_rest() -> None:
    """Without work and with an idle time a worker waits for the rest of it; one that rests waits for ever."""
    engine = Engine(FakeExecutor(LIMITS), LIMITS)
    assert patience(engine, 12.0, 5.0, 10.0) == 3.0
    assert patience(engine, 20.0, 5.0, 10.0) == 0.0
    assert patience(engine, 20.0, 5.0, float("inf")) is None


def test_an_idle_worker_rests_and_wakes(pair: tuple[socket.socket, Connection]) -> None:
    """After the idle time its blocks are given back, once; the next request finds them all again."""
    ours, connection = pair
    engine = Engine(FakeExecutor(LIMITS), LIMITS)
    loop = threading.Thread(target=run, args=(connection, engine), kwargs={"idle_release": 0.05})
    loop.start()
    steps, unframer = [], wire.Unframer()
    while not steps or steps[-1].snapshot.blocks_idle == 0:
        steps += [
            m for m in map(wire.decode_from_worker, unframer.feed(ours.recv(1 << 16))) if isinstance(m, wire.Step)
        ]
    assert [(step.snapshot.blocks_total, step.snapshot.blocks_idle) for step in steps] == [
        (LIMITS.num_blocks, 0),
        (0, LIMITS.num_blocks),
    ]
    time.sleep(0.2)
    say(ours, wire.Add(request=request()))
    served = wire.decode_from_worker(unframer.feed(ours.recv(1 << 16))[0])
    assert isinstance(served, wire.Step)
    assert (served.snapshot.blocks_total, len(served.events)) == (LIMITS.num_blocks, 1)
    say(ours, wire.Stop())
    loop.join(10)


def test_what_operators_want_to_know_is_logged() -> None:
    """A failed step and a failed request are one line each; an ordinary step is none."""
    with structlog.testing.capture_logs() as lines:
        log_step([], Snapshot(), Snapshot(steps=1))
        assert lines == []
        log_step([Failed(4, "insufficient_memory", "no")], Snapshot(), Snapshot(steps_oom=1, token_budget=8))
    assert [line["log_level"] for line in lines] == ["warning", "warning"]
    assert lines[1]["request"] == 4
