"""`surefoot chat` and `surefoot generate`, with a scripted server or source in place of a model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from surefoot.api import terminal
from surefoot.errors import ConfigError, EngineFailure

Handler = Any


def sse(*events: Any) -> httpx.Response:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join(lines))


def remote(handler: Handler, model: str | None = "m", **sampling: Any) -> terminal.Remote:
    client = httpx.Client(base_url="http://there/v1/", transport=httpx.MockTransport(handler))
    return terminal.Remote(client, model, sampling)


def test_remote_chat_streams_the_content() -> None:
    """The pieces of the deltas come out; role and finish chunks add nothing; the request carries the sampling."""
    sent: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": "Hel"}, {"content": "lo"}, {}]
        return sse(*({"choices": [{"delta": delta}]} for delta in deltas), "[DONE]")

    source = remote(handler, temperature=0.5)
    assert "".join(source.chat([{"role": "user", "content": "Hi"}])) == "Hello"
    assert sent[0]["temperature"] == 0.5 and sent[0]["stream"] is True and sent[0]["model"] == "m"


def test_remote_completion_streams_the_text() -> None:
    """The texts of the chunks come out in order."""
    source = remote(lambda request: sse({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, "[DONE]"))
    assert list(source.complete("x")) == ["a", "b"]


def test_remote_takes_the_servers_first_model() -> None:
    """Where no model is named the server is asked."""
    source = remote(lambda request: httpx.Response(200, json={"data": [{"id": "theirs"}]}), model=None)
    assert source._model == "theirs"


def test_an_error_in_the_stream_is_raised() -> None:
    """An error event ends the iteration with its message."""
    source = remote(lambda request: sse({"choices": [{"text": "a"}]}, {"error": {"message": "no memory"}}))
    with pytest.raises(EngineFailure, match="no memory"):
        list(source.complete("x"))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "a key is needed"}}), "401: a key is needed"),
        (httpx.Response(502, text="<html>bad gateway"), "502: <html>bad gateway"),
    ],
)
def test_a_refusal_is_raised_with_its_status(reply: httpx.Response, message: str) -> None:
    """The status and the server's own words are shown, whatever shape its answer has."""
    with pytest.raises(EngineFailure, match=message):
        list(remote(lambda request: reply).complete("x"))


def test_a_server_that_goes_away_is_told() -> None:
    """A broken connection is an EngineFailure, not a traceback of the HTTP library."""

    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("cut")

    with pytest.raises(EngineFailure, match="went away"):
        list(remote(handler).complete("x"))


@pytest.mark.parametrize(
    "events", [["{not json", "[DONE]"], [{"choices": None}, "[DONE]"], [["list"], "[DONE]"], [{"error": "text"}]]
)
def test_what_speaks_another_protocol_is_told(events: list[Any]) -> None:
    """Events that are not OpenAI's are an EngineFailure that shows a proper --url, not a traceback."""
    with pytest.raises(EngineFailure, match="no OpenAI-compatible server"):
        list(remote(lambda request: sse(*events)).complete("x"))


@pytest.mark.parametrize("answer", ["<html>", "[]", '{"data": []}', '{"data": null}'])
def test_a_server_without_models_is_told(answer: str) -> None:
    """A 200 that lists no model is an EngineFailure that shows a proper --url."""
    with pytest.raises(EngineFailure, match="no OpenAI-compatible server"):
        remote(lambda request: httpx.Response(200, text=answer), model=None)


def test_a_stream_that_breaks_off_is_told() -> None:
    """An answer that ends without [DONE] is not shown as a whole one."""
    with pytest.raises(EngineFailure, match="broke off"):
        list(remote(lambda request: sse({"choices": [{"text": "a"}]})).complete("x"))


def test_a_url_that_is_none_is_told() -> None:
    """A --url that cannot be read is a ConfigError that quotes it."""
    with pytest.raises(ConfigError, match=r"--url http://\[::1"), terminal.open_source({"url": "http://[::1"}, {}):
        pass


class Scripted:
    """Answers every question with the conversation's length; `fail` makes the next answer fail."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.fail = False

    def chat(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        self.seen.append(list(messages))
        if self.fail:
            self.fail = False
            raise EngineFailure("it broke")
        yield from ("answer ", str(len(messages)))

    def complete(self, prompt: str) -> Iterator[str]:
        yield from (prompt, "!")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    source = Scripted()

    @contextmanager
    def opened(options: Any, sampling: Any) -> Iterator[Scripted]:
        yield source

    monkeypatch.setattr(terminal, "open_source", opened)
    return source


def converse(monkeypatch: pytest.MonkeyPatch, text: str, **options: Any) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return terminal.chat(options)


def test_chat_remembers_the_conversation(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Questions and answers add up after the system message, until /clear; the end of the input ends the chat."""
    assert converse(monkeypatch, "one\n\ntwo\n/clear\nthree\n", system="Be brief.") == 0
    assert [len(messages) for messages in scripted.seen] == [2, 4, 2]
    assert scripted.seen[1][2] == {"role": "assistant", "content": "answer 2"}
    assert scripted.seen[2][0] == {"role": "system", "content": "Be brief."}
    assert capsys.readouterr().out == "answer 2\nanswer 4\nanswer 2\n"


def test_a_failed_answer_does_not_end_the_chat(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question whose answer fails is forgotten, its error shown, and the next one is asked."""
    scripted.fail = True
    assert converse(monkeypatch, "one\ntwo\n/exit\nnever\n") == 0
    assert [[message["content"] for message in messages] for messages in scripted.seen] == [["one"], ["two"]]
    assert "it broke" in capsys.readouterr().err


def test_generate_reads_standard_input(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-` is the text on standard input; the continuation alone is printed."""
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert terminal.generate("-", {}) == 0
    assert capsys.readouterr().out == "from a pipe!\n"
