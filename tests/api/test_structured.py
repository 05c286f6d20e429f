"""Structured output: what clients ask for, what is refused before it runs, and what a real model says."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from surefoot.api.grammar_helper import Verdict, judged
from surefoot.grammar import regex
from surefoot.types import Grammar
from tests.api.fake import FakeEngine
from tests.faults.support import Server

CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "A person, as JSON."}]}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["glad", "sad"]


# ---- refused, with the field's name ----------------------------------------------------------------------------------

DEEP = "start: r0\n" + "\n".join(f'r{at}: r{at + 1} r{at + 1} | "a"' for at in range(4000)) + '\nr4000: "b"'
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "cannot be used"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": "[1]"}, "guided_json", "an object"),
    ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type"),
    ({"guided_json": {"$ref": "http://example.com/x"}}, "guided_json", "cannot be used"),
    ({"guided_choice": []}, "guided_choice", "texts to choose from"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
    ({"guided_choice": "ab"}, "guided_choice", "list"),
    ({"guided_grammar": "start: ("}, "guided_grammar", "cannot be used"),
    ({"guided_grammar": "root ::= undefined_rule"}, "guided_grammar", "guided_grammar"),
    ({"guided_grammar": "start: start"}, "guided_grammar", "cannot be used"),
    ({"guided_grammar": DEEP}, "guided_grammar", "too costly"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "characters"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one of them"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "not supported"),
    ({"structured_outputs": {"rejex": "a"}}, "structured_outputs", "not a field"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs one"),
    ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "both say"),
    ({"bad_words": [""]}, "bad_words", "1 to 100 characters"),
    ({"bad_words": [7]}, "bad_words", "string"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [1 << 40]}, "allowed_token_ids", "vocabulary"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
def test_refused(http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str, reason: str) -> None:
    """What cannot be followed is a 400 that names the field and says why in a line; the engine never hears of it."""
    reply = http.post("/v1/chat/completions", json=CHAT | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]
    assert len(error["message"]) < 500
    assert "\n" not in error["message"]
    assert not engine.handles


class Burning:
    """A compiler that never ends."""

    def compile(self, grammar: Grammar) -> None:
        while True:
            pass


class Hungry:
    """A compiler that takes a gigabyte."""

    def compile(self, grammar: Grammar) -> None:
        bytearray(1 << 30)


class Crashing:
    """A compiler that ends its process."""

    def compile(self, grammar: Grammar) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("compiler", [Burning, Hungry, Crashing])
def test_a_costly_grammar_ends_with_its_fork(compiler: type) -> None:
    """Two seconds of processor time, 256 MiB, or a crash: the verdict comes, and the helper is there for the next."""
    grammar = regex("a", field="x")
    assert judged(compiler(), grammar) == Verdict(costly=True)


def test_what_reaches_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """Every way to ask for the same schema comes to the same grammar; text asks for nothing."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ways: list[dict[str, Any]] = [
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"response_format": {"type": "text"}},
    ]
    for fields in ways:
        assert http.post("/v1/chat/completions", json=CHAT | fields).is_success
    *grammars, nothing = [handle.params.grammar for handle in engine.handles]
    assert nothing is None
    assert len({each.source for each in grammars if each is not None}) == 1


def test_bad_words_are_tokens(http: httpx.Client, engine: FakeEngine, smollm2: Any) -> None:
    """A bad word is banned as it stands at the start and after a space."""
    assert http.post("/v1/chat/completions", json=CHAT | {"bad_words": ["Paris"]}).is_success
    banned = {smollm2.decode(ids) for ids in engine.handles[0].params.bad_token_ids}
    assert banned == {"Paris", " Paris"}


# ---- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-num-seqs", "8") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def real(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_parsed_by_the_official_client(real: openai.OpenAI) -> None:
    """`chat.completions.parse` returns the model that was asked for, for each of n choices."""
    answer = real.chat.completions.parse(**CHAT, response_format=Person, n=3, seed=1, temperature=1.0)
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3


