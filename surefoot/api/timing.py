"""One streamed completion over a plain socket, and when its pieces came.

httptools, not a client library: with 256 streams, a client that spends 100 µs on each piece measures itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import msgspec

from surefoot.errors import ConfigError

TIMEOUT: Final = 1800.0
"""Seconds that one request may take in all."""
_READ = 1 << 16


@dataclass
class Timed:
    """What came of one request; times are `time.perf_counter()` seconds, `error` is None where it ended well."""

    started: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.started

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.output_tokens - 1, 1)

    @property
    def latency(self) -> float:
        """Seconds from asking to the end of the reply."""
        return self.ended - self.started


class Target:
    """An OpenAI-compatible server: `url` ends before `/completions`, as in http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8000/v1.")
        self.host, self.path = parts.hostname, parts.path.rstrip("/")
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.ssl else 80)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{key}Connection: close\r\n"

    def post(self, route: str, body: bytes) -> bytes:
        """The bytes of a request that sends JSON."""
        head = (
            f"POST {self.path}{route} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def says_something(self) -> bool:
        """A chat's first delta, which only names the role, and the last one, which only ends it, do not count."""
        if self.delta is not None:
            return bool(self.delta.content)
        return bool(self.text) or self.finish_reason is None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Reply:
    """Receives what httptools finds, and keeps what is not read yet."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def lines(self) -> list[bytes]:
        """Complete lines that have come, which are then forgotten."""
        *lines, rest = bytes(self.body).split(b"\n")
        self.body[:] = rest
        return lines


async def complete(target: Target, request: bytes) -> Timed:
    """Send the bytes of `Target.post`, read the event stream to its end. What fails is told in `error`, not raised."""
    timed = Timed(time.perf_counter())
    try:
        async with asyncio.timeout(TIMEOUT):
            await _exchange(target, request, timed)
    except (OSError, httptools.HttpParserError, msgspec.MsgspecError) as error:
        timed.error = f"{type(error).__name__}: {error}"
    timed.ended = time.perf_counter()
    if timed.error is None and not timed.pieces:
        timed.error = "the stream ended without a token"
    return timed


async def _exchange(target: Target, request: bytes, timed: Timed) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.ssl)
    try:
        writer.write(request)
        reply, status, done = _Reply(), 0, False
        while not reply.complete:
            data = await reader.read(_READ)
            if not data:
                break
            reply.parser.feed_data(data)
            if (status := reply.parser.get_status_code()) == 200:
                done = _note(timed, reply.lines(), time.perf_counter()) or done
        if status == 0:
            timed.error = "the connection closed without a reply"
        elif status != 200:
            timed.error = f"{status}: {bytes(reply.body[:500]).decode(errors='replace')}"
        elif not done and timed.error is None:
            timed.error = "the stream ended without [DONE]"
    finally:
        writer.close()


def _note(timed: Timed, lines: list[bytes], now: float) -> bool:
    """Put down what the lines tell; True once they hold the end of the stream."""
    for line in lines:
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return True
        if not data:
            continue
        event = _decode(data)
        if event.error is not None:
            timed.error = msgspec.json.encode(event.error).decode()
        if any(choice.says_something() for choice in event.choices):
            timed.pieces.append(now)
        if event.usage is not None:
            timed.prompt_tokens = event.usage.prompt_tokens
            timed.output_tokens = event.usage.completion_tokens or 0
            timed.cached_tokens = (event.usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    return False
