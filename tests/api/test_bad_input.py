"""Bad input: each is a 4xx that names the field, in the same shape, and the engine never hears of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.fake import MAX_MODEL_LEN, FakeEngine

PATHS = ("/v1/chat/completions", "/v1/completions")
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


class Raw(str):
    """JSON text that goes into the body as it stands."""


BIG = Raw("9" * 5000)
DEEP = Raw("[" * 200 + "]" * 200)
DEEPER = Raw('{"a":' * 100_000 + "1" + "}" * 100_000)

# (field, value): wrong on both endpoints
BOTH: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, 101, "1", True, [], {}, Raw("NaN"), Raw("Infinity"), Raw("-Infinity"),
                                           Raw("1e999"), Raw("-1e999"), BIG, DEEP)),
    *(("top_p", value) for value in (0, -1, 1.5, 2.0, "0.5", True, Raw("NaN"), Raw("1e400"))),
    *(("top_k", value) for value in (-2, 1.5, "1", True, Raw("1e999"), BIG)),
    *(("min_p", value) for value in (-0.1, 1.1, "0", Raw("NaN"))),
    *(("repetition_penalty", value) for value in (0, -1, 101, "1", Raw("NaN"), 1e-30)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, "1", Raw("NaN"))),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, "1", Raw("Infinity"))),
    *(("n", value) for value in (0, -1, 129, 1000, 1.5, "1", True, BIG)),
    *(("max_tokens", value) for value in (0, -1, 1.5, "16", True, MAX_MODEL_LEN + 1, 2**63, 2**70, BIG)),
    *(("min_tokens", value) for value in (-1, 1.5, "1", MAX_MODEL_LEN + 1)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1", True, BIG)),
    *(("stop", value) for value in ("", [""], ["a", ""], 1, [1], [None], {"a": 1}, ["x"] * 17, "x" * 1001,
                                    Raw('"\\ud800"'))),
    *(("stop_token_ids", value) for value in ([10**6], [-1], [49152], ["1"], [1.5], 5, "5", [True], [0] * 129, [BIG])),
    *(("logit_bias", value) for value in ({"999999": 5}, {"-1": 5}, {"a": 1}, {"1": 101}, {"1": -101}, {"1": "x"},
                                          {"1.0": 1}, {" 1": 1}, {"١": 1}, {"1": None}, [1], 5, {"1": Raw("NaN")},
                                          {"1": 1, "01": 2}, {str(i): 1 for i in range(1025)})),
    *(("logit_bias", value) for value in (Raw('{"1": 1, "1": 2}'), {"1": True})),
    *(("ignore_eos", value) for value in (1, "true", [])),
    *(("include_stop_str_in_output", value) for value in (1, "true")),
    *(("skip_special_tokens", value) for value in (0, "false")),
    *(("add_special_tokens", value) for value in (0, "false")),
    *(("return_token_ids", value) for value in (0, "false")),
    *(("priority", value) for value in (1.5, "0", 2**40)),
    *(("stream_options", value) for value in ({"include_usage": 1}, {"x": 1}, 5, {"include_obfuscation": True})),
    *(("user", value) for value in (5, ["a"])),
    ("model", 5),
    ("model", "no such model"),
    ("model", ""),
    ("logprobs", 21),
    ("logprobs", "1"),
    ("logprobs", -1),
    *((field, 1) for field in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")),
    *((field, value) for field in ("bad_words", "allowed_token_ids") for value in (5, {}, [None], [[]])),
    *((field, 1) for field in ("guided_yaml", "best_off", "prompt_logprobs", "use_beam_search", "Temperature", "日本")),
    *(("best_of", value) for value in (0, 129, "2", 1.5)),
    *(("echo", value) for value in (1, "x")),
    *(("use_beam_search", 1), ("prompt_logprobs", 5), ("length_penalty", 2.0), ("truncate_prompt_tokens", 5)),
    *(("stream_options", value) for value in ({"continuous_usage_stats": True}, {"continuous_usage_stats": 1})),
    ("suffix", "x"),
]  # fmt: skip

CHAT: list[tuple[str, Any]] = [
    *(("messages", value) for value in (
        [], None, "Hello", 5, {}, ["Hello"], [None], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": 5}], [{"role": "user", "content": []}],
        [{"role": "god", "content": "x"}], [{"role": "tool", "content": "x"}], [{"role": 1, "content": "x"}],
        [{"role": "user", "content": "x", "y": 1}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
        [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
        Raw('[{"role": "user", "content": "\\ud800"}]'), Raw('[{"role": "user", "content": "\\udc00x"}]'),
        Raw('[{"role": "user", "role": "user", "content": "x"}]'), DEEP,
        [{"role": "user", "content": "word " * 2000}], [{"role": "user", "content": "x" * 100_000}],
    )),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", {}),
    ("tools", DEEP),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    *(("response_format", value) for value in (5, [], {"type": 5}, {"type": "json_object", "x": 1}, DEEP)),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", "text"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("moderation", {}),
    ("prompt_cache_options", {}),
    ("service_tier", "flex"),
    ("metadata", "x"),
    ("store", "x"),
    ("parallel_tool_calls", "x"),
    *(("chat_template_kwargs", value) for value in (5, "x", ["x"], DEEP)),
    *(("tool_choice", value) for value in ("any", 5, {}, {"type": "function", "function": {"name": "nobody"}})),
    ("top_logprobs", 5),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", "5"),
    ("max_completion_tokens", 2**63),
    ("max_completion_tokens", MAX_MODEL_LEN),
]  # fmt: skip

COMPLETION: list[tuple[str, Any]] = [
    *(("prompt", value) for value in (
        "", [], [[]], [""], None, 5, 1.5, {}, True, [None], [True], [1, "a"], [[1], "a"], [[1], []], [1.5], [[1.5]],
        [[[1]]], [0, 999999], [-1], [49152], [[1], [49152]], [2**31], [2**64], Raw(f"[1, {BIG}]"), [1] * MAX_MODEL_LEN,
        [1] * 5000, ["ok", ""], "x" * 100_000, "word " * 2000, ["a"] * 1025, Raw('"\\ud800"'), Raw('["a", "\\udfff"]'),
        Raw("NaN"), Raw("[NaN]"), DEEP,
    )),
    ("logprobs", True),
    ("best_of", 0),
    ("best_of", 200),
    ("messages", [{"role": "user", "content": "x"}]),
]  # fmt: skip


def encoded(body: dict[str, Any]) -> bytes:
    """JSON in which Raw values, wherever they stand, are kept as they are."""
    marks: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            mark = f"<<{len(marks)}>>"
            marks[json.dumps(mark)] = str(value)
            return mark
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(body))
    for mark, raw in marks.items():
        text = text.replace(mark, raw)
    return text.encode()


def cases() -> Iterator[Any]:
    for path, own in zip(PATHS, (CHAT, COMPLETION), strict=True):
        for number, (field, value) in enumerate([*BOTH, *own]):
            yield pytest.param(path, field, value, id=f"{path[4:]}-{field}-{number}")


def refused(response: httpx.Response, param: str | None) -> dict[str, Any]:
    """The error object, after checking everything that holds for each of them."""
    assert 400 <= response.status_code < 500, response.text[:200]
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert error["param"] == param, error
    assert len(error["message"]) < 700
    return error


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@pytest.mark.parametrize(("path", "field", "value"), list(cases()))
def test_bad_field(http: httpx.Client, engine: FakeEngine, path: str, field: str, value: Any, stream: bool) -> None:
    """A field that is wrong, unknown or not supported is refused by its name before the engine sees anything."""
    body = {**NEEDED[path], "stream": stream, field: value}
    response = http.post(path, content=encoded(body), headers={"content-type": "application/json"})
    refused(response, field)
    assert not engine.handles


BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("white", b"  \n"),
    ("list", b"[]"),
    ("string", b'"x"'),
    ("null", b"null"),
    ("number", b"1"),
    ("NaN", b"NaN"),
    ("cut", b'{"prompt": "x'),
    ("trailing", b'{"prompt": "x"} x'),
    ("comma", b'{"prompt": "x",}'),
    ("single quotes", b"{'prompt': 'x'}"),
    ("utf-8", b'{"prompt": "\xff"}'),
    ("overlong", b'{"prompt": "\xc0\x80"}'),
    ("surrogate bytes", b'{"prompt": "\xed\xa0\x80"}'),
    ("bom", b'\xef\xbb\xbf{"prompt": "x"}'),
    ("utf-16", '{"prompt": "x"}'.encode("utf-16")),
    ("nul", b'{"prompt": "\x00"}'),
    ("deep", encoded({"a": DEEPER})),
    ("binary", bytes(range(256))),
]


@pytest.mark.parametrize("body", [body for _, body in BODIES], ids=[name for name, _ in BODIES])
@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_bad_body(http: httpx.Client, engine: FakeEngine, path: str, body: bytes) -> None:
    """What is not a JSON object in UTF-8 is a 400 that says so."""
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert refused(response, None)["code"] == 400
    assert not engine.handles


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/xml"])
def test_content_type(http: httpx.Client, content_type: str) -> None:
    """Only application/json is read."""
    response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": content_type})
    assert "application/json" in refused(response, None)["message"]


def test_content_type_with_charset(http: httpx.Client) -> None:
    """Parameters of the media type are no obstacle."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_stream_options_without_stream(http: httpx.Client) -> None:
    """stream_options means nothing without stream=true."""
    body = NEEDED["/v1/completions"] | {"stream_options": {"include_usage": True}}
    refused(http.post("/v1/completions", json=body), "stream_options")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "missing"), [("model", False), ("prompt", True)])
