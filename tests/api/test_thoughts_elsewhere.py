"""What a model thinks before it answers, in /v1/responses and /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from surefoot.api.tokenizer import load_tokenizer
from surefoot.checkpoint import Checkpoint
from surefoot.config import ServerConfig
from tests.api.fake import FakeEngine, served
from tests.api.glm import ranks, write_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FakeEngine]]:
    """A model that always thinks "The sky?" and says "Blue."."""
    folder = tmp_path_factory.mktemp("thinker")
    write_tokenizer(folder, chat_template=TEMPLATE)
    tokenizer = load_tokenizer(Checkpoint(kind="hf", path=folder, name="m"))
    engine = FakeEngine(tokenizer)
    engine.script = [ranks()[bytes([byte])] for byte in b"<think>The sky?</think>\nBlue."]
    with served(engine, tokenizer, ServerConfig(served_model_name=("m",))) as url:
        yield url, engine


def test_thoughts_of_a_response(server: tuple[str, FakeEngine]) -> None:
    """They are an item before the message, with events of their own, and count as reasoning tokens."""
    asked: dict[str, Any] = {"model": "m", "input": "Why?", "max_output_tokens": 60}
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=10) as client:
        response: Any = client.responses.create(**asked)
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        client.responses.create(model="m", input="And?", previous_response_id=response.id)
        cut: Any = client.responses.create(**{**asked, "max_output_tokens": 10})
    thoughts, message = response.output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "The sky?")
    assert (message.type, response.output_text) == ("message", "Blue.")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    for kind, text in (("reasoning_text", "The sky?"), ("output_text", "Blue.")):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")]
    item = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    assert kinds == [
        "created", "in_progress", *[each.format("reasoning_text") for each in item],
        *[each.format("output_text") for each in item], "completed",
    ]  # fmt: skip
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert (cut.status, [item.type for item in cut.output]) == ("incomplete", ["reasoning"])


def test_thoughts_of_a_message(server: tuple[str, FakeEngine]) -> None:
    """They are a block of thinking before the text, whole and streamed alike, and may be sent back."""
    asked: dict[str, Any] = {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": "Why?"}]}
    with anthropic.Anthropic(base_url=server[0], api_key="none", max_retries=0, timeout=10) as client:
        message: Any = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed: Any = stream.get_final_message()
        turns = [*asked["messages"], {"role": "assistant", "content": message.content}]
        again: Any = client.messages.create(**{**asked, "messages": [*turns, {"role": "user", "content": "And?"}]})
    for each in (message, streamed, again):
        assert [block.type for block in each.content] == ["thinking", "text"]
        assert (each.content[0].thinking, each.content[1].text) == ("The sky?", "Blue.")
        assert each.stop_reason == "end_turn"
