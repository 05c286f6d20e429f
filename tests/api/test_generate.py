"""Chat and completions through the official client, over a real socket, with an engine that follows a script."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from surefoot.api.tokenizer import Tokenizer
from surefoot.errors import EngineFailure, InsufficientMemory, Overloaded
from tests.api.fake import MAX_MODEL_LEN, TEXT, FakeEngine, eventually

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "smollm2", "messages": HELLO}
TEXTS = {"model": "smollm2", "prompt": "Hello"}


def frames(response: httpx.Response) -> list[str]:
    """The data of every event, as sent."""
    return [line.removeprefix("data: ") for line in response.read().decode().split("\n") if line]


# ---- chat -----------------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """A chat is rendered by the template and answered with text, finish reason and usage."""
    answer = client.chat.completions.create(model="smollm2", messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "smollm2"
    assert answer.object == "chat.completion"
    prompt = smollm2.encode_chat(HELLO)
    assert engine.handles[0].prompt == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(engine.script) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_fills_the_context(client: openai.OpenAI, engine: FakeEngine) -> None:
    """Without max_tokens a chat may go on to the end of the context."""
    client.chat.completions.create(model="smollm2", messages=HELLO)
    handle = engine.handles[0]
    assert handle.params.max_tokens == MAX_MODEL_LEN - len(handle.prompt)


def test_chat_stream(client: openai.OpenAI) -> None:
    """A streamed chat begins with the role, gives the text in pieces, and ends with the reason."""
    chunks = list(client.chat.completions.create(model="smollm2", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5


def test_stream_usage(client: openai.OpenAI, engine: FakeEngine) -> None:
    """include_usage adds one last chunk without choices, and null everywhere else."""
    chunks = list(
        client.chat.completions.create(
            model="smollm2", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(engine.script) + 1


def test_stream_frames(http: httpx.Client) -> None:
    """The events are JSON after `data: `, the last says [DONE], and the type is an event stream's."""
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = frames(response)
    assert events[-1] == "[DONE]"
    assert [set(json.loads(event)) for event in events[:-1]] == [
        {"id", "created", "model", "object", "choices"} for _ in events[:-1]
    ]


