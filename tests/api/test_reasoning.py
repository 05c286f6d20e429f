"""Thoughts and answers: told apart, streamed apart, and left free by a grammar of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from surefoot import grammar
from surefoot.api.reasoning import CLOSE, OPEN, Reasoning, ReasoningParser, reasoning_of
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.checkpoint import Checkpoint
from surefoot.config import ServerConfig
from surefoot.errors import ConfigError
from tests.api.fake import FakeEngine, served
from tests.api.glm import ranks, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools }}{% endif %}"
)


def thinker(folder: Path, *, ending: str = "", special: bool = False) -> Tokenizer:
    names = ("<|endoftext|>", "[gMASK]", "<sop>", *((OPEN, CLOSE) if special else ()))
    added = {str(len(ranks()) + at): {"content": text, "special": True} for at, text in enumerate(names)}
    write_tokenizer(folder, added_tokens_decoder=added, chat_template=TEMPLATE + ending)
    return load_tokenizer(Checkpoint(kind="hf", path=folder, name="thinker"))


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("output", "opened", "reasoning", "text"),
    [
        ("<think>\nWell.\n</think>\n\nYes.", False, "Well.", "Yes."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("Well.\n\nHm.\n</think>\nYes.\n", True, "Well.\n\nHm.", "Yes.\n"),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("<thi", False, "", "<thi"),
        ("<think></think>a </think> b", False, "", "a </think> b"),
        ("\nplain", False, "", "\nplain"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts(output: str, opened: bool, reasoning: str, text: str, step: int) -> None:
    """Thoughts end at the first closing tag, begin at the start or in the prompt, and lose the line breaks around."""
    parser = ReasoningParser(opened=opened)
    found = [parser.push(output[at : at + step]) for at in range(0, len(output), step)] + [parser.finish()]
    assert "".join(each.reasoning for each in found) == reasoning
    assert "".join(each.text for each in found) == text


def test_which_models_think(tmp_path: Path, smollm2: Tokenizer) -> None:
    """The chat template tells; a name of vLLM's is taken, an unknown one ends the start."""
    tokenizer = thinker(tmp_path)
    assert reasoning_of(tokenizer) is not None
    assert reasoning_of(tokenizer, "none") is None
    assert reasoning_of(smollm2) is None
    assert reasoning_of(smollm2, "deepseek_r1") is not None
    with pytest.raises(ConfigError, match="none of auto, none, think"):
        reasoning_of(smollm2, "guess")


@pytest.mark.parametrize("special", [False, True])
def test_an_answers_grammar_leaves_thoughts_free(tmp_path: Path, special: bool) -> None:
    """Under a grammar a model may think what it likes first, in text or with special tokens; then it keeps to it."""
    tokenizer = thinker(tmp_path, special=special)
    reasoning, answer = Reasoning(tokenizer), grammar.choice(["yes", "no"], field="x")
    compiler = grammar.Compiler(tokenizer.vocabulary(), (tokenizer.special_id("<|endoftext|>") or 0,))
    for opened, said, fits in (
        (False, "yes", True),
        (False, "<think>maybe\n\n{so}</think>\n\nno", True),
        (False, "<think>maybe</think>perhaps", False),
        (False, "maybe", False),
        (True, "maybe</think>yes", True),
        (True, "yes", False),
    ):
        matcher = compiler.compile(reasoning.before(answer, opened))
        ids = tokenizer.encode(said, add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, said


@pytest.mark.parametrize(
    ("ending", "opened"), [("", False), ("{% if add_generation_prompt %}<think>\n{% endif %}", True)]
)
def test_over_http(tmp_path: Path, ending: str, opened: bool) -> None:
    """Thoughts are reasoning_content, whole and streamed; calls are found after them; a grammar knows of them."""
    tokenizer = thinker(tmp_path, ending=ending)
    engine = FakeEngine(tokenizer)
    said = (
        "" if opened else OPEN
    ) + '\nThe sky?\n</think>\n\nBlue.<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    engine.script = tokenizer.encode(said, add_special_tokens=False)
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Why?"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "max_tokens": 200,
    }
    with (
        served(engine, tokenizer, ServerConfig(served_model_name=("m",))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        message: Any = client.chat.completions.create(**asked).choices[0].message
        deltas: list[Any] = [c.choices[0].delta for c in client.chat.completions.create(**asked, stream=True)]
        client.chat.completions.create(**asked, tool_choice="required")
        client.chat.completions.create(**{**asked, "tools": []}, response_format={"type": "json_object"})
    assert (message.reasoning_content, message.content) == ("The sky?", "Blue.")
    assert [call.function.name for call in message.tool_calls] == ["look"]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "The sky?"
    assert "".join(delta.content or "" for delta in deltas) == "Blue."
    for handle in engine.handles[2:]:
        first = json.loads(handle.params.grammar.source)["grammars"][0]["lark_grammar"]
        assert first.startswith("start: thoughts") == opened
