"""The load that `surefoot bench serve` makes, and its arithmetic, against a small server of the test's own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot import cli
from surefoot.api import benchmark
from surefoot.api.benchmark import Load
from surefoot.api.timing import Target, Timed, complete
from surefoot.errors import ConfigError, EngineFailure

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": finish}], usage=None)


DONE = b"data: [DONE]\n\n"
WHOLE = (piece(" a"), piece(" b"), piece("", "length"), event(choices=[], usage=USAGE), DONE)


async def against(*parts: bytes, pause: float = 0.0) -> tuple[Timed, bytes]:
    """What `complete` makes of a server that answers with these parts, and what that server was sent."""
    seen = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"\r\n\r\n"))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}/v1", api_key="k")
        return await complete(target, target.post("/completions", b"{}")), bytes(seen)


async def test_pieces_are_timed_and_tokens_are_the_servers_count() -> None:
    """Each chunk of text has its moment; the empty last one has none; usage says how many tokens there were."""
    timed, sent = await against(OK, *WHOLE, pause=0.02)
    assert timed.error is None
    assert len(timed.pieces) == 2 and timed.pieces[1] - timed.pieces[0] > 0.01
    assert 0.01 < timed.ttft < timed.latency
    assert (timed.prompt_tokens, timed.output_tokens, timed.cached_tokens) == (5, 3, 2)
    assert timed.tpot == pytest.approx((timed.pieces[1] - timed.pieces[0]) / 2)
    assert sent.startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"Authorization: Bearer k\r\n" in sent


async def test_events_may_be_cut_anywhere() -> None:
    """Bytes that arrive one by one make the same events."""
    stream = b"".join(WHOLE)
    timed, _ = await against(OK, *(stream[at : at + 1] for at in range(len(stream))))
    assert timed.error is None
    assert (len(timed.pieces), timed.output_tokens) == (2, 3)


async def test_the_role_of_a_chat_is_no_token() -> None:
    """A chat's first delta names the role only; time to first token ends with the first text."""
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    timed, _ = await against(OK, role, event(choices=[{"delta": {"content": "a"}}]), DONE)
    assert len(timed.pieces) == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nlong",), "413: long"),
        ((OK, piece("a"), event(error={"message": "no memory"})), "no memory"),
        ((OK, piece("a")), r"without \[DONE\]"),
        ((OK, DONE), "without a token"),
        ((), "without a reply"),
        ((b"nonsense\r\n\r\n",), "HttpParser"),
        ((OK, b"data: {]\n\n"), "DecodeError"),
    ],
)
async def test_what_fails_is_told(parts: tuple[bytes, ...], message: str) -> None:
    """A reply that is refused, broken off or broken is an error of its own, never a served request."""
    timed, _ = await against(*parts)
    assert timed.error is not None and re.search(message, timed.error)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a/v1", "http:///v1", ""])
def test_a_url_must_be_one(url: str) -> None:
    """What is not an HTTP URL is a ConfigError that shows one."""
    with pytest.raises(ConfigError, match="http://"):
        Target(url)


def test_runs_differ_and_seeds_repeat() -> None:
    """The same seed and run give the same prompts; another run, or seed, shares none but the common prefix."""
    load = Load(url="", model="m", input_len=20, prefix_len=8, requests=3, seed=1)
    prompts = [[json.loads(one.body)["prompt"] for one in benchmark.plan(load, run)] for run in (0, 0, 1)]
    assert prompts[0] == prompts[1]
    assert not set(prompts[0]) & set(prompts[2])
    words = [prompt.split() for prompt in prompts[0] + prompts[2]]
    assert {len(each) for each in words} == {20}
    assert len({tuple(each[:8]) for each in words}) == 1 and len({tuple(each[:9]) for each in words}) > 1


