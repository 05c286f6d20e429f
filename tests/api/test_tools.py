"""Tool calling: what a model reads of tools and calls, and the calls found in what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from surefoot.api.dialects import dialect_of
from surefoot.api.template import ChatTemplate
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.api.tools import Glm4, Hermes, Parsed, ToolParser
from surefoot.checkpoint import Checkpoint
from surefoot.config import ServerConfig
from surefoot.errors import InvalidRequest
from surefoot.grammar import Compiler
from tests.api.fake import FakeEngine, served
from tests.api.glm import ranks, write_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object"}},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "巴黎"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "15", "tool_call_id": "c1"},
]
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
OBSERVATION = 7


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("glm")
    write_tokenizer(folder)
    return load_tokenizer(Checkpoint(kind="hf", path=folder, name="glm"))


def parsed(parser: ToolParser, text: str, stop: int | None, *, step: int) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls of an output that comes `step` characters at a time."""
    pieces = [parser.push(text[at : at + step]) for at in range(0, len(text), step)] + [parser.finish(stop)]
    whole = Parsed("".join(piece.text for piece in pieces), sum((piece.calls for piece in pieces), ()))
    assert len({call.id for call in whole.calls}) == len(whole.calls)
    return whole.text, [(call.name, json.loads(call.arguments)) for call in whole.calls]


# ---- GLM-4

PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('get_weather\n{"city": "Paris"}', [PARIS]),
        ('\nget_weather\n{"city":\n "Paris"}\n', [PARIS]),
        ("get_time\n{}", [("get_time", {})]),
        ('get_weather\n{"city": "Paris"}\nget_time\n{}', [PARIS, ("get_time", {})]),
        ('get_weather {"city": "Paris"}', []),
        ('get_weather\n{"city": "Paris"', []),
        ('get_weather\n["Paris"]', []),
        ('get_weather\n{"city": "Paris"} and more', []),
        ("get_rain\n{}", []),
        ("get_weather", []),
        ("", []),
        ("The weather is fine.\n{}", []),
    ],
)
def test_glm_calls(text: str, calls: list[Any], step: int) -> None:
    """A tool's name, a newline and a JSON object, ended by the observation token, are a call; all else is text."""
    for stop in (OBSERVATION, 5, None):
        parser = Glm4(OBSERVATION, takes_tools=False).parser({"get_weather", "get_time"})
        shown, found = parsed(parser, text, stop, step=step)
        assert found == (calls if stop == OBSERVATION else [])
        assert shown == ("" if found else text)


def test_glm_text_is_not_held_back() -> None:
    """Text streams as soon as no tool's name can come of it."""
    parser = Glm4(OBSERVATION, takes_tools=False).parser({"get_weather"})
    assert [parser.push(piece).text for piece in ("get", "_we", "t", " day", ".")] == ["", "", "get_wet", " day", "."]


def test_glm_conversation(glm: Tokenizer) -> None:
    """Tools are a system turn, calls an assistant's turn with a name, results the role observation."""
    dialect = dialect_of(glm)
    assert isinstance(dialect, Glm4)
    turns, variable = dialect.render(HISTORY, [TIME])
    assert variable is None
    text = glm.render_chat(turns)
    assert '# 可用工具\n\n## get_time\n\n{\n    "name": "get_time"\n}\n在调用' in text
    assert text.endswith('<|user|>\nWeather?<|assistant|>get_weather\n{"city": "巴黎"}<|observation|>\n15<|assistant|>')
    system = [{"role": "system", "content": "Be brief."}, USER]
    assert glm.render_chat(dialect.render(system, [TIME])[0]).endswith(
        "表示调用的参数。<|system|>\nBe brief.<|user|>\nWeather?<|assistant|>"
    )
    assert glm.render_chat(dialect.render(system, [])[0]) == glm.render_chat(system)


