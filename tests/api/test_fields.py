"""Fields of vLLM's and OpenAI's that change what an answer holds, through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from surefoot.api.template import ChatTemplate
from tests.api.fake import TEXT, FakeEngine

TEXTS: dict[str, Any] = {"model": "smollm2", "prompt": ["Hello", "Good day"], "max_tokens": 40}


def test_echo(client: openai.OpenAI, engine: FakeEngine) -> None:
    """echo puts each prompt, as text, before its choices, whole and streamed, also where it was given as tokens."""
    whole = client.completions.create(**TEXTS, n=2, echo=True)
    wanted = [prompt + TEXT for prompt in TEXTS["prompt"] for _ in range(2)]
    assert [choice.text for choice in whole.choices] == wanted
    texts = [""] * 4
    for chunk in client.completions.create(**TEXTS, n=2, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted
    ids = engine.handles[0].prompt
    [choice] = client.completions.create(model="smollm2", prompt=ids, max_tokens=40, echo=True).choices
    assert choice.text == "Hello" + TEXT


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    """continuous_usage_stats tells in each chunk what was generated so far; without it only the last chunk tells."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**{**TEXTS, "prompt": "Hello"}, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    options = {"include_usage": True}
    chunks = list(client.completions.create(**{**TEXTS, "prompt": "Hello"}, stream=True, stream_options=options))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"best_of": 1, "n": 2}, "best_of=1 must be at least n=2"),
        ({"best_of": 3, "stream": True}, "cannot be streamed"),
        ({"best_of": 1025}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs is not supported"),
        ({"suffix": "x"}, "suffix is not supported yet .*gaps are not filled"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "needs include_usage"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs is not supported yet .*scored"),
    ],
)
def test_refused(client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any], said: str) -> None:
    """What cannot be done is refused with the reason."""
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**TEXTS | fields)
    assert not engine.handles


def test_variables_of_the_chat_template(client: openai.OpenAI, engine: FakeEngine) -> None:
    """chat_template_kwargs are what the template sees beside the conversation, which they cannot replace."""
    template = ChatTemplate("{{ messages[0].content }}|{{ enable_thinking }}|{{ bos_token }}", {"bos_token": "<s>"})
    asked = {"enable_thinking": False, "messages": [], "bos_token": "x", "tools": 5}
    assert template.render([{"role": "user", "content": "hi"}], variables=asked) == "hi|False|<s>"
    assert client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "hi"}], extra_body={"chat_template_kwargs": asked}
    ).choices


def test_neutral_values_of_vllm(client: openai.OpenAI) -> None:
    """Clients that send every default of vLLM's are served."""
    neutral = {
        "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True, "priority": 3,
        "prompt_logprobs": None, "truncate_prompt_tokens": None, "allowed_token_ids": None, "bad_words": [],
        "min_p": 0.0, "top_k": -1, "repetition_penalty": 1.0, "cache_salt": "s", "return_token_ids": False,
    }  # fmt: skip
    assert client.completions.create(**TEXTS, extra_body=neutral).choices[0].text == TEXT
