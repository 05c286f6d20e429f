"""Dialects of tool calling: which one a model speaks, what it reads, and that a call that is demanded is one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from surefoot.api.detok import Detokenizer
from surefoot.api.dialects import DIALECTS, Llama3, Mistral, dialect_of
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.api.tools import Hermes, ToolDialect
from surefoot.checkpoint import Checkpoint
from surefoot.config import ServerConfig
from surefoot.errors import ConfigError
from surefoot.grammar import Compiler, lark
from tests.api.fake import FakeEngine, served
from tests.api.glm import ranks, write_tokenizer
from tests.api.test_tools import CALL, HISTORY, PARIS, TIME, USER, parsed

END = "<|endoftext|>"
CITY = {"type": "string", "maxLength": 8, "pattern": "^[a-z ]*$"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "additionalProperties": False}},
}
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}",
    "llama3_json": "{% if tools %}{{ tools }}<|python_tag|>{% endif %}{{ messages[-1].content }}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{{ messages[-1].content }}",
    "glm4": None,
}
SPECIALS = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "glm4": ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
}


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    """A tokenizer with the special tokens and the template of a dialect."""
    names = (END, "[gMASK]", "<sop>", *SPECIALS.get(name, ()))
    added = {str(len(ranks()) + at): {"content": text, "special": True} for at, text in enumerate(names)}
    template = {} if TEMPLATES[name] is None else {"chat_template": TEMPLATES[name]}
    write_tokenizer(folder, added_tokens_decoder=added, **template)
    return load_tokenizer(Checkpoint(kind="hf", path=folder, name=name))


@pytest.fixture(scope="module", params=TEMPLATES)
def spoken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Tokenizer, ToolDialect]:
    tokenizer = tokenizer_of(request.param, tmp_path_factory.mktemp(request.param))
    dialect = dialect_of(tokenizer)
    assert dialect is not None
    return request.param, tokenizer, dialect


def test_dialects_are_told_by_tokens_and_template(spoken: tuple[str, Tokenizer, ToolDialect]) -> None:
    """Each model is found to speak its own dialect, by itself and by name."""
    name, tokenizer, dialect = spoken
    assert type(dialect) is type(dialect_of(tokenizer, name))
    assert dialect_of(tokenizer, "none") is None


def test_dialects_that_a_model_cannot_speak(smollm2: Tokenizer) -> None:
    """A name that is unknown, or needs tokens that are not there, ends the start with what there is."""
    with pytest.raises(ConfigError, match=r"none of auto, none, glm4, mistral, hermes, llama3_json"):
        dialect_of(smollm2, "pythonic")
    with pytest.raises(ConfigError, match="lacks the tokens of mistral"):
        dialect_of(smollm2, "mistral")


def walk(tokenizer: Tokenizer, source: str, seed: int) -> list[int]:
    """Tokens drawn at random among those that a grammar allows."""
    end = tokenizer.special_id(END) or 0
    matcher = Compiler(tokenizer.vocabulary(), (end,)).compile(lark(source, field="tools"))
    chooser, ids = random.Random(seed), list[int]()
    for _ in range(600):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        token = end if len(ids) > 200 and bits[end] else chooser.choice(np.flatnonzero(bits).tolist())
        if token == end:
            return ids
        assert matcher.consume_token(token)
        ids.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("several", [False, True])
def test_what_keeps_to_the_grammar_is_a_call(spoken: tuple[str, Tokenizer, ToolDialect], several: bool) -> None:
    """Whatever a model says under the grammar of a demanded call is read as calls of the tools, and nothing is left."""
    _, tokenizer, dialect = spoken
    source = dialect.grammar([WEATHER, NOW], several=several)
    counts = set()
    for seed in range(12):
        detok = Detokenizer(tokenizer, shown=dialect.markers)
        text = "".join(map(detok.push, walk(tokenizer, source, seed))) + detok.finish()
        if dialect.markers:  # a token's text comes in one piece
            parser = dialect.parser({"get_weather", "get_time"}, forced=True)
            before = [parser.push(Mistral.MARKER), parser.push(text.removeprefix(Mistral.MARKER)), parser.finish(5)]
            shown, calls = "".join(each.text for each in before).strip(), [c for each in before for c in each.calls]
            found = [(call.name, json.loads(call.arguments)) for call in calls]
        else:
            shown, found = parsed(dialect.parser({"get_weather", "get_time"}, forced=True), text, 5, step=3)
        assert shown.strip() == ""
        assert found
        assert all(set(value) == ({"city"} if name == "get_weather" else set()) for name, value in found)
        counts.add(len(found))
    assert several or counts == {1}


# ---- Llama 3


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        ('\n {"name": "get_time", "parameters": {}}; {"name": "get_time"}', "", [("get_time", {})] * 2),
        ('{"name": "no", "parameters": {}}', '{"name": "no", "parameters": {}}', []),
        ('{"name": "get_time", "parameters": 5}', '{"name": "get_time", "parameters": 5}', []),
        ('{"name": "get_time"', '{"name": "get_time"', []),
        ('{"name": "get_time"} it is', '{"name": "get_time"} it is', []),
        ("It is {", "It is {", []),
        ("", "", []),
    ],
)
def test_llama_calls(text: str, shown: str, calls: list[Any], step: int) -> None:
    """Objects that name a tool are calls where the whole output is made of them; all else is text."""
    assert parsed(Llama3().parser({"get_weather", "get_time"}), text, None, step=step) == (shown, calls)


# ---- Mistral


@pytest.mark.parametrize(
    ("pieces", "shown", "calls"),
    [
        (["[TOOL_CALLS]", '[{"name": "get_weather", "argum', 'ents": {"city": "Paris"}}]'], "", [PARIS]),
        (["Wait.", "[TOOL_CALLS]", 'get_weather{"city": "Paris"}'], "Wait.", [PARIS]),
        (["[TOOL_CALLS]", "get_time", "[ARGS]", "{}", "[TOOL_CALLS]", "get_time", "{}"], "", [("get_time", {})] * 2),
        (["[TOOL_CALLS]", '[{"name": "no"}]'], '[TOOL_CALLS][{"name": "no"}]', []),
        (["[TOOL_CALLS]", "get_time[ARGS]{"], "[TOOL_CALLS]get_time[ARGS]{", []),
        (["[1, 2]"], "[1, 2]", []),
    ],
)
def test_mistral_calls(pieces: list[str], shown: str, calls: list[Any]) -> None:
    """What follows the marker is a list of calls, or names with arguments; what is neither is shown with the marker."""
    parser = Mistral(5, None).parser({"get_weather", "get_time"})
    found = [*map(parser.push, pieces), parser.finish(None)]
    assert "".join(each.text for each in found) == shown
    made = [call for each in found for call in each.calls]
    assert [(call.name, json.loads(call.arguments)) for call in made] == calls
    assert all(len(call.id) == 9 and call.id.isalnum() for call in made)


def test_mistral_conversation() -> None:
    """Ids become nine letters and digits, the same for a call and its result; nine of them stay as they are."""
    turns, variable = Mistral(5, None).render(HISTORY, [TIME])
    assert variable == [TIME]
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {"city": "巴黎"}
    assert turns[1]["tool_calls"][0]["id"] == turns[2]["tool_call_id"]
    assert len(turns[2]["tool_call_id"]) == 9
    kept, _ = Mistral(5, None).render(
        [{"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "abcDEF123"}]}], []
    )
    assert kept[0]["tool_calls"][0]["id"] == "abcDEF123"


# ---- over HTTP


def test_demanded_calls(tmp_path: Path) -> None:
    """required and a name reach the engine as a grammar; a call comes out; auto and none ask for no grammar."""
    tokenizer = tokenizer_of("hermes", tmp_path)
    engine = FakeEngine(tokenizer)
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    engine.script = tokenizer.encode(said, add_special_tokens=False)
    config = ServerConfig(served_model_name=("m",))
    named = {"type": "function", "function": {"name": "get_weather"}}
    with (
        served(engine, tokenizer, config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        for choice in ("auto", "none", "required", named):
            answer: Any = client.chat.completions.create(
                model="m",
                messages=[USER],
                tools=[WEATHER, NOW],
                tool_choice=choice,
                max_tokens=100,  # type: ignore[list-item, call-overload]
            )
            called = [
                (c.function.name, json.loads(c.function.arguments)) for c in answer.choices[0].message.tool_calls or ()
            ]
            assert called == ([] if choice == "none" else [PARIS])
            assert answer.choices[0].finish_reason == ("stop" if choice == "none" else "tool_calls")
        grammars = [handle.params.grammar for handle in engine.handles]
    assert grammars[:2] == [None, None]
    required, one = grammars[2:]
    assert required is not None and "get_time" in required.source
    assert one is not None and "get_time" not in one.source
    assert isinstance(dialect_of(tokenizer), Hermes)
    assert set(DIALECTS) == set(TEMPLATES)
