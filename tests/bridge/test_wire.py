"""Messages on the socket: what goes in comes out, and what is no message is refused with a reason."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.bridge import wire
from surefoot.config import EngineConfig
from surefoot.types import Emitted, Failed, Request, Sampled, SamplingParams, Snapshot
from tests.bridge.support import LIMITS, SPEC

DOWN = [
    wire.Start(config=EngineConfig(memory=2 << 30)),
    wire.Add(
        request=Request(
            id=7,
            prompt=wire.pack_ids([1, 2, 49151]),
            params=SamplingParams(seed=2**64 - 1, logit_bias=((3, -1.5),), stop=("é",), logprobs=2),
            priority=-3,
        )
    ),
    wire.Cancel(request=7),
    wire.Cancel(request=7, child=2),
    wire.Stop(),
]
UP = [
    wire.Progress(stage="loading weights", fraction=0.25),
    wire.Ready(pid=12, limits=LIMITS, spec=SPEC, plan_text="table", notes=("fitted",)),
    wire.Step(
        events=[
            Emitted(7, 0, 0, Sampled(5, -0.5, ((5, -0.5), (6, -1.0)))),
            Emitted(7, 1, 3, Sampled(2), "stop", 2),
            Failed(8, "insufficient_memory", "no room"),
        ],
        snapshot=Snapshot(steps=3, running=1),
    ),
    wire.Fatal(exit_code=5, message="does not fit"),
]


@pytest.mark.parametrize("message", DOWN, ids=lambda message: type(message).__name__)
def test_messages_to_the_worker_come_out_equal(message: wire.ToWorker) -> None:
    """Every message to the worker survives the wire, without loss."""
    (body,) = wire.Unframer().feed(wire.frame(message))
    assert wire.decode_to_worker(body) == message


@pytest.mark.parametrize("message", UP, ids=lambda message: type(message).__name__)
def test_messages_from_the_worker_come_out_equal(message: wire.FromWorker) -> None:
    """Every message from the worker survives the wire, without loss."""
    (body,) = wire.Unframer().feed(wire.frame(message))
    assert wire.decode_from_worker(body) == message


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    """However a stream is cut into pieces, the same messages come out in the same order."""
    stream = b"".join(map(wire.frame, DOWN))
    unframer, bodies, start = wire.Unframer(), [], 0
    for length in [*cuts, len(stream)]:
        bodies += unframer.feed(stream[start : start + length])
        start += length
    assert [wire.decode_to_worker(body) for body in bodies] == DOWN


def test_prompt_ids_travel_as_int32_little_endian() -> None:
    """Four bytes a token, least significant first."""
    assert wire.pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    with pytest.raises(struct.error):
        wire.pack_ids([1 << 31])


@pytest.mark.parametrize("body", [b"", b"\x00", b"garbage", b"\x81\xa4type\xa4Nope", b"\xff" * 100])
def test_garbage_is_refused_with_a_reason(body: bytes) -> None:
    """Bytes that are no message raise WireError on either side."""
    for decode in (wire.decode_to_worker, wire.decode_from_worker):
        with pytest.raises(wire.WireError, match="not a message of this protocol"):
            decode(body)


def test_directions_are_not_mixed() -> None:
    """A message of the other direction is refused."""
    with pytest.raises(wire.WireError):
        wire.decode_to_worker(wire.frame(UP[0])[4:])
    with pytest.raises(wire.WireError):
        wire.decode_from_worker(wire.frame(DOWN[0])[4:])


def test_a_length_beyond_the_limit_is_refused_before_it_is_buffered() -> None:
    """A frame that claims gigabytes raises at its header."""
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.Unframer().feed(b"\xff\xff\xff\xff")


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding refuses what the other side would refuse."""
    monkeypatch.setattr(wire, "MAX_FRAME", 8)
    with pytest.raises(wire.WireError, match="exceeds the limit"):
        wire.frame(DOWN[0])
