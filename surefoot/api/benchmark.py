"""`surefoot bench serve`: a load on an OpenAI-compatible server, and what its clients see of it.

    Load ─▶ requests (prompt, length, moment) ─▶ streams, at most `concurrency` at once ─▶ summary, run by run ─▶ median

Prompts are made of common words, about a token each, differently in every run, so that a prefix cache finds nothing
but `prefix_len`. What the server counted is what is reported.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from surefoot.api.machine import describe_machine
from surefoot.api.timing import Target, Timed, complete
from surefoot.errors import ConfigError, EngineFailure
from surefoot.types import Value

_COMMON = (
    " time people way water day man work world life hand part child eye place week case point company number group "
    "problem fact house night book word car line end member law city name team minute idea body back parent face door "
    "art war history party result change morning reason research girl guy moment air teacher force order"
)
WORDS = _COMMON.split()
FIRST_ID = 256
"""Token ids below it are special ones in many vocabularies."""
GOALS = ("ttft", "tpot", "e2el")


class Load(Value, frozen=True, kw_only=True):
    """What to ask of a server. Lengths are in tokens, `rate` in requests per second (None: all at once)."""

    url: str
    model: str
    input_len: int = 128
    output_len: int = 128
    prefix_len: int = 0
    """Tokens at the start of each prompt that all of them share."""
    vocabulary: int | None = None
    """Send random token ids below it instead of words."""
    chat: bool = False
    requests: int = 8
    concurrency: int | None = None
    rate: float | None = None
    trace: str | None = None
    """A JSONL file that says what comes when, in place of lengths, number and rate (`TraceLine`)."""
    goodput: str | None = None
    """Limits such as "ttft:500 tpot:50 e2el:10000", in milliseconds: what counts as served well."""
    seed: int = 0
    """The same seed gives the same prompts and moments; a server that has met them finds them in its prefix cache."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace: `timestamp` in milliseconds from the start. Other keys are passed over."""

    output_length: int
    input_length: int | None = None
    timestamp: float = 0.0
    prompt: str | None = None


class Planned(msgspec.Struct, frozen=True):
    """One request to come: `at` seconds after the start."""

    at: float
    body: bytes


# ---- what to send ---------------------------------------------------------------------------------------------------


def plan(load: Load, run: int) -> list[Planned]:
    """The requests of a run; the same seed and run give the same ones. Raises ConfigError for a bad trace."""
    rng = random.Random(f"{load.seed} {load.input_len} {load.requests} {run}")
    prefix = _tokens(load, random.Random(load.seed), load.prefix_len)
    planned = []
    for line in _lines(load, rng):
        prompt = line.prompt or _prompt(prefix + _tokens(load, rng, (line.input_length or 1) - len(prefix)))
        planned.append(Planned(line.timestamp / 1e3, body(load, prompt, line.output_length)))
    return planned


def _lines(load: Load, rng: random.Random) -> Iterator[TraceLine]:
    if load.trace is not None:
        yield from read_trace(Path(load.trace))
        return
    at = 0.0
    for _ in range(load.requests):
        yield TraceLine(load.output_len, load.input_len, at)
        at += rng.expovariate(load.rate) * 1e3 if load.rate else 0.0


