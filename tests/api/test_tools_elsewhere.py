"""Calls of tools in /v1/responses and /v1/messages, with GLM-4's tokenizer and an engine that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from tests.api.fake import FakeEngine, served
from tests.api.glm import ranks

OUTPUT = '\nget_weather\n{"city": "Paris"}'
PARIS = {"city": "Paris"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def _server(glm: Tokenizer) -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine(glm)
    with served(engine, glm, ServerConfig(served_model_name=("glm",))) as url:
        yield url, engine


@pytest.fixture
def engine(_server: tuple[str, FakeEngine], glm: Tokenizer) -> FakeEngine:
    """Its outputs are a call that the observation token ends; `says` makes them another text."""
    _server[1].reset()
    _server[1].eos = glm.special_id("<|observation|>") or 0
    says(_server[1], OUTPUT)
    return _server[1]


def says(engine: FakeEngine, text: str) -> None:
    engine.script = [ranks()[bytes([byte])] for byte in text.encode()]


def prompt_of(engine: FakeEngine, glm: Tokenizer) -> str:
    return glm.decode(engine.handles[-1].prompt, skip_special_tokens=False)


# ---- /v1/responses --------------------------------------------------------------------------------------------------


@pytest.fixture
def respond(_server: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[Any]:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
    with openai.OpenAI(base_url=f"{_server[0]}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield lambda **fields: client.responses.create(
            **{"model": "glm", "input": "Weather?", "tools": [tool], "max_output_tokens": 60, **fields}
        )


def test_a_response_that_calls(respond: Any, engine: FakeEngine, glm: Tokenizer) -> None:
    """The call is an item of the output; sent back with its result, it is a turn of the next prompt."""
    response = respond()
    [call] = response.output
    assert (call.type, call.name, json.loads(call.arguments), response.status) == (
        "function_call", "get_weather", PARIS, "completed",
    )  # fmt: skip
    assert "## get_weather" in prompt_of(engine, glm)
    says(engine, "\nok")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "15 degrees"}
    user = {"role": "user", "content": "Weather?"}
    sent_back = respond(input=[user, call.model_dump(exclude_none=True), result])
    assert sent_back.output_text == "ok"
    ending = '<|assistant|>get_weather\n{"city": "Paris"}<|observation|>\n15 degrees<|assistant|>'
    assert prompt_of(engine, glm).endswith(ending)
    respond(input=[result], previous_response_id=response.id)
    assert prompt_of(engine, glm).endswith(ending)


def test_the_events_of_a_call(respond: Any) -> None:
    """An item for the call opens and closes around its arguments."""
    events = list(respond(stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert json.loads(events[3].delta) == json.loads(events[5].item.arguments) == PARIS
    assert events[2].item.arguments == ""
    assert {event.output_index for event in events[2:6]} == {0}


def test_no_calls_where_none_are_wanted(respond: Any) -> None:
    """With tool_choice none the same output is text."""
    assert respond(tool_choice="none").output_text == OUTPUT[1:]


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def claude(_server: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=_server[0], api_key="none", max_retries=0, timeout=10) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> dict[str, Any]:
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
    user = {"role": "user", "content": "Weather?"}
    return {"model": "glm", "max_tokens": 60, "messages": [user], "tools": [tool], **fields}


def test_a_message_that_calls(claude: anthropic.Anthropic, engine: FakeEngine, glm: Tokenizer) -> None:
    """The call is a block with its own stop reason; sent back with its result, it is a turn of the next prompt."""
    message: Any = claude.messages.create(**ask(claude))
    [use] = message.content
    assert (use.type, use.name, use.input, message.stop_reason) == ("tool_use", "get_weather", PARIS, "tool_use")
    assert "## get_weather" in prompt_of(engine, glm)
    says(engine, "\nok")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "15 degrees"}]}
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer: Any = claude.messages.create(**ask(claude, messages=turns))
    assert answer.content[0].text == "ok"
    assert prompt_of(engine, glm).endswith(
        '<|assistant|>get_weather\n{"city": "Paris"}<|observation|>\n15 degrees<|assistant|>'
    )


def test_a_call_is_streamed(claude: anthropic.Anthropic) -> None:
    """The client's helper puts the same message together out of the events."""
    with claude.messages.stream(**ask(claude)) as stream:
        kinds = [event.type for event in stream]
        message: Any = stream.get_final_message()
    assert (message.content[0].input, message.stop_reason) == (PARIS, "tool_use")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_no_use_of_tools_where_none_is_wanted(claude: anthropic.Anthropic) -> None:
    """With tool_choice none the same output is text."""
    message: Any = claude.messages.create(**ask(claude, tool_choice={"type": "none"}))
    assert message.content[0].text == OUTPUT[1:]


def test_tools_count(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    """count_tokens counts tools as a prompt with them has them."""
    given = ask(claude)
    given.pop("max_tokens")
    counted = claude.messages.count_tokens(**given).input_tokens
    assert counted == claude.messages.create(**ask(claude)).usage.input_tokens
    assert counted == len(engine.handles[-1].prompt)


def test_a_call_that_is_asked_for(respond: Any, claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    """required, any and a name make the answer a call by a grammar, here as in a chat."""
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named):
        assert respond(tool_choice=choice).output[0].name == "get_weather"
        assert engine.handles[-1].params.grammar is not None
    for asked in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message: Any = claude.messages.create(**ask(claude, tool_choice=asked))
        assert message.content[0].name == "get_weather"
        assert engine.handles[-1].params.grammar is not None
