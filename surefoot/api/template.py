"""Chat templates: the checkpoint's own Jinja text, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surefoot.errors import CheckpointError, InvalidRequest

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`"""
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template, a program of the checkpoint's, can raise about its input."""


class ChatTemplate:
    """A compiled template. `variables` are what every rendering sees, such as bos_token.

    Raises CheckpointError where the text is no Jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
            free = meta.find_undeclared_variables(_environment().parse(source))
        except TemplateError as error:
            raise CheckpointError(f"The chat template is not valid: {error}") from error
        self.takes_tools = "tools" in free
        """The template reads tools from a variable of its own. GLM-4's reads them from a message."""
        self.reply_prefix = self._reply_prefix()
        """Newlines that stand between what a prompt ends with and the answer that follows it in a longer conversation:
        a model that was trained so writes them before every answer."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text, ended by the start of an assistant's turn with `add_generation_prompt`.

        `variables` are more of what this rendering sees, such as enable_thinking. Raises InvalidRequest naming the
        message that the template refuses.
        """
        try:
            return self._render(messages, add_generation_prompt, tools, variables)
        except _REFUSALS as error:
            index = self._culprit(messages)
            role = messages[index].get("role") if messages else None
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"The model's chat template refuses messages[{index}] (role {role!r}): {reason}",
                param=f"messages.{index}",
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        ours = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
        return self._template.render({**(variables or {}), **self._variables, **ours})

    def _reply_prefix(self) -> str:
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        try:
            prompt, whole = self._render([question], True), self._render([question, answer], False)
        except _REFUSALS:  # a template with demands of its own: then nothing is known
            return ""
        rest = whole.removeprefix(prompt)
        newlines = rest[: len(rest) - len(rest.lstrip("\n"))]
        return newlines if whole.startswith(prompt) and rest.startswith(newlines + "!") else ""

    def _culprit(self, messages: Sequence[Message]) -> int:
        """Index of the message that ends the shortest conversation that fails, found by halving."""
        low, high = 0, max(len(messages) - 1, 0)
        while low < high:
            middle = (low + high) // 2
            if self._fails(messages[: middle + 1]):
                high = middle
            else:
                low = middle + 1
        return low

    def _fails(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages, False)
        except _REFUSALS:
            return True
        return False


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training: here its body is kept."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model was never trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
