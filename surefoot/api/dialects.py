"""Which dialect of tool calling a model speaks, and two more of them.

Llama 3   {"name": "get_weather", "parameters": {"city": "Paris"}}                       the whole output
Mistral   [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]          or [TOOL_CALLS]name{…}
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from surefoot.api.template import Message, Tool
from surefoot.api.tokenizer import Tokenizer
from surefoot.api.tools import (
    MAX_CALLS,
    Glm4,
    Hermes,
    Parsed,
    ToolCall,
    ToolDialect,
    ToolParser,
    call_schema,
    make_call,
    parsed_calls,
)
from surefoot.errors import ConfigError
from surefoot.grammar import embedded

_JSON: Final = json.JSONDecoder()


def dialect_of(tokenizer: Tokenizer, name: str = "auto") -> ToolDialect | None:
    """The dialect with this name, or for `auto` the one that a model's special tokens and chat template tell of.

    None where there is none, or none that is known here. Raises ConfigError for a dialect that the model cannot speak.
    """
    template = tokenizer.template
    if template is None or name == "none":
        return None
    found = {known: make(tokenizer) for known, (make, _) in DIALECTS.items()}
    if name != "auto":
        if name not in found:
            raise ConfigError(f"--tool-call-parser: {name!r} is none of auto, none, {', '.join(found)}.")
        dialect = found[name]
        if dialect is None:
            raise ConfigError(f"--tool-call-parser: this model's tokenizer lacks the tokens of {name}.")
        return dialect
    told = (known for known, (_, tells) in DIALECTS.items() if tells(tokenizer))
    return next((found[known] for known in told), None)


def _glm4(tokenizer: Tokenizer) -> ToolDialect | None:
    observation, template = tokenizer.special_id("<|observation|>"), tokenizer.template
    return None if observation is None or template is None else Glm4(observation, takes_tools=template.takes_tools)


def _mistral(tokenizer: Tokenizer) -> ToolDialect | None:
    marker = tokenizer.special_id(Mistral.MARKER)
    return None if marker is None else Mistral(marker, tokenizer.special_id(Mistral.ARGUMENTS))


def _takes_tools(*signs: str) -> Callable[[Tokenizer], bool]:
    """Whether the template has a variable for tools and one of these texts."""

    def tells(tokenizer: Tokenizer) -> bool:
        template = tokenizer.template
        return template is not None and template.takes_tools and any(sign in template.source for sign in signs)

    return tells


# ---- Llama 3 --------------------------------------------------------------------------------------------------------


class Llama3:
    """Llama 3.1 and later: a call is the whole output, a JSON object; several are separated by semicolons."""

    markers: frozenset[int] = frozenset()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool] | None]:
        turns = []
        for index, message in enumerate(messages):
            calls = parsed_calls(index, message)
            turns.append({**message, "tool_calls": calls} if calls else message)
        return turns, tools or None

    def parser(self, names: Collection[str], *, forced: bool = False) -> ToolParser:
        return Llama3Parser(names)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """One call in any case: the template can say no more."""
        return _either(tools, "parameters")


class Llama3Parser:
    """An output that begins with a brace is held until its end shows whether it is made of calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._text = False

    def push(self, text: str) -> Parsed:
        if self._text:
            return Parsed(text)
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith("{"):
            return Parsed()
        self._text, held, self._held = True, self._held, ""
        return Parsed(held)

    def finish(self, stop_token: int | None) -> Parsed:
        held, self._held = self._held, ""
        calls = _objects(held, self._names, "parameters")
        return Parsed(calls=calls) if calls else Parsed(held)


# ---- Mistral --------------------------------------------------------------------------------------------------------


