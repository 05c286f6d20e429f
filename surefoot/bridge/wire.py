"""What the API process and the worker say to each other, and how it looks on the socket.

A frame is a 4-byte little-endian length and that many bytes of msgpack: one tagged struct. Prompt ids travel as raw
int32 bytes. Down to the worker go Start and Learn, then Add, Cancel and Resize, and Stop; up come Progress while it
loads, then Ready, one Step per engine step, Resized, and Fatal as its last word.

    |<-- 4 bytes -->|<------- length bytes ------->|
    [ length, <u32 ][ {"type": "Add", "request": … } ][ length …
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from surefoot.config import MIB, EngineConfig
from surefoot.errors import SurefootError
from surefoot.plan import MemoryPlan
from surefoot.spec import ModelSpec
from surefoot.types import Event, Limits, Request, Snapshot, Vocabulary

MAX_FRAME = 64 * MIB
"""Longest message in bytes; a length beyond it means that the peer does not speak this protocol."""
HEADER = struct.Struct("<I")
_T = TypeVar("_T")


class WireError(SurefootError):
    """The bytes received are not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag is the class name."""


# ---- API process → worker -------------------------------------------------------------------------------------------


class Start(Message, frozen=True):
    """First message: open the device and load the model."""

    config: EngineConfig


class Add(Message, frozen=True):
    """Admit a request."""

    request: Request


class Cancel(Message, frozen=True):
    """Drop one child of a request, or all of them where `child` is None. Unknown ids are no error: it may be done."""

    request: int
    child: int | None = None


class Resize(Message, frozen=True):
    """Have memory for this many KV blocks and no more; answered by Resized."""

    blocks: int


class Learn(Message, frozen=True):
    """What tokens stand for: sent once, before the first request with a grammar."""

    vocabulary: Vocabulary


class Stop(Message, frozen=True):
    """Exit now, with status 0."""


ToWorker = Start | Add | Cancel | Resize | Learn | Stop


# ---- worker → API process -------------------------------------------------------------------------------------------


class Progress(Message, frozen=True):
    """How far loading is: a stage for the reader and its fraction in 0 … 1."""

    stage: str
    fraction: float


class Ready(Message, frozen=True):
    """The model is loaded, and this is what was fitted."""

    pid: int
    limits: Limits
    spec: ModelSpec
    plan_text: str
    """The memory plan as a table."""
    plan: MemoryPlan | None = None
    """The same in numbers; fake workers have none."""
    notes: tuple[str, ...] = ()
    """What had to be fitted downwards, a sentence each."""

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the cache holds at once."""
        return self.limits.num_blocks * self.limits.block_size


class Step(Message, frozen=True):
    """What one engine step brought."""

    events: list[Event]
    snapshot: Snapshot


class Resized(Message, frozen=True):
    """How many KV blocks there are now, and if these are not what was asked for, why."""

    blocks: int
    refusal: str | None = None
    least: int = 0
    """What is running needs so many."""


class Fatal(Message, frozen=True):
    """The worker ends with this exit code, and why."""

    exit_code: int
    message: str


FromWorker = Progress | Ready | Step | Resized | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids → int32, little endian. Raises struct.error for an id that is no int32."""
    return struct.pack(f"<{len(ids)}i", *ids)


def frame(message: ToWorker | FromWorker) -> bytes:
    """One message as it goes on the socket. Raises WireError if it is longer than MAX_FRAME."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(
            f"A {type(message).__name__} message of {len(body):,} bytes exceeds the limit of {MAX_FRAME:,}."
        )
    return HEADER.pack(len(body)) + body


def check_length(length: int) -> None:
    """Raises WireError for a frame longer than MAX_FRAME: the peer does not speak this protocol."""
    if length > MAX_FRAME:
        raise WireError(f"A frame claims {length:,} bytes, over the limit of {MAX_FRAME:,}: not this protocol.")


def decode_to_worker(body: bytes) -> ToWorker:
    """Raises WireError for anything but a message to the worker."""
    return _decode(_to_worker, body)


def decode_from_worker(body: bytes) -> FromWorker:
    """Raises WireError for anything but a message from the worker."""
    return _decode(_from_worker, body)


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"A frame of {len(body):,} bytes is not a message of this protocol: {error}.") from error


class Unframer:
    """Cuts a byte stream into frames, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The bodies completed by `data`, in order. Raises WireError for a length beyond MAX_FRAME."""
        self._buffer += data
        bodies, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            check_length(length)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
