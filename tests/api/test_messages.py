"""/v1/messages, as the official `anthropic` client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from surefoot.errors import InsufficientMemory, Overloaded
from tests.api.fake import TEXT, FakeEngine, served

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "Hello!"}]
TOOL: dict[str, Any] = {
    "name": "get_weather", "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip


@pytest.fixture
def claude(http: httpx.Client) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0, timeout=10) as client:
        yield client


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 50, "messages": HELLO, **fields})


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    """The text of the latest prompt."""
    return tokenizer.decode(engine.handles[-1].prompt, skip_special_tokens=False)


def test_a_message(claude: anthropic.Anthropic, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """Text, reason and usage are where the client looks; the system's words come first."""
    message = create(claude, system="Be brief.", metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 3})
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(engine.handles[-1].prompt)
    assert message.usage.output_tokens > 0
    params = engine.handles[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 50)
    prompt = prompt_of(engine, smollm2)
    assert prompt.index("Be brief.") < prompt.index("Hello!")


def test_how_a_message_ends(claude: anthropic.Anthropic) -> None:
    """max_tokens and stop_sequence are told, the sequence by its text, which is not shown."""
    cut = create(claude, max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = create(claude, stop_sequences=["France", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France")
    assert stopped.content[0].text == "The capital of "


def test_blocks_are_turns(claude: anthropic.Anthropic, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """Text in blocks, and a system prompt in blocks, are read; thoughts are left out."""
    create(
        claude,
        system=[{"type": "text", "text": "zero", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hidden", "signature": "x"}, {"type": "text", "text": "three"}
                ],
            },
            {"role": "user", "content": "four"},
        ],
    )  # fmt: skip
    prompt = prompt_of(engine, smollm2)
    places = [prompt.index(word) for word in ("zero", "one\ntwo", "three", "four")]
    assert places == sorted(places)
    assert "hidden" not in prompt


def test_a_stream(claude: anthropic.Anthropic) -> None:
    """The client's own helper, which checks the order of events, adds them up to the whole message."""
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].type) == ("end_turn", "text")
    whole = create(claude)
    assert (final.content[0].text, final.usage) == (whole.content[0].text, whole.usage)


def test_the_events_of_a_stream(http: httpx.Client, engine: FakeEngine) -> None:
    """They come in Anthropic's order, each with its name."""
    body = {"model": MODEL, "max_tokens": 50, "messages": HELLO, "stream": True}
    lines = http.post("/v1/messages", json=body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [each["type"] for each in data]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["usage"]["output_tokens"] == 0


def test_counting_tokens(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    """It is what the same message would have as input, and a prompt that would never fit is counted too."""
    count = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")  # type: ignore[arg-type]
    assert count.input_tokens == create(claude, system="Be brief.").usage.input_tokens
    long = claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "word " * 2000}])
    assert long.input_tokens > 2000
    assert len(engine.handles) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10_000}, "max_tokens"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Well"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
        ({"temperature": -1}, "temperature"), ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"), ({"surprise": 1}, "surprise"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"), ({"tools": [TOOL, TOOL]}, "tools"),
    ],
)  # fmt: skip
def test_bad_requests(http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    """A wrong field is a 400 in Anthropic's shape, with its name, and nothing reaches the engine."""
    body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, **fields}
    reply = http.post("/v1/messages", json={name: value for name, value in body.items() if value is not None})
    error = reply.json()["error"]
    assert (reply.status_code, reply.json()["type"], error["type"]) == (400, "error", "invalid_request_error")
    assert (error["param"], engine.handles) == (param, [])
    assert "max_completion_tokens" not in error["message"]


def test_errors_are_those_of_the_client(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    """Statuses have the client's classes; a failure in a stream is an error event, which it raises."""
    with pytest.raises(anthropic.NotFoundError):
        create(claude, model="other")
    engine.refusal = Overloaded("queue full", retry_after=3)
    with pytest.raises(anthropic.APIStatusError) as refused:
        create(claude)
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "3")
    assert refused.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    engine.refusal, engine.failure, engine.fail_at = None, InsufficientMemory("no room"), 2
    stream = create(claude, stream=True)
    while next(stream).type != "content_block_delta":
        pass
    with pytest.raises(anthropic.APIStatusError, match="no room"):
        list(stream)


def test_the_clients_header_is_a_key(smollm2: Tokenizer) -> None:
    """X-Api-Key opens the server as a bearer token does; a wrong one does not."""
    engine = FakeEngine(smollm2)
    with served(engine, smollm2, ServerConfig(served_model_name=(MODEL,), api_key=("right",))) as url:
        for key in ({"api_key": "right"}, {"auth_token": "right"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **key) as client:  # type: ignore[arg-type]
                assert create(client).content[0].text == TEXT
        with (
            anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            create(client)


def test_structured_text(http: httpx.Client, engine: FakeEngine) -> None:
    """output_config.format is a grammar of the engine; a bad schema is its fault."""
    for schema, status in (({"type": "object", "properties": {"city": {}}}, 200), ({"type": "nonsense"}, 400)):
        config = {"format": {"type": "json_schema", "schema": schema}}
        body = {"model": MODEL, "max_tokens": 50, "messages": HELLO, "output_config": config}
        reply = http.post("/v1/messages", json=body)
        assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == "output_config"
    (handle,) = engine.handles
    assert handle.params.grammar is not None
    assert '"city"' in handle.params.grammar.source
