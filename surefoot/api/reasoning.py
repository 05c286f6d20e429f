"""What a model thinks before it answers, between `<think>` and `</think>`, kept apart from the answer.

prompt … <think>⏎                      the prompt opened it already (DeepSeek R1, QwQ)
output [<think>] thoughts </think> answer
"""

from __future__ import annotations

from typing import Final, NamedTuple

from surefoot.api.tokenizer import Tokenizer
from surefoot.errors import ConfigError
from surefoot.grammar import around, quoted
from surefoot.types import Grammar

OPEN, CLOSE = "<think>", "</think>"
PARSERS: Final = ("auto", "none", "think", "deepseek_r1", "qwen3")
"""All but the first two are one; the others are names that vLLM has for it."""


class Thought(NamedTuple):
    """What became certain: more of the thoughts, more of what follows them."""

    reasoning: str = ""
    text: str = ""


class Reasoning:
    """How one model thinks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {tag: tokenizer.special_id(tag) for tag in (OPEN, CLOSE)}
        self.markers = frozenset(token for token in special.values() if token is not None)
        """Special tokens whose text the parser needs to see."""
        self._terms = {tag: quoted(tag) if token is None else f"<[{token}]>" for tag, token in special.items()}

    def opened(self, prompt: str) -> bool | None:
        """Whether a rendered prompt has begun the thoughts; None where it has ended them too."""
        end = prompt.rstrip()
        return None if end.endswith(CLOSE) else end.endswith(OPEN)

    def before(self, answer: Grammar, opened: bool) -> Grammar:
        """A grammar that lets thoughts come before an answer."""
        thoughts = f"thoughts SPACE? @answer\nthoughts: /(?s:.*)/ {self._terms[CLOSE]}"
        if self._terms[CLOSE] == quoted(CLOSE):
            thoughts = f"thoughts SPACE? @answer\nthoughts[suffix={quoted(CLOSE)}]: /(?s:.*)/"
        start = f"start: {thoughts}" if opened else f"start: @answer | {self._terms[OPEN]} {thoughts}"
        return around(answer, start + "\nSPACE: /[ \\n]{1,4}/")


def reasoning_of(tokenizer: Tokenizer, name: str = "auto") -> Reasoning | None:
    """For `auto` that of a model whose chat template speaks of thoughts. Raises ConfigError for an unknown name."""
    if name not in PARSERS:
        raise ConfigError(f"--reasoning-parser: {name!r} is none of {', '.join(PARSERS)}.")
    told = tokenizer.template is not None and CLOSE in tokenizer.template.source
    return Reasoning(tokenizer) if name not in ("auto", "none") or (name == "auto" and told) else None


class ReasoningParser:
    """Splits one output. What may still become a tag is held back, and so are line breaks around the thoughts."""

    def __init__(self, *, opened: bool) -> None:
        self._held = ""
        self._tag: str | None = CLOSE if opened else OPEN
        """The tag that comes next: None once the thoughts are over, or there are none."""
        self._fresh = True
        """Nothing has been said yet of what is being said: thoughts, or the answer after them."""

    def push(self, text: str) -> Thought:
        """More of the output."""
        if self._tag is None:
            return Thought(text=self._answer(text))
        self._held += text
        if self._tag == OPEN:
            return self._begin()
        return self._think()

    def finish(self) -> Thought:
        """The rest, now that the output has ended."""
        held, self._held = self._held, ""
        return Thought(reasoning=held) if self._tag == CLOSE else Thought(text=held)

    def _begin(self) -> Thought:
        start = self._held.lstrip()
        if OPEN.startswith(start):
            return Thought()
        if not start.startswith(OPEN):
            held, self._held, self._tag, self._fresh = self._held, "", None, False
            return Thought(text=held)
        self._held, self._tag = start.removeprefix(OPEN), CLOSE
        return self._think()

    def _think(self) -> Thought:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        thoughts, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._held, self._tag, self._fresh = "", None, True
            return Thought(thoughts.rstrip("\n"), self._answer(rest))
        certain = len(thoughts) - _may_close(thoughts)
        self._held = thoughts[certain:]
        return Thought(thoughts[:certain])

    def _answer(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


def _may_close(text: str) -> int:
    """Length of the end of `text` that may belong to the closing tag: its start, and line breaks before it."""
    lengths = range(min(len(text), len(CLOSE) - 1), 0, -1)
    tag = next((length for length in lengths if text.endswith(CLOSE[:length])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip("\n"))