def test_parts_and_roles(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """Text parts are joined by newlines, and `developer` is the system's newer name."""
    client.chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    assert engine.handles[0].prompt == smollm2.encode_chat(same)


def test_n(client: openai.OpenAI, engine: FakeEngine) -> None:
    """n choices come out of one request of the engine, and usage counts all of them."""
    answer = client.chat.completions.create(model="smollm2", messages=HELLO, n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 6
    assert len(engine.handles) == 1


def test_chat_logprobs(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """Every token counted has its log-probability, bytes and alternatives."""
    answer = client.chat.completions.create(
        model="smollm2", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [smollm2.token_text(token) for token in engine.script[:3]]
    assert bytes(content[0].bytes) == smollm2.token_bytes(engine.script[0])
    assert content[0].logprob == -0.5
    assert [entry.logprob for entry in content[0].top_logprobs] == [-2.0, -3.0]


def test_streamed_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    """Streaming gives the same log-probabilities, in the same order, as one answer."""
    chunks = client.chat.completions.create(model="smollm2", messages=HELLO, logprobs=True, max_tokens=4, stream=True)
    found = [
        entry.token for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    whole = client.chat.completions.create(model="smollm2", messages=HELLO, logprobs=True, max_tokens=4)
    assert found == [entry.token for entry in whole.choices[0].logprobs.content]
    assert len(found) == 4


# ---- completions ----------------------------------------------------------------------------------------------------


def test_completion(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """A completion continues the prompt as it stands, by 16 tokens unless told otherwise."""
    answer = client.completions.create(model="smollm2", prompt="Hello")
    assert answer.choices[0].text == TEXT
    assert answer.object == "text_completion"
    assert engine.handles[0].prompt == smollm2.encode("Hello")
    assert engine.handles[0].params.max_tokens == 16


def test_completion_stream(client: openai.OpenAI) -> None:
    """A streamed completion joins to the same text."""
    chunks = list(client.completions.create(model="smollm2", prompt="Hello", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_forms(client: openai.OpenAI, engine: FakeEngine, prompt: object, count: int, stream: bool) -> None:
    """Prompt i and child c of n are choice i·n + c, whatever form the prompts have."""
    answer = client.completions.create(model="smollm2", prompt=prompt, n=2, stream=stream)  # type: ignore[call-overload]
    texts = [""] * (2 * count)
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [TEXT] * (2 * count)
    assert len(engine.handles) == count


def test_drawn_seeds_differ(http: httpx.Client, engine: FakeEngine) -> None:
    """Prompts that are alike get seeds of their own, unless the caller named one."""
    http.post("/v1/completions", json=TEXTS | {"prompt": ["a", "a"]})
    assert engine.handles[0].params.seed != engine.handles[1].params.seed
    http.post("/v1/completions", json=TEXTS | {"prompt": ["a", "a"], "seed": -5})
    assert {handle.params.seed for handle in engine.handles[2:]} == {2**64 - 5}


def test_completion_logprobs(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """The older shape: parallel lists, the drawn token among the alternatives, offsets into the text."""
    answer = client.completions.create(model="smollm2", prompt="Hello", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    texts = [smollm2.token_text(token) for token in engine.script[:3]]
    assert logprobs.tokens == texts
    assert logprobs.token_logprobs == [-0.5] * 3
    assert [len(top) for top in logprobs.top_logprobs] == [3, 3, 3]
    assert logprobs.top_logprobs[0][texts[0]] == -0.5
    assert logprobs.text_offset == [0, len(texts[0]), len(texts[0] + texts[1])]


# ---- ending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    """Text ends before a stop string that spans tokens, the reason names it, and the engine is told to stop."""
    body = TEXTS | {"stop": ["e is P", "zz"], "stream": stream}
    response = http.post("/v1/completions", json=body)
    parts = [json.loads(event) for event in frames(response) if event != "[DONE]"] if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == "The capital of Franc"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "e is P"
    assert engine.handles[0].cancelled == [0]


def test_stop_string_included(http: httpx.Client) -> None:
    """include_stop_str_in_output shows the stop string too."""
    body = TEXTS | {"stop": "France", "include_stop_str_in_output": True}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "The capital of France"


def test_stop_of_one_child(http: httpx.Client, engine: FakeEngine) -> None:
    """With n=2 both children stop by themselves, and nothing of the request is left."""
    answer = http.post("/v1/completions", json=TEXTS | {"stop": "capital", "n": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["The ", "The "]
    assert engine.handles[0].cancelled == [0, 1]
    assert not engine.handles[0].live


def test_min_tokens_outlasts_a_stop_string(http: httpx.Client, engine: FakeEngine) -> None:
    """A stop string within min_tokens does not count."""
    body = TEXTS | {"stop": "capital", "min_tokens": 4}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == TEXT


def test_stop_token(http: httpx.Client, engine: FakeEngine) -> None:
    """A stop token ends the text unseen and is named; the model's own end is not named."""
    token = engine.script[2]
    choice = http.post("/v1/completions", json=TEXTS | {"stop_token_ids": [token]}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert choice["text"] == "The capital"
    choice = http.post("/v1/completions", json=TEXTS).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_ignore_eos(http: httpx.Client) -> None:
    """ignore_eos goes on to max_tokens."""
    answer = http.post("/v1/completions", json=TEXTS | {"ignore_eos": True, "max_tokens": 50}).json()
    assert answer["usage"]["completion_tokens"] == 50
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids(http: httpx.Client, engine: FakeEngine, path: str, stream: bool) -> None:
    """return_token_ids gives the ids of prompt and output, streamed or not."""
    body = (TEXTS if path == "/v1/completions" else CHAT) | {"return_token_ids": True, "stream": stream}
    response = http.post(path, json=body)
    parts = [json.loads(event) for event in frames(response) if event != "[DONE]"] if stream else [response.json()]
    prompt = [part.get("prompt_token_ids") or part["choices"][0].get("prompt_token_ids") for part in parts]
    assert [ids for ids in prompt if ids] == [engine.handles[0].prompt]
    ids = [token for part in parts for token in part["choices"][0].get("token_ids", [])]
    assert ids == [*engine.script, engine.eos]


# ---- failing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("error", [InsufficientMemory("needs 9 GiB"), EngineFailure("lost")])
def test_failure_before_the_first_token(
    http: httpx.Client, engine: FakeEngine, path: str, stream: bool, error: InsufficientMemory | EngineFailure
) -> None:
    """What fails before any token has a status of its own, streaming or not."""
    engine.failure = error
    response = http.post(path, json=(TEXTS if path == "/v1/completions" else CHAT) | {"stream": stream})
    assert response.status_code == error.status
    assert response.json() == error.body()


@pytest.mark.parametrize("error", [InsufficientMemory("needs 9 GiB"), ValueError("secret")])
def test_failure_in_a_stream(http: httpx.Client, engine: FakeEngine, error: Exception) -> None:
    """A stream that fails ends in exactly one error event, without [DONE] and without internals."""
    engine.failure, engine.fail_at = error, 3
    stream = http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
    with capture_logs(), stream as response:
        events = [json.loads(event) for event in frames(response)]
    assert ["error" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["error"]["code"] == (413 if isinstance(error, InsufficientMemory) else 500)
    assert "secret" not in str(events)
    assert len(events) > 3


def test_the_client_library_raises_in_a_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    """The official client turns the error event into an exception."""
    engine.failure, engine.fail_at = InsufficientMemory("needs 9 GiB"), 3
    stream = client.chat.completions.create(model="smollm2", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="needs 9 GiB"):
        list(stream)


def test_unexpected_failure(http: httpx.Client, engine: FakeEngine) -> None:
    """A bug is a 500 in the usual shape that tells no internals."""
    engine.failure = ValueError("secret")
    with capture_logs():
        response = http.post("/v1/completions", json=TEXTS)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text


def test_overload(http: httpx.Client, engine: FakeEngine) -> None:
    """A full queue is a 503 that says when to come again."""
    engine.refusal = Overloaded("The queue is full.", retry_after=7)
    response = http.post("/v1/completions", json=TEXTS)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"


def test_all_prompts_or_none(http: httpx.Client, engine: FakeEngine) -> None:
    """When one of several prompts is refused, those admitted before it are cancelled."""
    engine.refusal, engine.refuse_after = Overloaded("The queue is full.", retry_after=7), 2
    assert http.post("/v1/completions", json=TEXTS | {"prompt": ["a", "b", "c"]}).status_code == 503
    assert [handle.cancelled for handle in engine.handles] == [[None], [None]]


def test_one_failing_prompt_fails_the_request(http: httpx.Client, engine: FakeEngine) -> None:
    """Of several prompts the first failure ends the request, and the others are dropped."""
    engine.failure, engine.fail_at, engine.delay = InsufficientMemory("needs 9 GiB"), 2, 0.01
    response = http.post("/v1/completions", json=TEXTS | {"prompt": ["a", "b", "c"]})
    assert response.status_code == 413
    eventually(lambda: all(not handle.live for handle in engine.handles))


def test_draining(http: httpx.Client, engine: FakeEngine) -> None:
    """While draining new work is refused with Retry-After, readiness is gone, liveness is not."""
    engine.draining = True
    response = http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert http.get("/health/ready").status_code == 503
    assert http.get("/health/live").status_code == 200
    assert http.get("/health").status_code == 200


def test_an_engine_whose_worker_is_replaced(http: httpx.Client, engine: FakeEngine) -> None:
    """Without a worker health says so; a request waits for the next one."""
    engine.alive = False
    assert http.get("/health").status_code == 503
    assert http.get("/health/ready").status_code == 503
    assert http.post("/v1/completions", json=TEXTS).status_code == 200


def test_dead_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """Where no worker will come requests are refused at once."""
    engine.alive, engine.lost = False, True
    assert http.get("/health").status_code == 503
    assert http.post("/v1/completions", json=TEXTS).status_code == 503


def test_stalled_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """While no step is made readiness is gone, in the metrics too; liveness is not, and new work may still queue."""
    engine.stalled = True
    assert http.get("/health/ready").status_code == 503
    (ready,) = (line for line in http.get("/metrics").text.splitlines() if line.startswith("surefoot:ready"))
    assert ready.endswith(" 0.0")
    assert http.get("/health/live").status_code == http.get("/health").status_code == 200
    assert http.post("/v1/completions", json=TEXTS).status_code == 200


# ---- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay", [0.02, 60.0], ids=["while decoding", "while queued"])
def test_disconnect_cancels(http: httpx.Client, engine: FakeEngine, stream: bool, delay: float) -> None:
    """A client that leaves, before or after the first token, takes its request with it at once."""
    engine.delay = delay
    body = json.dumps(TEXTS | {"stream": stream, "ignore_eos": True, "max_tokens": 400}).encode()
    address = urlsplit(str(http.base_url))
    with socket.create_connection((address.hostname, address.port)) as raw:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        eventually(lambda: bool(engine.handles) and (delay > 1 or engine.handles[0].index > 2))
    eventually(lambda: not engine.handles[0].live, seconds=1)
    assert engine.handles[0].index < 200
