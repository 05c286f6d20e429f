"""Sampling where a request says nothing: the model's own recommendation, or vLLM's defaults."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from surefoot.spec import GenerationDefaults
from surefoot.types import SamplingParams
from tests.api.fake import MAX_MODEL_LEN, FakeEngine, served

DEFAULTS = GenerationDefaults(temperature=0.5, top_k=7, repetition_penalty=1.1, max_tokens=20)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server(smollm2: Tokenizer) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    engine = FakeEngine(smollm2)
    config = ServerConfig(served_model_name=("m",))
    with served(engine, smollm2, config, DEFAULTS) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client, engine


def params(server: tuple[httpx.Client, FakeEngine], path: str, body: dict[str, object]) -> SamplingParams:
    """What the engine is asked for."""
    client, engine = server
    engine.reset()
    assert client.post(path, json=body).status_code == 200
    return engine.handles[0].params


def test_defaults_fill_in(server: tuple[httpx.Client, FakeEngine]) -> None:
    """What a request leaves out, chat or completion, is the model's default; what that leaves out is vLLM's."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
        found = params(server, path, body)
        assert (found.temperature, found.top_k, found.repetition_penalty, found.top_p) == (0.5, 7, 1.1, 1.0)
        assert found.max_tokens == 20


def test_requests_beat_defaults(server: tuple[httpx.Client, FakeEngine]) -> None:
    """What a request gives counts, zero included."""
    found = params(server, "/v1/chat/completions", CHAT | {"temperature": 0, "top_k": 0, "max_tokens": 30})
    assert (found.temperature, found.top_k, found.max_tokens) == (0.0, 0, 30)


def test_default_length_yields_to_the_context(server: tuple[httpx.Client, FakeEngine]) -> None:
    """A recommended length that does not fit after the prompt is cut to what fits."""
    found = params(server, "/v1/completions", {"prompt": [5] * (MAX_MODEL_LEN - 4)})
    assert found.max_tokens == 4


def test_models_echo_the_defaults(server: tuple[httpx.Client, FakeEngine], http: httpx.Client) -> None:
    """/v1/models says what fills in."""
    card = server[0].get("/v1/models").json()["data"][0]
    assert card["generation_config"] == DEFAULTS.given()
    assert http.get("/v1/models").json()["data"][0]["generation_config"] == {}
