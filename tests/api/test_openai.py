"""The schemas against the official client's own list of fields, and how they become sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat

from surefoot.api.openai import ChatRequest, CompletionRequest, Sampling, StreamOptions, parse
from surefoot.errors import InvalidRequest

TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}

WORKS: dict[str, Any] = {
    "model": "m", "frequency_penalty": 1.0, "presence_penalty": 1, "temperature": 0.5, "top_p": 0.5, "n": 2, "seed": 5,
    "max_tokens": 5, "max_completion_tokens": 5, "stop": ["a"], "logit_bias": {"1": 1}, "user": "u",
    "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "parallel_tool_calls": True, "messages": TURN["messages"], "prompt": "x",
    "include_usage": True, "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto", "echo": True, "best_of": 3,
}  # fmt: skip
"""Documented fields that are served, or that cannot matter here, and a value for each."""

REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy"}, "function_call": "auto", "functions": [{"name": "f"}], "modalities": ["audio"],
    "moderation": {}, "prediction": {"type": "content"}, "prompt_cache_options": {}, "reasoning_effort": "high",
    "verbosity": "low", "web_search_options": {}, "suffix": "s",
    "include_obfuscation": True,
}  # fmt: skip
"""Documented fields that do not work yet, and a value that asks for something."""

NEUTRAL: dict[str, Any] = {
    "functions": [], "function_call": "none", "modalities": ["text"], "reasoning_effort": "none", "tools": [],
    "verbosity": "medium", "suffix": "",
    "include_obfuscation": False,
}  # fmt: skip
"""Values of such fields that ask for nothing."""

ELSEWHERE = {"stream_options", "logprobs", "top_logprobs"}
"""Documented fields that have tests of their own: test_stream_usage, test_chat_logprobs, test_completion_logprobs."""


def documented() -> list[tuple[str, str]]:
    """Every field the official client knows, with the endpoint it belongs to."""
    return [
        *(("chat", name) for name in sorted(chat.CompletionCreateParamsBase.__annotations__)),
        *(("completion", name) for name in sorted(completion.CompletionCreateParamsBase.__annotations__)),
        *(("options", name) for name in sorted(ChatCompletionStreamOptionsParam.__annotations__)),
    ]


def read(kind: str, fields: dict[str, Any]) -> None:
    if kind == "options":
        parse(StreamOptions, fields)
    else:
        schema: type[Sampling] = ChatRequest if kind == "chat" else CompletionRequest
        parse(schema, (TURN if kind == "chat" else TEXT) | fields).check()


@pytest.mark.parametrize(("kind", "name"), documented())
def test_every_documented_field_is_handled(kind: str, name: str) -> None:
    """A field of OpenAI's either works or is a 400 that names it, while null and neutral values are accepted."""
    assert name in WORKS.keys() | REFUSED.keys() | ELSEWHERE, f"{name} is new: decide what it does"
    if name not in ("messages", "prompt"):
        read(kind, {name: None})
    if name in WORKS:
        read(kind, {name: WORKS[name]})
    if name in NEUTRAL:
        read(kind, {name: NEUTRAL[name]})
    if name in REFUSED:
        with pytest.raises(InvalidRequest, match="not supported yet") as caught:
            read(kind, {name: REFUSED[name]})
        assert caught.value.param == name
        assert caught.value.message.startswith(name)


def test_neutral_is_exact() -> None:
    """A value that merely compares equal to a neutral one is not it."""
    with pytest.raises(InvalidRequest, match="echo"):
        parse(CompletionRequest, TEXT | {"echo": 0})


def test_all_parameters_arrive() -> None:
    """Every sampling field reaches the sampling parameters under its own name."""
    fields: dict[str, Any] = {
        "n": 2, "max_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_p": 0.6, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 9, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    more = {"stop": "a", "stop_token_ids": [1], "logit_bias": {"5": 1}, "logprobs": 3}
    params = parse(CompletionRequest, TEXT | fields | more).params()
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.stop, params.stop_token_ids, params.logprobs) == (("a",), (1,), 3)
    assert dict(params.logit_bias) == {"5": 1}


def test_null_is_not_given() -> None:
    """Null leaves the default, for every field that has one."""
    names = [name for name in CompletionRequest.model_fields if name != "prompt"]
    nulls = parse(CompletionRequest, TEXT | dict.fromkeys(names)).params()
    assert nulls == parse(CompletionRequest, TEXT).params()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    """Chat's two fields for log-probabilities become one number of alternatives."""
    assert parse(ChatRequest, TURN | fields).params().logprobs == expected


def test_a_typing_error_is_understood() -> None:
    """An unknown field close to a known one is answered with the latter."""
    with pytest.raises(InvalidRequest, match="Did you mean temperature"):
        parse(ChatRequest, TURN | {"temprature": 1})
