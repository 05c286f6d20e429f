"""Requests to /v1/responses and /v1/messages that are wrong in random places: a short 4xx, or an answer."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from tests.api.fake import FakeEngine, served

RESPONSE: dict[str, Any] = {
    "model": "glm", "instructions": "x", "max_output_tokens": 5, "temperature": 1.0, "top_p": 0.5, "top_logprobs": 2,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "summary": []},
    ],
    "include": ["message.output_text.logprobs"], "tool_choice": "auto", "stop": ["a"], "stream": False, "store": True,
    "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
    "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "reasoning": {"effort": None},
}  # fmt: skip
PROMPT: dict[str, Any] = {
    "model": "glm",
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                {"type": "thinking", "thinking": "x"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]},
                {"type": "text", "text": "y"},
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": {}}],
    "tool_choice": {"type": "auto"},
}
MESSAGE: dict[str, Any] = {
    **PROMPT, "max_tokens": 5, "stop_sequences": ["a"], "thinking": {"type": "disabled"}, "metadata": {},
    "stream": False,
}  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 1.5, "", "x", [], {}, [None], [[]], {"type": 5}, {"type": "text"}, {"type": ["text"]},
    "a" * 3000, 10**15, "\u0000", ["x"], [{"type": "message"}], {"a": {"b": []}}, "reasoning",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(glm: Tokenizer) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    engine = FakeEngine(glm)
    with (
        served(engine, glm, ServerConfig(served_model_name=("glm",))) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield http, engine


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a body."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One or two places are left out, or hold something else."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2))):
        *way, last = chance.choice(list(places(body)))
        node: Any = body
        for step in way:
            node = node[step]
        if chance.random() < 0.2:
            del node[last]
        else:
            node[last] = copy.deepcopy(chance.choice(VALUES))
    return body


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE), ("/v1/messages/count_tokens", PROMPT)],
)
def test_a_mutated_request_is_answered_or_refused(
    server: tuple[httpx.Client, FakeEngine], path: str, body: dict[str, Any]
) -> None:
    """The body as it is gets an answer; of its mutants none gets a 5xx, and no refused one reaches the engine."""
    http, engine = server
    chance = random.Random(path)
    assert http.post(path, json=body).status_code == 200
    refused = 0
    for _ in range(250):
        before, mutant = len(engine.handles), mutated(body, chance)
        reply = http.post(path, json=mutant)
        assert reply.status_code in (200, 400, 404), (mutant, reply.text)
        if reply.status_code != 200:
            refused += 1
            assert reply.json()["error"]["message"]
            assert len(reply.text) < 1000, mutant
            assert len(engine.handles) == before, mutant
    assert refused > 100
