"""`surefoot chat`, `generate` and `memory`: the terminal in front of a server, or of a model loaded here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Protocol

import httpx
from rich.console import Console

from surefoot.api.local import Message
from surefoot.api.offline import LLM
from surefoot.api.progress import loading_bar
from surefoot.config import format_bytes
from surefoot.errors import ConfigError, EngineFailure, RequestError
from surefoot.plan import title
from surefoot.types import SamplingParams

GENERATE_MAX_TOKENS = 128
SAMPLING = ("max_tokens", "temperature", "top_p")
ENGINE = ("dtype", "device", "quantization", "memory", "max_model_len")


class Source(Protocol):
    """Where text comes from. Both raise RequestError; closing the iterator stops the work."""

    def chat(self, messages: Sequence[Message]) -> Iterator[str]: ...
    def complete(self, prompt: str) -> Iterator[str]: ...


class Local:
    """A model in this terminal's own worker."""

    def __init__(self, llm: LLM, sampling: Mapping[str, Any]) -> None:
        self._llm, self._params = llm, SamplingParams(**{"max_tokens": None, **sampling})

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        return self._llm.stream_chat(messages, self._params)

    def complete(self, prompt: str) -> Iterator[str]:
        return self._llm.stream(prompt, self._params)


class Remote:
    """An OpenAI-compatible server."""

    def __init__(self, client: httpx.Client, model: str | None, sampling: Mapping[str, Any]) -> None:
        self._client, self._sampling = client, sampling
        self._model = model or self._first_model()

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        for choice in self._events("chat/completions", {"messages": list(messages)}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        for choice in self._events("completions", {"prompt": prompt}):
            yield choice["text"]

    def _first_model(self) -> str:
        try:
            reply = self._client.get("models")
        except httpx.HTTPError as error:
            raise EngineFailure(f"No server answers at {self._client.base_url}: {error}") from error
        _check(reply)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise self._foreign() from error

    def _foreign(self) -> EngineFailure:
        return EngineFailure(
            f"What answers at {self._client.base_url} is no OpenAI-compatible server. "
            "--url names its base, such as http://127.0.0.1:8000/v1."
        )

    def _events(self, path: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {"model": self._model, "stream": True, **self._sampling, **fields}
        try:
            with self._client.stream("POST", path, json=body) as reply:
                _check(reply)
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield from self._choices(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise EngineFailure(f"The server at {self._client.base_url} went away: {error}") from error
        raise EngineFailure(f"The server at {self._client.base_url} broke off in the middle of its answer.")

    def _choices(self, data: str) -> list[dict[str, Any]]:
        """What one event brings. Raises EngineFailure for an error event, or for what is no event of this protocol."""
        try:
            event = json.loads(data)
            if "error" not in event:
                return list(event["choices"])
            message = str(event["error"]["message"])
        except (ValueError, LookupError, TypeError) as error:
            raise self._foreign() from error
        raise EngineFailure(message)


def _check(reply: httpx.Response) -> None:
    if reply.is_success:
        return
    reply.read()
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text[:500]
    raise EngineFailure(f"The server answered {reply.status_code}: {message}")


@contextmanager
def open_source(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> Iterator[Source]:
    """The source that the command's options name: a server with `url`, else a model loaded here."""
    if options.get("url"):
        key = options.get("api_key") or os.environ.get("SUREFOOT_API_KEY", "")
        url = options["url"].rstrip("/") + "/"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            client = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(600.0, connect=10.0))
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {options['url']}: {error}. It looks like http://127.0.0.1:8000/v1.") from error
        with client:
            yield Remote(client, options.get("model"), sampling)
        return
    engine = {name: options[name] for name in ENGINE if options.get(name) is not None}
    with _load(options.get("model") or "smollm2", engine) as llm:
        yield Local(llm, sampling)


def _load(model: str, engine: Mapping[str, Any]) -> AbstractContextManager[LLM]:
    with loading_bar(Console(stderr=True)) as progress:
        return LLM(model, progress=progress, **engine)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    if options.get("sample_seed") is not None:
        chosen["seed"] = options["sample_seed"]
    return chosen


def generate(prompt: str, options: Mapping[str, Any]) -> int:
    """Continue one prompt; `-` reads it from standard input. Raises SurefootError."""
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = {"max_tokens": GENERATE_MAX_TOKENS, **_sampling(options)}
    with open_source(options, sampling) as source:
        _show(source.complete(text))
    return 0


def chat(options: Mapping[str, Any]) -> int:
    """Converse until the end of the input. Raises SurefootError where the model or server cannot be had at all."""
    console = Console(stderr=True, highlight=False)
    start: list[Message] = [{"role": "system", "content": options["system"]}] if options.get("system") else []
    messages = list(start)
    with open_source(options, _sampling(options)) as source:
        console.print("Ctrl-C stops an answer, Ctrl-D ends, /clear forgets.", style="dim")
        while (line := _ask()) is not None:
            if line == "/clear":
                messages = list(start)
            elif line:
                _turn(source, messages, line, console)
    return 0


def _ask() -> str | None:
    """A line of input, without the spaces around it; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/exit" else line


def _turn(source: Source, messages: list[Message], line: str, console: Console) -> None:
    """One question and its answer. One that fails is forgotten, so that the conversation can go on."""
    messages.append({"role": "user", "content": line})
    try:
        answer = _show(source.chat(messages))
    except RequestError as error:
        console.print(error.message, style="red", markup=False)
        messages.pop()
        return
    messages.append({"role": "assistant", "content": answer})


def _show(pieces: Iterator[str]) -> str:
    """Print as it comes and return what was printed; Ctrl-C ends it early."""
    shown = []
    with closing(pieces):  # type: ignore[type-var]
        try:
            for piece in pieces:
                shown.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(shown)


def memory(url: str, limit: str | None, key: str | None) -> int:
    """Print a server's memory, after giving it a new limit where there is one. Raises SurefootError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60.0) as client:
            reply = client.get("/memory") if limit is None else client.post("/memory", json={"limit": limit})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineFailure(f"{url} does not answer: {error}") from None
    _check(reply)
    found = reply.json()
    console = Console(highlight=False)
    for name, size in {**found["rows"], "limit": found["limit"]}.items():
        if size:
            console.print(f"{title(name):<12} {format_bytes(size):>11}")
    kv = found["kv"]
    console.print(
        f"{kv['blocks']:,} of {kv['blocks_planned']:,} KV blocks: {kv['blocks_used']:,} in use, "
        f"{kv['blocks_cached']:,} cached; {kv['tokens']:,} tokens"
    )
    measured = found["measured"]
    console.print(f"measured on {measured['device']}", style="dim")
    for name in ("total", "free", "ours", "neighbours"):
        console.print(f"{name:<12} {format_bytes(measured[name]):>11}", style="dim")
    return 0
