"""Everything but generating: keys, routes, models, tokens, health, metrics, documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest
from structlog.testing import capture_logs

import surefoot
from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from tests.api.fake import MAX_MODEL_LEN, FakeEngine, served


def test_models(client: openai.OpenAI) -> None:
    """Every served name is listed with its context, and can be asked for, slashes included."""
    assert [model.id for model in client.models.list()] == ["smollm2", "other/name"]
    model = client.models.retrieve("other/name")
    assert (model.id, model.object) == ("other/name", "model")
    assert model.max_model_len == MAX_MODEL_LEN  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/models/nobody", "/v1/nothing", "/", "/v1/models/", "/v1/chat/completions/"])
def test_not_found(http: httpx.Client, path: str) -> None:
    """Unknown models and routes are 404s in the usual shape."""
    response = http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"


def test_unknown_model(client: openai.OpenAI, engine: FakeEngine) -> None:
    """A request for a model that is not served is a 404 that names the field and the models there are."""
    with pytest.raises(openai.NotFoundError, match="smollm2") as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.param == "model"
    assert not engine.handles


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("DELETE", "/version"), ("PATCH", "/health")])
def test_method_not_allowed(http: httpx.Client, method: str, path: str) -> None:
    """A known route under a wrong method is a 405 that says which methods it has."""
    response = http.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "MethodNotAllowedError"
    assert response.headers["allow"]


def test_second_name(client: openai.OpenAI) -> None:
    """Each served name works, and the answer carries the one that was asked for."""
    assert client.completions.create(model="other/name", prompt="x").model == "other/name"


def test_tokenize(http: httpx.Client, smollm2: Tokenizer) -> None:
    """Text and conversations become token ids, and ids become text again."""
    answer = http.post("/tokenize", json={"prompt": "Hello 123", "return_token_strs": True}).json()
    ids = smollm2.encode("Hello 123")
    strings = [smollm2.token_text(token) for token in ids]
    assert answer == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": strings}
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello 123"}
    turns = [{"role": "user", "content": "Hello"}]
    assert http.post("/tokenize", json={"messages": turns}).json()["tokens"] == smollm2.encode_chat(turns)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "y"}, "model"),
        ("/tokenize", {"prompt": "x", "y": 1}, "y"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "y"}, "model"),
    ],
)
def test_bad_tokens(http: httpx.Client, path: str, body: dict[str, object], param: str) -> None:
    """Bad input to the token routes names its field."""
    response = http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_version(http: httpx.Client) -> None:
    """The version is the package's."""
    assert http.get("/version").json() == {"version": surefoot.__version__}


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping"])
def test_health(http: httpx.Client, path: str) -> None:
    """A server that serves is healthy by every probe."""
    assert http.get(path).status_code == 200


def test_docs_need_no_network(http: httpx.Client) -> None:
    """The documentation loads nothing from elsewhere, and describes the bodies."""
    page = http.get("/docs").text
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert sources
    for source in sources:
        assert source.startswith("/")
        assert http.get(source).status_code == 200
    schema = http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "temperature" in body["properties"]


# ---- metrics --------------------------------------------------------------------------------------------------------


def metrics(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_of_the_engine(http: httpx.Client) -> None:
    """The engine's snapshot shows under vLLM's names."""
    found = metrics(http)
    labels = '{engine="0",model_name="smollm2"}'
    assert found[f"vllm:num_requests_running{labels}"] == 3
    assert found[f"vllm:num_requests_waiting{labels}"] == 2
    assert found[f"vllm:kv_cache_usage_perc{labels}"] == 0.25
    assert found[f"vllm:num_preemptions_total{labels}"] == 7
    assert found[f"surefoot:steps_oom_total{labels}"] == 4


def test_metrics_of_requests(http: httpx.Client, engine: FakeEngine) -> None:
    """A request leaves its tokens, latencies, finish reason and status behind."""
    before = metrics(http)
    answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "n": 2}).json()
    assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
    after = metrics(http)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    labels = '{engine="0",model_name="smollm2"}'
    assert gained(f"vllm:prompt_tokens_total{labels}") == answer["usage"]["prompt_tokens"]
    assert gained(f"vllm:generation_tokens_total{labels}") == 6
    assert gained('vllm:request_success_total{engine="0",finished_reason="length",model_name="smollm2"}') == 2
    assert gained(f"vllm:time_to_first_token_seconds_count{labels}") == 1
    assert gained(f"vllm:inter_token_latency_seconds_count{labels}") == 4
    assert gained(f"vllm:e2e_request_latency_seconds_count{labels}") == 1
    assert gained('surefoot:http_responses_total{method="POST",route="/v1/completions",status="200"}') == 1
    assert gained('surefoot:http_responses_total{method="POST",route="/v1/completions",status="400"}') == 1
    assert gained('surefoot:request_errors_total{type="BadRequestError"}') == 1


def test_labels_do_not_grow_with_what_clients_invent(http: httpx.Client) -> None:
    """Unknown routes and methods share one label each."""
    for method in ("PROPFIND", "MKCOL"):
        http.request(method, "/invented")
    found = " ".join(metrics(http))
    assert 'method="other",route="unmatched",status="404"' in found
    assert "/invented" not in found
    assert "MKCOL" not in found


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(smollm2: Tokenizer) -> Iterator[httpx.Client]:
    config = ServerConfig(served_model_name=("smollm2",), api_key=("first", "sécond"))
    with served(FakeEngine(smollm2), smollm2, config) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("header", [None, "first", "Bearer", "Bearer wrong", "Basic first", "Bearer first x"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/docs", "/openapi.json", "/version", "/nowhere"])
def test_no_key_no_entry(guarded: httpx.Client, path: str, header: str | None) -> None:
    """Without a known key every route but the probes is a 401, those that do not exist too."""
    response = guarded.get(path, headers={} if header is None else {"authorization": header})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "AuthenticationError"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first", "sécond"])
def test_each_key_opens(guarded: httpx.Client, key: str) -> None:
    """Any of the keys lets in."""
    headers = {b"authorization": f"Bearer {key}".encode()}
    assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_probes_need_no_key(guarded: httpx.Client, path: str) -> None:
    """Health can be asked for without a key."""
    assert guarded.get(path).status_code == 200


# ---- the last resort ------------------------------------------------------------------------------------------------


def test_a_bug_is_logged_once(http: httpx.Client, engine: FakeEngine) -> None:
    """An unexpected exception is a 500, and one line in the log with its cause."""
    engine.failure = ZeroDivisionError("secret")
    with capture_logs() as logs:
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
    assert [entry["log_level"] for entry in logs] == ["error"]


def test_import_is_light() -> None:
    """The app loads without torch and transformers."""
    code = "import sys, surefoot.api.app; assert not {'torch', 'transformers', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