def test_streamed(real: openai.OpenAI) -> None:
    """A streamed answer is the same JSON as a whole one of the same seed, with long prompts in chunks too."""
    asked = {**CHAT, "messages": [{"role": "user", "content": "Tell me of people. " * 300}], "seed": 5}
    whole = real.chat.completions.parse(**asked, response_format=Person)
    with real.chat.completions.stream(**asked, response_format=Person) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert isinstance(final.choices[0].message.parsed, Person)


def test_any_json_object(real: openai.OpenAI) -> None:
    """json_object yields an object, or the beginning of one where max_tokens cuts it."""
    choice = real.chat.completions.create(**CHAT, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    content = choice.message.content or ""
    assert content.lstrip().startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(content), dict)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"guided_choice": ["tea", "coffee"]}, "tea|coffee"),
        ({"guided_grammar": 'root ::= "<" [a-z]+ ">"'}, "<[a-z]+>"),
        ({"structured_outputs": {"regex": "(ab){2,4}"}}, "(ab){2,4}"),
        ({"structured_outputs": {"choice": ["tea", "coffee"]}, "stop": ["off"]}, "tea|c"),
    ],
)
def test_vllm_fields(real: openai.OpenAI, fields: dict[str, Any], form: str) -> None:
    """vLLM's fields, in completions as in chats, with a stop string or without."""
    stop = fields.pop("stop", None)
    text = real.completions.create(
        model="smollm2", prompt="It is", extra_body=fields, stop=stop, max_tokens=60
    ).choices[0]
    assert re.fullmatch(form, text.text), text


def test_structured_beside_plain(real: openai.OpenAI, server: Server) -> None:
    """Structured requests in one batch with plain ones change nothing in these, and their failure neither."""
    plain = {**CHAT, "seed": 3, "max_tokens": 40, "temperature": 0.8}
    alone = real.chat.completions.create(**plain).choices[0].message.content
    dead = {**CHAT, "extra_body": {"guided_choice": ["a"], "min_tokens": 30}, "max_tokens": 40}
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(real.chat.completions.create, **plain) for _ in range(2)]
        parsed = [pool.submit(real.chat.completions.parse, **CHAT, response_format=Person, seed=at) for at in range(4)]
        with pytest.raises(openai.InternalServerError, match="leaves no token that could follow"):
            real.chat.completions.create(**dead)
    assert all(text.result().choices[0].message.content == alone for text in texts)
    assert all(isinstance(each.result().choices[0].message.parsed, Person) for each in parsed)
    assert server.http.get("/health/ready").is_success


def test_goes_on_after_the_workers_death(real: openai.OpenAI, server: Server) -> None:
    """A worker that is killed in the middle of structured answers costs a pause: they end as they would have."""
    asked = {**CHAT, "seed": 11, "extra_body": {"guided_regex": "([a-z]{1,9} ){60}"}}
    expected = real.chat.completions.create(**asked).choices[0].message.content
    killer = threading.Timer(0.0, lambda: server.worker().kill())
    text = ""
    for at, chunk in enumerate(real.chat.completions.create(**asked, stream=True)):
        text += chunk.choices[0].delta.content or ""
        if at == 20:
            killer.start()
    assert text == expected


# ---- the best of several ---------------------------------------------------------------------------------------------


def test_best_of(real: openai.OpenAI) -> None:
    """Of best_of choices the likeliest per token are the answer, likeliest first; the tokens of all are counted."""
    asked: dict[str, Any] = {
        "model": "smollm2",
        "prompt": ["Once", "Twice"],
        "seed": 4,
        "max_tokens": 6,
        "temperature": 1.5,
    }
    every = real.completions.create(**asked, n=4, logprobs=0)
    best = real.completions.create(**asked, n=2, best_of=4)

    def score(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = [sorted(every.choices[first : first + 4], key=score, reverse=True)[:2] for first in (0, 4)]
    assert [choice.text for choice in best.choices] == [choice.text for prompt in ranked for choice in prompt]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None and every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
