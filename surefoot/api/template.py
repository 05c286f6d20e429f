"""Chat templates: the checkpoint's own Jinja text, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surefoot.errors import CheckpointError, InvalidRequest

Message = Mapping[str, Any]
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
        except TemplateError as error:
            raise CheckpointError(f"The checkpoint's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text, ended by the start of an assistant's turn with `add_generation_prompt`.

        Raises InvalidRequest naming the message that the template refuses.
        """
        try:
            return self._render(messages, add_generation_prompt)
        except _REFUSALS as error:
            index = self._culprit(messages)
            role = messages[index].get("role") if messages else None
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"The model's chat template refuses messages[{index}] (role {role!r}): {reason}",
                param=f"messages.{index}",
            ) from error

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return self._template.render(
            self._variables, messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None
        )

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