def test_missing(http: httpx.Client, path: str, field: str, missing: bool) -> None:
    """The prompt is required; the model is not, where a server has one."""
    body = {} if missing else NEEDED[path]
    response = http.post(path, json=body)
    if missing:
        assert "required" in refused(response, next(iter(NEEDED[path])))["message"]
    else:
        assert response.status_code == 200


def test_min_tokens_above_max_tokens(http: httpx.Client) -> None:
    """min_tokens beyond max_tokens can never be had."""
    refused(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "min_tokens": 4}), "min_tokens")


def test_two_names_that_disagree(http: httpx.Client) -> None:
    """max_tokens and max_completion_tokens may both be given only if they say the same."""
    body = NEEDED["/v1/chat/completions"] | {"max_tokens": 3}
    refused(http.post(PATHS[0], json=body | {"max_completion_tokens": 4}), "max_completion_tokens")
    assert http.post(PATHS[0], json=body | {"max_completion_tokens": 3}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_context_length(http: httpx.Client, engine: FakeEngine, path: str) -> None:
    """Prompt plus max_tokens over the context: both numbers, and the words that gateways look for."""
    response = http.post(path, json=NEEDED[path] | {"max_tokens": MAX_MODEL_LEN})
    message = refused(response, "max_tokens")["message"]
    tokens = http.post("/tokenize", json=NEEDED[path]).json()["count"]
    assert message.startswith(
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested {MAX_MODEL_LEN} output "
        f"tokens and your prompt contains {tokens} input tokens"
    )
    assert http.post(path, json=NEEDED[path] | {"max_tokens": MAX_MODEL_LEN - tokens}).status_code == 200


def test_hopelessly_long(http: httpx.Client, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """Text that cannot fit whatever its tokens are is refused without tokenizing it, with the same first words."""
    monkeypatch.setattr("surefoot.api.tokenizer.Tokenizer.encode", lambda *_, **__: pytest.fail("tokenized"))
    response = http.post("/v1/completions", json={"prompt": "ab" * 400_000})
    message = refused(response, "prompt")["message"]
    assert message.startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However,")
    assert "800000 characters" in message


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(http: httpx.Client, engine: FakeEngine, chunked: bool) -> None:
    """A body over the limit is a 413, told by its header or while it arrives."""
    whole = json.dumps({"prompt": "x" * (1 << 20)}).encode()
    content: Any = (whole[at : at + 65536] for at in range(0, len(whole), 65536)) if chunked else whole
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "RequestTooLargeError"
    assert not engine.handles


def test_still_serves_afterwards(http: httpx.Client) -> None:
    """After any of this the next request is served."""
    assert http.post("/v1/completions", json=NEEDED["/v1/completions"]).status_code == 200
