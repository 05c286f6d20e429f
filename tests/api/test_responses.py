"""/v1/responses, as the official `openai` client sees it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from surefoot.errors import InsufficientMemory, Overloaded
from tests.api.fake import TEXT, FakeEngine, eventually, served

MODEL = "smollm2"
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: dict[str, Any] = {
    "type": "function", "name": "get_weather", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "Hello!", **fields})


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    """The text of the latest prompt."""
    return tokenizer.decode(engine.handles[-1].prompt, skip_special_tokens=False)


def test_a_response(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """The object has the text, the usage and what was asked for; instructions are the system's turn."""
    response = create(client, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, max_output_tokens=50)
    assert (response.object, response.status, response.output_text) == ("response", "completed", TEXT)
    assert response.id.startswith("resp_")
    assert (response.temperature, response.max_output_tokens, response.metadata) == (0.5, 50, {"a": "b"})
    assert response.usage.input_tokens == len(engine.handles[-1].prompt)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.output[0].type, response.output[0].status) == ("message", "completed")
    prompt = prompt_of(engine, smollm2)
    assert prompt.index("Be brief.") < prompt.index("Hello!")


def test_a_response_that_is_cut(client: openai.OpenAI) -> None:
    """Out of max_output_tokens it is incomplete, and says why."""
    response = create(client, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 3
    assert TEXT.startswith(response.output_text)


def test_items_are_turns(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """Messages in all of their shapes are turns in order; reasoning that is sent back is left out."""
    create(
        client,
        input=[
            {"role": "developer", "content": "one"},
            {"role": "user", "content": [{"type": "input_text", "text": "two"}], "type": "message"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hidden"}]},
            {
                "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{"type": "output_text", "text": "three", "annotations": []}],
            },
            {"role": "user", "content": "four"},
        ],
    )  # fmt: skip
    prompt = prompt_of(engine, smollm2)
    places = [prompt.index(word) for word in ("one", "two", "three", "four")]
    assert places == sorted(places)
    assert "hidden" not in prompt


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    """They come in OpenAI's order, numbered from 0; the deltas are the text, and the last event has the whole."""
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4 : 4 + len(deltas)] == ["output_text.delta"] * len(deltas)
    assert kinds[4 + len(deltas) :] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(deltas) == TEXT
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[-1].response.output_text == TEXT
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    whole = client.responses.retrieve(events[0].response.id)
    assert whole == events[-1].response


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    """`responses.stream` of the client, which checks the order of events, accumulates the same response."""
    with client.responses.stream(model=MODEL, input="Hello!") as stream:
        seen = [event.type for event in stream]
        assert stream.get_final_response().output_text == TEXT
    assert seen[-1] == "response.completed"


def test_log_probabilities(client: openai.OpenAI) -> None:
    """include and top_logprobs bring them, whole and streamed."""
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = create(client, **asked).output[0].content[0]
    assert part.logprobs[0].logprob == -0.5
    assert len(part.logprobs[0].top_logprobs) == 2
    events = list(create(client, stream=True, **asked))
    streamed = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert streamed[0].logprob == -0.5
    done = next(event for event in events if event.type == "response.output_text.done")
    assert len(done.logprobs) == len(part.logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"), ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"type": "input_image"}]}, "input"), ({"input": [{"role": "user", "content": []}]}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"), ({"input": "x" * 30_000}, "input"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"), ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"), ({"truncation": "auto"}, "truncation"), ({"surprise": 1}, "surprise"),
        ({"conversation": "conv_1"}, "conversation"), ({"prompt": {"id": "x"}}, "prompt"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"stream": True, "background": True}, "stream"),
        ({"background": True, "store": False}, "background"), ({"include": ["file_search_call.results"]}, "include"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"), ({"metadata": {"a": 1}}, "metadata"),
    ],
)  # fmt: skip
def test_bad_requests(http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    """A wrong field is a 400 with its name in this endpoint's words, and nothing reaches the engine."""
    reply = http.post("/v1/responses", json={"model": MODEL, "input": "x", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert "messages" not in reply.json()["error"]["message"]
    assert engine.handles == []


def test_failures_before_and_in_a_stream(client: openai.OpenAI, http: httpx.Client, engine: FakeEngine) -> None:
    """Before the first token an error has its HTTP status; after it there is response.failed, then the error."""
    engine.failure = InsufficientMemory("no room")
    with pytest.raises(openai.APIStatusError) as error:
        create(client, stream=True)
    assert error.value.status_code == 413
    engine.fail_at = 3
    stream = create(client, stream=True)
    seen = [next(stream)]
    while seen[-1].type != "response.failed":
        seen.append(next(stream))
    with pytest.raises(openai.APIError, match="no room"):
        next(stream)
    assert (seen[-1].response.status, seen[-2].type) == ("failed", "response.output_text.delta")
    assert "no room" in seen[-1].response.error.message
    assert http.get(f"/v1/responses/{seen[0].response.id}").status_code == 404


# ---- keeping --------------------------------------------------------------------------------------------------------


def test_what_is_kept(client: openai.OpenAI) -> None:
    """A response can be had again until it is deleted; with store=false it never can."""
    kept = create(client)
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    for id in (kept.id, create(client, store=False).id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(id)


def test_a_conversation_goes_on(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """previous_response_id brings the turns before, without their instructions, and the answers."""
    first = create(client, input="first question", instructions="old rules")
    second = create(client, input="second question", previous_response_id=first.id)
    create(client, input="third question", previous_response_id=second.id, instructions="new rules")
    prompt = prompt_of(engine, smollm2)
    places = [prompt.index(text) for text in ("new rules", "first question", TEXT, "second question", "third question")]
    assert places == sorted(places)
    assert prompt.count(TEXT) == 2
    assert "old rules" not in prompt


def test_in_the_background(client: openai.OpenAI, engine: FakeEngine) -> None:
    """The answer comes at once, queued; the response can be asked for until it is completed."""
    engine.delay = 0.02
    response = create(client, background=True)
    assert (response.status, response.output) == ("queued", [])
    eventually(lambda: client.responses.retrieve(response.id).status == "completed", 20)
    assert client.responses.retrieve(response.id).output_text == TEXT
    assert client.responses.cancel(response.id).status == "completed"


def test_cancelling(client: openai.OpenAI, engine: FakeEngine) -> None:
    """A background response that is cancelled stops in the engine; one in the foreground cannot be."""
    engine.delay = 0.05
    response = create(client, background=True)
    eventually(lambda: client.responses.retrieve(response.id).status == "in_progress", 20)
    assert client.responses.cancel(response.id).status == "cancelled"
    assert engine.handles[-1].cancelled == [None]
    assert client.responses.retrieve(response.id).status == "cancelled"
    at_once = create(client, background=True)
    client.responses.cancel(at_once.id)
    engine.delay = 0.0
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(create(client).id)


def test_a_background_response_that_fails(client: openai.OpenAI, engine: FakeEngine) -> None:
    """It says why, and so does one that was never admitted."""
    for failure, fail_at in ((InsufficientMemory("no room"), 2), (Overloaded("queue full"), 0)):
        engine.failure, engine.fail_at = failure, fail_at
        id = create(client, background=True).id
        eventually(lambda id=id: client.responses.retrieve(id).status == "failed", 20)  # type: ignore[misc]
        error = client.responses.retrieve(id).error
        assert error is not None
        assert error.message == failure.message


def test_a_kept_response_belongs_to_its_key(smollm2: Tokenizer) -> None:
    """For another key there is no such response, to read, to delete or to go on from."""
    engine = FakeEngine(smollm2)
    with served(engine, smollm2, ServerConfig(served_model_name=(MODEL,), api_key=("one", "two"))) as url:
        one, two = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        with one, two:
            id = create(one).id
            with pytest.raises(openai.NotFoundError):
                two.responses.retrieve(id)
            with pytest.raises(openai.NotFoundError):
                two.responses.delete(id)
            with pytest.raises(openai.BadRequestError):
                create(two, previous_response_id=id)
            assert one.responses.retrieve(id).id == id


def test_what_is_kept_is_bounded(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, by number and by bytes, and those that still run do not."""
    from surefoot.api import responses_store

    stores: list[responses_store.Responses] = []
    monkeypatch.setattr(responses_store.Responses, "_make_room", _spied(responses_store.Responses._make_room, stores))
    first = create(client)
    (store,) = stores
    monkeypatch.setattr(store, "_max_responses", 2)
    others = [create(client).id for _ in range(2)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(others[0]).id == others[0]
    monkeypatch.setattr(store, "_max_bytes", store._kept[others[1]].size + 10)
    last = create(client).id
    assert list(store._kept) == [last]
    assert store._bytes == store._kept[last].size


def _spied(method: Any, seen: list[Any]) -> Any:
    def spy(self: Any) -> None:
        if self not in seen:
            seen.append(self)
        method(self)

    return spy


class Capital(BaseModel):
    city: str


def test_structured_text(client: openai.OpenAI, engine: FakeEngine, smollm2: Tokenizer) -> None:
    """text.format, as the client's own `parse` sends it, is a grammar of the engine; a bad schema is text's fault."""
    engine.script = smollm2.encode('{"city": "Paris"}')
    response = client.responses.parse(model=MODEL, input="Capital?", text_format=Capital)
    assert response.output_parsed == Capital(city="Paris")
    grammar = engine.handles[-1].params.grammar
    assert grammar is not None
    assert '"city"' in grammar.source
    with pytest.raises(openai.BadRequestError) as error:
        create(client, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}})
    assert error.value.param == "text"