class Mistral:
    """A special token, then calls: as one JSON array, or each as a name and its arguments (from version 11 on).

    Its templates take ids of nine letters and digits, and nothing else.
    """

    MARKER, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, marker: int, arguments: int | None) -> None:
        self._marker = marker
        self.markers = frozenset({marker} if arguments is None else {marker, arguments})

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool] | None]:
        turns = []
        for index, message in enumerate(messages):
            turn = dict(message)
            if calls := parsed_calls(index, message):
                turn["tool_calls"] = [{**call, "id": nine(call["id"])} for call in calls]
            if "tool_call_id" in turn:
                turn["tool_call_id"] = nine(turn["tool_call_id"])
            turns.append(turn)
        return [*turns], tools or None

    def parser(self, names: Collection[str], *, forced: bool = False) -> ToolParser:
        return MistralParser(names)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        items = {"anyOf": [call_schema(tool, "arguments") for tool in tools]}
        array = {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_CALLS if several else 1}
        return f"start: <[{self._marker}]> calls\ncalls: {embedded(array)}"


class MistralParser:
    """What comes before the marker is text; what follows is held until the end."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: str | None = None

    def push(self, text: str) -> Parsed:
        if self._held is not None:
            self._held += text
            return Parsed()
        before, marker, after = text.partition(Mistral.MARKER)  # a token's text comes in one piece
        self._held = after if marker else None
        return Parsed(before)

    def finish(self, stop_token: int | None) -> Parsed:
        held, self._held = self._held, None
        if held is None:
            return Parsed()
        calls = self._calls(held)
        return Parsed(calls=calls) if calls else Parsed(Mistral.MARKER + held)

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        if text.lstrip().startswith("["):
            found = _objects(text, self._names, "arguments")
        else:
            parts = [re.split(r"(?:\[ARGS\])?(?=\{)", part.strip(), maxsplit=1) for part in text.split(Mistral.MARKER)]
            calls = [_named(part[0].strip(), part[-1], self._names) for part in parts]
            found = tuple(call for call in calls if call is not None) if None not in calls else ()
        return tuple(call._replace(id=secrets.token_hex(5)[:9]) for call in found)


def nine(name: str) -> str:
    """An id as Mistral's templates take it; equal ids stay equal."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", name):
        return name
    return hashlib.blake2b(name.encode(), digest_size=5).hexdigest()[:9]


# ---- both -----------------------------------------------------------------------------------------------------------


def _either(tools: Sequence[Tool], arguments: str) -> str:
    rules = [f"a{at}: {embedded(call_schema(tool, arguments))}" for at, tool in enumerate(tools)]
    return "\n".join([f"start: {' | '.join(f'a{at}' for at in range(len(tools)))}", *rules])


def _objects(text: str, names: Collection[str], arguments: str) -> tuple[ToolCall, ...]:
    """Every call in `text`, objects in an array or with semicolons between; none where it is not made of calls only."""
    values: list[Any] = []
    while text := text.strip().removeprefix(";").strip():
        try:
            value, end = _JSON.raw_decode(text)
        except (ValueError, RecursionError):
            return ()
        values += value if isinstance(value, list) else [value]
        text = text[end:]
    calls = [_object(value, names, arguments) for value in values]
    return () if None in calls else tuple(call for call in calls if call is not None)


def _object(value: Any, names: Collection[str], field: str) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in names or not isinstance(value.get(field, {}), dict):
        return None
    return make_call(value["name"], json.dumps(value.get(field, {}), ensure_ascii=False))


def _named(name: str, arguments: str, names: Collection[str]) -> ToolCall | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return make_call(name, json.dumps(value, ensure_ascii=False)) if name in names and isinstance(value, dict) else None


DIALECTS: Final[dict[str, tuple[Callable[[Tokenizer], ToolDialect | None], Callable[[Tokenizer], bool]]]] = {
    "glm4": (_glm4, lambda tokenizer: _glm4(tokenizer) is not None),
    "mistral": (
        _mistral,
        lambda tokenizer: _mistral(tokenizer) is not None and _takes_tools("[AVAILABLE_TOOLS]")(tokenizer),
    ),
    "hermes": (lambda tokenizer: Hermes(), _takes_tools(Hermes.OPEN)),
    "llama3_json": (lambda tokenizer: Llama3(), _takes_tools("<|python_tag|>", "ipython")),
}
"""How each is made, and what tells that a model speaks it."""
