"""What a caller learns about memory: in errors, in /memory and in the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from surefoot.api.memory import Memory
from surefoot.api.tokenizer import Tokenizer
from surefoot.config import GIB, EngineConfig, ServerConfig
from surefoot.errors import InsufficientMemory, Overloaded
from surefoot.plan import MachineMemory, plan_memory
from tests.api.fake import FakeEngine, served
from tests.test_plan import SPEC

PLAN = plan_memory(
    SPEC, EngineConfig(max_num_seqs=4), MachineMemory(total=8 * GIB, free=8 * GIB), device="cpu", dtype="float32"
)
NUMBERS = {"needed", "free", "ours", "neighbours", "kv_free", "longest_prompt", "longest_prompt_now"}


@pytest.fixture
def planned(engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine of the tests' server, with a plan of its memory."""
    engine.info.plan = PLAN
    yield engine
    engine.info.plan = None


def test_a_prompt_that_does_not_fit_now_may_come_again(client: openai.OpenAI, planned: FakeEngine) -> None:
    """Where the cache has become smaller than a prompt it is a 503 with Retry-After, with bytes and tokens, and the
    longest prompt that it names is served.
    """
    planned.snapshot = replace(planned.snapshot, blocks_total=3, blocks_used=1)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="smollm2", prompt=[5] * 100)
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "5")
    body = caught.value.body
    assert isinstance(body, dict)
    assert "has 100 tokens, and the longest that fits now has 47" in body["message"]
    numbers = body["memory"]
    assert set(numbers) == NUMBERS
    assert (numbers["longest_prompt"], numbers["longest_prompt_now"]) == (47, 31)
    assert (numbers["needed"], numbers["kv_free"]) == (7 * PLAN.block_bytes, 2 * PLAN.block_bytes)
    assert planned.handles == []
    assert client.completions.create(model="smollm2", prompt=[5] * 47).choices[0].text


def test_blocks_given_back_for_want_of_work_count_as_room(client: openai.OpenAI, planned: FakeEngine) -> None:
    """An idle cache comes back with the next request, so nothing is refused for it."""
    planned.snapshot = replace(planned.snapshot, blocks_total=0, blocks_used=0, blocks_idle=100)
    assert client.completions.create(model="smollm2", prompt=[5] * 100).choices[0].text


@pytest.mark.parametrize("error", [Overloaded("The queue is full.", retry_after=3), InsufficientMemory("No room.")])
def test_errors_about_memory_have_the_numbers(
    client: openai.OpenAI, planned: FakeEngine, error: Overloaded | InsufficientMemory
) -> None:
    """What the engine refuses, or fails for memory, says what was needed and what there is, beside its message."""
    planned.refusal = error
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="smollm2", prompt="Hello")
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["message"] == error.message
    assert set(body["memory"]) == NUMBERS


def test_what_never_fits_is_refused_before_it_is_tokenized(
    http: httpx.Client, smollm2: Tokenizer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text whose bytes alone are too many tokens is a 400 with both numbers, and the tokenizer never sees it."""
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    began = time.monotonic()
    reply = http.post("/v1/completions", json={"model": "smollm2", "prompt": "word " * 200_000})
    assert time.monotonic() - began < 0.5  # ten times what is promised
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "maximum context length is 512 tokens" in message
    assert "1000000 characters, which are at least" in message
    assert engine.handles == []


def test_memory_tells_every_row_and_what_is_measured(planned: FakeEngine, smollm2: Tokenizer) -> None:
    """/memory has a number for each row of the plan, the cache as it is now, and what the device has; the metrics have
    the same rows.
    """
    planned.snapshot = replace(planned.snapshot, blocks_total=50, oom_predicted=1)
    config = ServerConfig(served_model_name=("smollm2",), admin_api_key=("secret",))
    with served(planned, smollm2, config) as url, httpx.Client(base_url=url) as http:
        found = http.get("/memory", headers={"authorization": "Bearer secret"}).json()
        metrics = http.get("/metrics").text
    rows = {name: size for name, size, _ in PLAN.rows()} | {"kv_cache": 51 * PLAN.block_bytes}
    assert found["rows"] == rows
    assert found["limit"] == sum(rows.values())
    measured = found["measured"]
    assert measured["free"] + measured["ours"] + measured["neighbours"] == measured["total"]
    assert labelled(metrics, "surefoot:memory_bytes", "row") == rows
    assert labelled(metrics, "surefoot:device_memory_bytes", "what").keys() == {"total", "free", "ours", "neighbours"}
    assert labelled(metrics, "surefoot:oom_total", "cause") == {"allocation": 3, "library": 0, "predicted": 1}


def labelled(metrics: str, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one of its labels."""
    families = text_string_to_metric_families(metrics)
    return {each.labels[label]: each.value for family in families for each in family.samples if each.name == name}


def test_measurements_are_shared_by_those_who_are_refused(planned: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of refusals reads the device twice a second at most."""
    reads: list[int | None] = []
    monkeypatch.setattr(
        "surefoot.api.memory._measure",
        lambda pid: reads.append(pid) or {"free": 1, "ours": 1, "neighbours": 1},
    )
    memory = Memory(planned)
    for _ in range(1000):
        memory.numbers(10)
    assert len(reads) <= 2


@pytest.mark.parametrize(("while_sleeping", "status"), [("wake", 200), ("refuse", 503)])
def test_a_sleeping_server_wakes_or_says_so(
    engine: FakeEngine, smollm2: Tokenizer, while_sleeping: str, status: int
) -> None:
    """/sleep and /wake_up need the admin key. A server that sleeps is healthy; it is ready, and serves, where requests
    wake it, and is a 503 that names the way out where they do not.
    """
    config = ServerConfig(served_model_name=("m",), admin_api_key=("secret",), while_sleeping=while_sleeping)
    admin = {"authorization": "Bearer secret"}
    with served(engine, smollm2, config) as url, httpx.Client(base_url=url) as http:
        assert http.post("/sleep").status_code == http.post("/wake_up").status_code == 401
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/sleep", headers=admin).json() == {"is_sleeping": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.get("/health").json() == {"status": "sleeping"}
        assert http.get("/health/ready").status_code == status
        reply = http.post("/v1/completions", json={"prompt": "Hello"})
        assert reply.status_code == status
        if status == 503:
            assert "/wake_up" in reply.json()["error"]["message"]
            assert reply.headers["retry-after"]
        assert http.post("/wake_up", headers=admin).json() == {"is_sleeping": False}
        assert http.get("/health").json() == {"status": "ok"}