def test_token_ids_and_conversations() -> None:
    """A vocabulary makes prompts of ids in it; --chat wraps the words in a message."""
    (ids,) = benchmark.plan(Load(url="", model="m", input_len=50, requests=1, vocabulary=1000), 0)
    prompt = json.loads(ids.body)["prompt"]
    assert len(prompt) == 50 and all(256 <= token < 1000 for token in prompt)
    (chat,) = benchmark.plan(Load(url="", model="m", input_len=5, requests=1, chat=True), 0)
    (message,) = json.loads(chat.body)["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 5


def test_moments_come_at_the_rate_asked_for() -> None:
    """A rate spaces requests at random around its mean; without one all come at once."""
    moments = [one.at for one in benchmark.plan(Load(url="", model="m", requests=400, input_len=1, rate=10), 0)]
    assert moments == sorted(moments) and 30 < moments[-1] < 50
    assert {one.at for one in benchmark.plan(Load(url="", model="m", input_len=1), 0)} == {0.0}


def test_a_trace_says_what_comes_when(tmp_path: Path) -> None:
    """Each line is a request: its moment, its prompt or the prompt's length, its output's length."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1500, "input_length": 7, "output_length": 3, "hash_ids": []}\n'
        '{"prompt": "Hello", "output_length": 4}\n'
    )
    first, second = benchmark.plan(Load(url="", model="m", trace=str(path)), 0)
    assert (first.at, second.at) == (1.5, 0.0)
    assert len(json.loads(first.body)["prompt"].split()) == 7
    assert (json.loads(second.body)["prompt"], json.loads(second.body)["max_tokens"]) == ("Hello", 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ('{"output_length": 3}', "line 1: has neither"), ("{}\n", "line 1.*output_length")],
)
def test_bad_traces_are_refused(tmp_path: Path, content: str, message: str) -> None:
    """The error names the file and the line."""
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        benchmark.plan(Load(url="", model="m", trace=str(path)), 0)
    with pytest.raises(ConfigError, match="cannot be read"):
        benchmark.read_trace(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "repeats", "name"),
    [
        ({"input_len": 0}, 1, "--input-len"), ({"requests": -1}, 1, "--requests"), ({"concurrency": 0}, 1, "--conc"),
        ({"rate": 0.0}, 1, "--rate"), ({"rate": float("nan")}, 1, "--rate"), ({"prefix_len": 200}, 1, "--prefix-len"),
        ({"vocabulary": 10}, 1, "--token-ids"), ({"vocabulary": 1000, "chat": True}, 1, "--token-ids"),
        ({}, 0, "--repeats"), ({"goodput": "ttft"}, 1, "--goodput"), ({"goodput": "itl:3"}, 1, "--goodput"),
    ],
)  # fmt: skip
def test_bad_loads_are_refused(change: dict[str, Any], repeats: int, name: str) -> None:
    """The error names the option, and nothing is sent."""
    with pytest.raises(ConfigError, match="^" + name):
        benchmark.measure(Load(url="http://127.0.0.1:9/v1", model="m", **change), repeats=repeats)


def timed(*moments: float, tokens: int = 0, error: str | None = None) -> Timed:
    """A request asked at 0 whose pieces came at these seconds."""
    pieces = list(moments)
    return Timed(0.0, pieces, ended=pieces[-1] if pieces else 1.0, output_tokens=tokens or len(pieces), error=error)


def test_summary() -> None:
    """Rates count what was served; goodput counts what met every limit; failures are told apart."""
    goals = benchmark.read_goals("ttft:300 e2el:900")
    runs = [timed(0.2, 0.4, 0.8), timed(0.2, 1.0), timed(0.5, 0.6), timed(0.1, error="x"), timed(error="x")]
    result = benchmark.summarise(runs, 2.0, goals)
    assert (result["served"], result["failed"], result["errors"]) == (3, 2, ["x"])
    assert (result["output_tokens"], result["output_tokens_per_second"], result["goodput"]) == (7, 3.5, 0.5)
    assert result["ttft_ms"] == pytest.approx({"mean": 300, "p50": 200, "p90": 440, "p99": 494, "max": 500})
    assert result["itl_ms"]["max"] == pytest.approx(800)
    assert result["tpot_ms"]["p50"] == pytest.approx(300)
    nothing = benchmark.summarise([timed(error="x")], 1.0, {})
    assert (nothing["served"], nothing["ttft_ms"], nothing["goodput"]) == (0, None, None)


def test_median_of_runs() -> None:
    """Number by number, through nested ones; what one run lacks has none."""
    runs = [{"a": value, "b": {"c": value * 2}, "errors": [], "d": None if value == 1 else 1} for value in (1, 9, 3)]
    assert benchmark.median(runs) == {"a": 3, "b": {"c": 6}, "d": None}


async def _serve_one_model(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
    if line == b"/v1/completions":
        writer.write(OK + b"".join(WHOLE))
    else:
        body = json.dumps({"data": [{"id": "tiny"}], "version": "9.9"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def test_the_command_measures_and_saves(tmp_path: Path) -> None:
    """`surefoot bench serve` finds the model, runs as often as asked, prints medians and saves where and with what."""
    path = tmp_path / "result.json"
    async with await asyncio.start_server(_serve_one_model, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        arguments = ["bench", "serve", "--url", url, "--requests", "3", "--repeats", "2", "--save", str(path)]
        result = await asyncio.to_thread(CliRunner().invoke, cli.app, [*arguments, "--goodput", "ttft:60000"])
    assert result.exit_code == 0, result.output
    assert "2, of 3 requests" in result.output and "15 in (6 cached), 9 out" in result.output
    assert "ttft" in result.output and "goodput" in result.output and "failed" not in result.output
    saved = json.loads(path.read_text())
    assert (saved["load"]["model"], saved["server"], len(saved["runs"])) == ("tiny", "9.9", 2)
    assert saved["machine"]["memory"] > 0 and saved["machine"]["cores"] > 0 and saved["versions"]["python"]


def test_nobody_there() -> None:
    """A server that does not answer is an error that names the URL."""
    with pytest.raises(EngineFailure, match=r"http://127\.0\.0\.1:9/v1 does not list a model"):
        benchmark.first_model("http://127.0.0.1:9/v1", None)
    with pytest.raises(EngineFailure, match="does not serve 'm'"):
        benchmark.measure(Load(url="http://127.0.0.1:9/v1", model="m"))