def test_glm_template_with_a_variable(tmp_path: Path) -> None:
    """A template that reads tools from a variable, as GLM-4-0414's does, gets them there."""
    write_tokenizer(tmp_path, chat_template="{% for tool in tools %}{{ tool.function.name }}{% endfor %}")
    tokenizer = load_tokenizer(Checkpoint(kind="hf", path=tmp_path, name="glm"))
    dialect = dialect_of(tokenizer)
    assert dialect is not None
    turns, variable = dialect.render([USER], [TIME])
    assert (turns, variable) == ([USER], [TIME])
    assert tokenizer.render_chat(turns, tools=variable) == "[gMASK]<sop>get_time"


@pytest.mark.parametrize("arguments", ["{", "[]", "5"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    """An earlier call with broken arguments is a 400 that says where."""
    broken = {**CALL, "function": {"name": "f", "arguments": arguments}}
    for dialect in (Glm4(OBSERVATION, takes_tools=False), Hermes()):
        with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
            dialect.render([USER, {"role": "assistant", "content": "", "tool_calls": [broken]}], [])


# ---- Hermes


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
        ('Let me see.\n<tool_call>{"name": "get_time"}</tool_call>\n', "Let me see.", [("get_time", {})]),
        (
            '<tool_call>{"name": "get_time"}</tool_call>\n<tool_call>{"name": "get_time"}</tool_call>',
            "",
            [("get_time", {})] * 2,
        ),
        ('<tool_call>{"name": "no"}</tool_call>!', '<tool_call>{"name": "no"}</tool_call>!', []),
        ("a <tool_call>{</tool_call> b", "a <tool_call>{</tool_call> b", []),
        ('<tool_call>{"name": "get_time"}', '<tool_call>{"name": "get_time"}', []),
        ("a < b <tool> \n\n", "a < b <tool> \n\n", []),
    ],
)
def test_hermes_calls(text: str, shown: str, calls: list[Any], step: int) -> None:
    """Calls between tags are taken out of the text with the line breaks around them; what is no call stays."""
    parser = Hermes().parser({"get_weather", "get_time"})
    assert parsed(parser, text, None, step=step) == (shown, calls)


def test_hermes_conversation() -> None:
    """Messages stay OpenAI's, but for arguments, which templates read as an object."""
    turns, variable = Hermes().render(HISTORY, [TIME])
    assert variable == [TIME]
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {"city": "巴黎"}
    assert (turns[0], turns[2]) == (HISTORY[0], HISTORY[2])


def test_models_without_tools(smollm2: Tokenizer) -> None:
    """No dialect is made up for a template that knows no tools."""
    assert dialect_of(smollm2) is None
    assert not ChatTemplate("{% set tools = messages[0].tools %}{{ tools }}", {}).takes_tools


# ---- over HTTP