def read_trace(path: Path) -> list[TraceLine]:
    """Raises ConfigError naming the file and the line at fault."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}.") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = msgspec.json.decode(text, type=TraceLine)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--trace {path}, line {number}: {error}.") from error
        if line.input_length is None and line.prompt is None:
            raise ConfigError(f"--trace {path}, line {number}: has neither input_length nor prompt.")
        lines.append(line)
    if not lines:
        raise ConfigError(f"--trace {path}: is empty.")
    return lines


def _tokens(load: Load, rng: random.Random, count: int) -> list[Any]:
    """Words, or token ids where a vocabulary is given."""
    if load.vocabulary is None:
        return rng.choices(WORDS, k=max(count, 0))
    return [rng.randrange(FIRST_ID, load.vocabulary) for _ in range(count)]


def _prompt(tokens: list[Any]) -> str | list[int]:
    return " ".join(tokens) if not tokens or isinstance(tokens[0], str) else tokens


def body(load: Load, prompt: str | list[int], output_len: int) -> bytes:
    """The JSON of one request. `ignore_eos` is not OpenAI's, but it is what keeps lengths equal between servers."""
    fields: dict[str, Any] = {
        "model": load.model,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    return msgspec.json.encode(fields | asked)


# ---- sending it -----------------------------------------------------------------------------------------------------


async def run_once(load: Load, target: Target, run: int) -> dict[str, Any]:
    """Send a run's requests and sum up what came back."""
    planned = plan(load, run)
    room = asyncio.Semaphore(load.concurrency or len(planned))
    began = time.perf_counter()

    async def one(request: Planned) -> Timed:
        await asyncio.sleep(began + request.at - time.perf_counter())
        async with room:
            return await complete(target, target.post(_route(load), request.body))

    timed = await asyncio.gather(*(one(request) for request in planned))
    return summarise(timed, time.perf_counter() - began, read_goals(load.goodput))


def _route(load: Load) -> str:
    return "/chat/completions" if load.chat else "/completions"


async def _measure(load: Load, target: Target, repeats: int) -> list[dict[str, Any]]:
    first = await complete(target, target.post(_route(load), body(load, "Hello", 4)))
    if first.error is not None:
        raise EngineFailure(f"{load.url} does not serve {load.model!r}: {first.error}")
    return [await run_once(load, target, run) for run in range(repeats)]


def check(load: Load, repeats: int) -> None:
    """Raises ConfigError naming the option that cannot be."""
    counts = {
        "--input-len": load.input_len,
        "--output-len": load.output_len,
        "--requests": load.requests,
        "--concurrency": load.concurrency,
        "--repeats": repeats,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}: {count} is not a positive number.")
    if load.rate is not None and not 0 < load.rate < float("inf"):
        raise ConfigError(f"--rate: {load.rate} is not a positive number of requests per second.")
    if not 0 <= load.prefix_len <= load.input_len:
        raise ConfigError(f"--prefix-len: {load.prefix_len} is not in 0 … {load.input_len}, the input length.")
    if load.vocabulary is not None and (load.chat or load.vocabulary <= FIRST_ID):
        raise ConfigError(f"--token-ids: wants a vocabulary of more than {FIRST_ID} tokens, and no --chat.")
    read_goals(load.goodput)


def measure(load: Load, *, repeats: int = 1, api_key: str | None = None) -> dict[str, Any]:
    """Run the load `repeats` times, after one short request that is not counted.

    The result says when, on what commit, machine and versions, what was asked, each run's summary and their median.
    Raises ConfigError for a bad load, EngineFailure where the server does not answer.
    """
    check(load, repeats)
    target = Target(load.url, api_key=api_key)
    context = describe_machine()
    runs = asyncio.run(_measure(load, target, repeats))
    return {
        **context,
        "server": _server_version(load.url),
        "load": msgspec.to_builtins(load),
        "runs": runs,
        "median": median(runs),
    }


def first_model(url: str, api_key: str | None) -> str:
    """The name of the first model that the server lists. Raises EngineFailure where nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(url.rstrip("/") + "/models", headers=headers, timeout=30)
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise EngineFailure(f"{url} does not list a model: {error}. Name one with --model.") from error


def _server_version(url: str) -> str | None:
    """What the server says at /version, where it has that."""
    try:
        reply = httpx.get(url.rstrip("/").removesuffix("/v1") + "/version", timeout=30)
        return str(reply.raise_for_status().json()["version"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


# ---- what came of it ------------------------------------------------------------------------------------------------


def read_goals(text: str | None) -> dict[str, float]:
    """`"ttft:500 tpot:50"` → seconds by name. Raises ConfigError naming the bad part."""
    goals = {}
    for part in (text or "").split():
        name, _, value = part.partition(":")
        try:
            goals[name] = float(value) / 1e3
        except ValueError:
            name = ""
        if name not in GOALS:
            raise ConfigError(f"--goodput: {part!r} is not a limit such as ttft:500 (of {', '.join(GOALS)}; in ms).")
    return goals


def summarise(timed: Sequence[Timed], seconds: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Counts, rates per second, and times in milliseconds. Rates count what was served, not what failed."""
    served = [one for one in timed if one.error is None]
    errors = [one.error for one in timed if one.error is not None]
    prompt, output = sum(one.prompt_tokens for one in served), sum(one.output_tokens for one in served)
    gaps = [late - early for one in served for early, late in zip(one.pieces, one.pieces[1:], strict=False)]
    good = [
        one
        for one in served
        if all({"ttft": one.ttft, "tpot": one.tpot, "e2el": one.latency}[name] <= goals[name] for name in goals)
    ]
    return {
        "served": len(served),
        "failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(one.cached_tokens for one in served),
        "output_tokens": output,
        "requests_per_second": len(served) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "goodput": len(good) / seconds if goals else None,
        "ttft_ms": spread([one.ttft for one in served]),
        "tpot_ms": spread([one.tpot for one in served if one.output_tokens > 1]),
        "itl_ms": spread(gaps),
        "e2el_ms": spread([one.latency for one in served]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (between neighbouring ranks, as numpy has them) and maximum in ms; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(1e3 * value for value in seconds)
    ranks = {f"p{percent}": _percentile(ordered, percent) for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **ranks, "max": ordered[-1]}


def _percentile(ordered: Sequence[float], percent: float) -> float:
    below, share = divmod((len(ordered) - 1) * percent / 100, 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return low + (high - low) * share


def median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over the runs, in the shape of one run; None where a run has none."""
    result: dict[str, Any] = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        if any(value is None for value in values):
            result[key] = None
        elif isinstance(values[0], Mapping):
            result[key] = median(values)
        elif not isinstance(values[0], list):
            result[key] = statistics.median(values)
    return result


def report(result: Mapping[str, Any]) -> str:
    """The medians for a reader."""
    middle, runs = result["median"], result["runs"]
    failed = sum(run["failed"] for run in runs)
    asked = middle["served"] + middle["failed"]
    lines = [
        f"runs             {len(runs)}, of {asked:.0f} requests in {middle['seconds']:.1f} s",
        f"tokens           {middle['prompt_tokens']:.0f} in ({middle['cached_tokens']:.0f} cached), "
        f"{middle['output_tokens']:.0f} out",
        f"output           {middle['output_tokens_per_second']:.1f} tokens/s, "
        f"{middle['requests_per_second']:.2f} requests/s",
    ]
    if middle["goodput"] is not None:
        lines.append(f"goodput          {middle['goodput']:.2f} requests/s within {result['load']['goodput']}")
    lines += [
        f"{name:<16} " + "  ".join(f"{key} {value:.1f}" for key, value in times.items()) + "  ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        if (times := middle[f"{name}_ms"]) is not None
    ]
    if failed:
        lines.append(
            f"failed           {failed} in all; first: {next(run['errors'][0] for run in runs if run['errors'])}"
        )
    return "\n".join(lines)


def save(result: Mapping[str, Any], path: str) -> None:
    """Write the result as indented JSON. Raises ConfigError where the file cannot be written."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--save {path}: cannot be written: {error.strerror}.") from error
