"""Deadlines, and draining: a request whose time is up ends in an error, whole or streamed, and is dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from tests.api.fake import FakeEngine, eventually, served

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True}


@pytest.fixture(scope="module")
def hurried(smollm2: Tokenizer) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    """A server with limits of its own, and an admin key."""
    engine = FakeEngine(smollm2)
    config = ServerConfig(
        served_model_name=("smollm2",), request_timeout=2.0, first_token_timeout=0.3, admin_api_key=("secret",)
    )
    with served(engine, smollm2, config) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client, engine


@pytest.mark.parametrize("stream", [False, True])
def test_the_requests_own_limit(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    """`timeout` seconds after it came it ends in a 408 that names the field, and leaves the engine."""
    engine.delay = 0.05
    began = time.monotonic()
    response = http.post("/v1/completions", json={**BODY, "timeout": 0.2, "stream": stream})
    assert time.monotonic() - began < 2
    if stream:
        last = response.text.strip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 408
        error = response.json()["error"]
    assert (error["code"], error["type"]) == (408, "RequestTimeoutError")
    assert "within 0.2 s (timeout)" in error["message"]
    assert "[DONE]" not in response.text
    eventually(lambda: engine.handles[-1].live == set())


def test_a_request_in_time_is_not_touched(http: httpx.Client) -> None:
    """A limit that is not met changes nothing."""
    response = http.post("/v1/completions", json={**BODY, "max_tokens": 3, "timeout": 30})
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", [0, -1, "soon", 1e9])
def test_limits_that_are_none(http: httpx.Client, value: object) -> None:
    """A timeout that is no number of seconds is a 400 that names the field."""
    response = http.post("/v1/completions", json={**BODY, "timeout": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


def test_the_servers_limit_to_the_first_token(hurried: tuple[httpx.Client, FakeEngine]) -> None:
    """--first-token-timeout ends a request that waits, and not one that has begun."""
    client, engine = hurried
    engine.reset()
    engine.delay = 0.6
    response = client.post("/v1/completions", json=BODY)
    assert response.status_code == 408
    assert "first token" in response.json()["error"]["message"]
    engine.delay = 0.02
    assert client.post("/v1/completions", json={**BODY, "max_tokens": 30}).status_code == 200


def test_the_servers_limit_cannot_be_stretched(hurried: tuple[httpx.Client, FakeEngine]) -> None:
    """--request-timeout holds whatever a request asks for."""
    client, engine = hurried
    engine.reset()
    engine.delay = 0.1
    response = client.post("/v1/completions", json={**BODY, "timeout": 60})
    assert response.status_code == 408
    assert "within 2 s" in response.json()["error"]["message"]


def test_time_that_is_up_without_a_worker(hurried: tuple[httpx.Client, FakeEngine]) -> None:
    """While a worker is replaced the answer is a 503 with Retry-After: it is the server's fault."""
    client, engine = hurried
    engine.reset()
    engine.delay, engine.alive = 1.0, False
    response = client.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0


def test_draining_by_request(hurried: tuple[httpx.Client, FakeEngine]) -> None:
    """/drain is closed without the admin key; with it new requests are refused from then on."""
    client, engine = hurried
    engine.reset()
    assert client.post("/drain").status_code == 401
    assert client.post("/drain", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert not engine.draining
    answer = client.post("/drain", headers={"authorization": "Bearer secret"})
    assert (answer.status_code, answer.json()) == (200, {"status": "drained"})
    assert client.post("/v1/completions", json=BODY).status_code == 503


def test_draining_needs_a_key_to_exist(http: httpx.Client, engine: FakeEngine) -> None:
    """A server without an admin key is drained by nobody."""
    assert http.post("/drain", headers={"authorization": "Bearer none"}).status_code == 401
    assert not engine.draining