@pytest.fixture(scope="module")
def server(glm: Tokenizer) -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    engine = FakeEngine(glm)
    with (
        served(engine, glm, ServerConfig(served_model_name=("glm",))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        yield client, engine


@pytest.fixture
def ask(server: tuple[openai.OpenAI, FakeEngine], glm: Tokenizer) -> Any:
    """`ask(output, **fields)`: a chat with tools whose answer is `output`, ended by the observation token."""
    client, engine = server
    engine.reset()

    def call(output: str, **fields: Any) -> Any:
        engine.script = [ranks()[bytes([byte])] for byte in output.encode()]
        engine.eos = glm.special_id("<|observation|>") or 0
        given = {"messages": [USER], "tools": [WEATHER, TIME], "max_tokens": 60}
        return client.chat.completions.create(model="glm", **given | fields)

    return call


OUTPUT = '\nget_weather\n{"city": "Paris"}'


def test_a_call_is_answered(ask: Any, server: Any, glm: Tokenizer) -> None:
    """A call comes as tool_calls with its own finish reason and no content; the prompt held the tools."""
    choice = ask(OUTPUT).choices[0]
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", *PARIS)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    prompt = glm.decode(server[1].handles[0].prompt)
    assert "## get_weather" in prompt
    assert "## get_time" in prompt


def test_a_call_is_streamed(ask: Any) -> None:
    """The call comes in one piece before the finish reason; nothing of it shows as content."""
    chunks = [chunk for chunk in ask(OUTPUT, stream=True) if chunk.choices]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    [call] = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.type, call.function.name, json.loads(call.function.arguments)) == (0, "function", *PARIS)
    assert call.id
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_text_is_answered(ask: Any) -> None:
    """What is no call is content, without the newline that GLM starts with, whole and streamed alike."""
    for output, wanted in (("\nget up!", "get up!"), ('get_rain\n{"a": 1}', 'get_rain\n{"a": 1}')):
        choice = ask(output).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (wanted, None, "stop")
        deltas = [chunk.choices[0].delta for chunk in ask(output, stream=True) if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == wanted


def test_tool_choice_none(ask: Any, server: Any, glm: Tokenizer) -> None:
    """With tool_choice none the model is not told of the tools, and nothing is read as a call."""
    choice = ask(OUTPUT, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (OUTPUT[1:], None)
    assert "get_weather" not in glm.decode(server[1].handles[0].prompt)


def test_one_call_where_more_are_not_wanted(ask: Any) -> None:
    """parallel_tool_calls false keeps the first call only."""
    output = OUTPUT + "\nget_time\n{}"
    assert len(ask(output).choices[0].message.tool_calls) == 2
    [call] = ask(output, parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "get_weather"


def test_a_call_that_is_cut_off_is_text(ask: Any) -> None:
    """A call that ran into max_tokens is shown as what it is."""
    choice = ask(OUTPUT, max_tokens=5).choices[0]
    assert (choice.message.content, choice.finish_reason) == (OUTPUT[1:5], "length")


def test_a_conversation_with_calls(ask: Any, server: Any, glm: Tokenizer) -> None:
    """Earlier calls and results are rendered for the model, with content null or left out beside calls."""
    ask("ok", messages=[USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, HISTORY[2]])
    prompt = glm.decode(server[1].handles[0].prompt, skip_special_tokens=False)
    assert prompt.endswith('<|assistant|>get_weather\n{"city": "巴黎"}<|observation|>\n15<|assistant|>')


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [WEATHER, WEATHER]}, "a function name twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "code"}]}, r"tools\[0\]\.type"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_rain"}}}, "get_rain.*not among tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.*function is required"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "drop one"),
        ({"tool_choice": "required", "tools": [BROKEN]}, "tools cannot be used"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]: .*tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, r"messages\[0\]: .*content is required"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, r"messages\[0\]: .*tool_calls belong to role assistant"),
    ],
)
def test_what_is_wrong_with_tools(ask: Any, fields: dict[str, Any], said: str) -> None:
    """A 400 names the field."""
    with pytest.raises(openai.BadRequestError, match=said):
        ask("x", **fields)


def test_tools_of_a_model_that_knows_none(client: openai.OpenAI) -> None:
    """Tools, and a conversation with calls, are a 400 where the template cannot say them."""
    with pytest.raises(openai.BadRequestError, match="knows no tools") as caught:
        client.chat.completions.create(model="smollm2", messages=[USER], tools=[WEATHER])  # type: ignore[list-item]
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        client.chat.completions.create(model="smollm2", messages=HISTORY)  # type: ignore[arg-type]


def test_structure_leaves_the_first_newline(ask: Any, server: Any, glm: Tokenizer) -> None:
    """GLM writes a newline before each answer: a grammar of the answer lets it, and asks for nothing more."""
    ask("ok", tools=None, extra_body={"guided_choice": ["ok", "no"]})
    asked = server[1].handles[0].params.grammar
    compiler = Compiler(glm.vocabulary(), (glm.special_id("<|user|>") or 0,))
    for said, fits in (("\nok", True), ("ok", True), ("\n\nok", False), ("yes", False)):
        matcher, ids = compiler.compile(asked), glm.encode(said, add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, said
