"""Tool calling: OpenAI's tools and calls ↔ what a model was trained to read and to write.

A dialect writes tools, earlier calls and their results into the conversation that the chat template renders, and makes
the parsers that find calls in the output, one for each choice. What looks like a call but names no tool of the request,
or whose arguments are no JSON object, stays text.

    GLM-4    <|assistant|>get_weather⏎{"city": "Paris"}<|observation|>          the last token ends the output
    Hermes   text<tool_call>⏎{"name": "get_weather", "arguments": {…}}⏎</tool_call>      Qwen and others

Where a call is asked for (`tool_choice` required, or a name), a grammar makes it one. Two more dialects, and which one
a model speaks, are in `dialects`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from surefoot.api.template import Message, Tool
from surefoot.errors import InvalidRequest
from surefoot.grammar import embedded, quoted

_JSON = json.JSONDecoder()
MAX_CALLS: Final = 16
"""Of an output that has to be calls: a model may not know an end."""


class ToolCall(NamedTuple):
    """One call in an output. `arguments` is the text of a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Parsed(NamedTuple):
    """What became certain: text to show, then calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolParser(Protocol):
    """Splits one output into text and calls."""

    def push(self, text: str) -> Parsed:
        """More of the output. What may still become a call is held back."""
        ...

    def finish(self, stop_token: int | None) -> Parsed:
        """The rest, now that the output has ended, by `stop_token` where a token ended it."""
        ...


class ToolDialect(Protocol):
    """How a model family speaks of tools."""

    markers: frozenset[int]
    """Special tokens whose text the parsers need to see."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool] | None]:
        """OpenAI's messages and tools → the messages of the template, and its variable `tools`."""
        ...

    def parser(self, names: Collection[str], *, forced: bool = False) -> ToolParser:
        """For one output of a request whose tools have these names; with `forced` it keeps to `grammar`."""
        ...

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """A grammar in Lark of one call, or with `several` of one or more, and nothing else."""
        ...


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object"}


def call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    """The JSON schema of a call as one object, whose arguments are in the field of that name."""
    fields = {"name": {"const": tool["function"]["name"]}, arguments: parameters_of(tool)}
    return {"type": "object", "properties": fields, "required": ["name", arguments], "additionalProperties": False}


def make_call(name: object, arguments: str) -> ToolCall:
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", str(name), arguments)


def arguments_of(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of an earlier call, which OpenAI sends as text."""
    try:
        value = json.loads(call["function"]["arguments"] or "{}")
    except ValueError as error:
        raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}.", param="messages") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object.", param="messages")
    return value


def parsed_calls(index: int, message: Message) -> list[dict[str, Any]]:
    """The calls of an earlier message with their arguments as objects, as most templates want them."""
    return [
        {
            **call,
            "function": {**call["function"], "arguments": arguments_of(call, f"messages[{index}].tool_calls[{at}]")},
        }
        for at, call in enumerate(message.get("tool_calls") or ())
    ]


# ---- GLM-4 ----------------------------------------------------------------------------------------------------------


class Glm4:
    """GLM-4 and GLM-4-0414. Tools are a system turn, a result is the role observation, a call has its name after the
    role (the template's `metadata`) and its arguments as content."""

    markers: frozenset[int] = frozenset()

    def __init__(self, observation: int, *, takes_tools: bool) -> None:
        """`observation` is the token that ends a call. With `takes_tools` the template has a variable for tools;
        otherwise they ride on a system message."""
        self._observation = observation
        self._takes_tools = takes_tools

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool] | None]:
        turns = [turn for index, message in enumerate(messages) for turn in self._turns(index, message)]
        if not tools:
            return turns, None
        if self._takes_tools:
            return turns, tools
        if turns and turns[0]["role"] == "system":
            turns[0] = {**turns[0], "tools": tools}
        else:
            turns.insert(0, {"role": "system", "content": "", "tools": tools})
        return turns, None

    def _turns(self, index: int, message: Message) -> list[Message]:
        if message["role"] == "tool":
            return [{"role": "observation", "content": message["content"]}]
        calls = message.get("tool_calls")
        if not calls:
            return [message]
        turns: list[Message] = [{"role": "assistant", "content": message["content"]}] if message["content"] else []
        for at, call in enumerate(calls):
            arguments = arguments_of(call, f"messages[{index}].tool_calls[{at}]")
            text = json.dumps(arguments, ensure_ascii=False)
            turns.append({"role": "assistant", "metadata": call["function"]["name"], "content": text})
        return turns

    def parser(self, names: Collection[str], *, forced: bool = False) -> ToolParser:
        return Glm4Parser(names, None if forced else self._observation)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        calls = [f"{quoted(tool['function']['name'] + chr(10))} a{at}" for at, tool in enumerate(tools)]
        rules = [f"a{at}: {embedded(parameters_of(tool))}" for at, tool in enumerate(tools)]
        more = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
        return "\n".join([rf'start: "\n"? call{more}', f"call: {' | '.join(calls)}", *rules])


class Glm4Parser:
    """A call is the whole output, ended by the observation token: a name, a line break, a JSON object; or several."""

    def __init__(self, names: Collection[str], observation: int | None) -> None:
        """Without `observation` any end will do."""
        self._names, self._observation = names, observation
        self._held = ""
        self._text = False

    def push(self, text: str) -> Parsed:
        if self._text:
            return Parsed(text)
        self._held += text
        start = self._held.lstrip()
        if any(start.startswith(f"{name}\n") or f"{name}\n".startswith(start) for name in self._names):
            return Parsed()
        self._text, held, self._held = True, self._held, ""
        return Parsed(held)

    def finish(self, stop_token: int | None) -> Parsed:
        held, self._held = self._held, ""
        calls = self._calls(held) if self._observation in (None, stop_token) else ()
        return Parsed(calls=calls) if calls else Parsed(held)

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        """Every call in `text`, or none where it is not made of calls only."""
        calls = []
        while text := text.strip():
            name, _, rest = text.partition("\n")
            rest = rest.lstrip()
            try:
                value, end = _JSON.raw_decode(rest)
            except (ValueError, RecursionError):
                return ()
            if name.strip() not in self._names or not isinstance(value, dict):
                return ()
            calls.append(make_call(name.strip(), rest[:end]))
            text = rest[end:]
        return tuple(calls)


# ---- Hermes ---------------------------------------------------------------------------------------------------------


class Hermes:
    """Qwen and others: the template has a variable for tools and reads OpenAI's messages, but for arguments, which it
    wants as an object."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers: frozenset[int] = frozenset()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool] | None]:
        return [self._turn(index, message) for index, message in enumerate(messages)], tools or None

    def _turn(self, index: int, message: Message) -> Message:
        calls = parsed_calls(index, message)
        return {**message, "content": message["content"] or "", "tool_calls": calls} if calls else message

    def parser(self, names: Collection[str], *, forced: bool = False) -> ToolParser:
        return HermesParser(names)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        rules = [f"a{at}: {embedded(call_schema(tool, 'arguments'))}" for at, tool in enumerate(tools)]
        either = " | ".join(f"a{at}" for at in range(len(tools)))
        more = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
        return "\n".join([f"start: call{more}", rf'call: "{self.OPEN}\n" ({either}) "\n{self.CLOSE}"', *rules])


class HermesParser:
    """Calls stand between tags, anywhere in the text; each is known when its tag closes. Line breaks around a call
    belong to it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._called = False
        """The text so far ends with a call and line breaks."""

    def push(self, text: str) -> Parsed:
        self._held += text.lstrip("\n") if self._called and not self._held else text
        self._called = self._called and not self._held
        shown = ""
        calls: list[ToolCall] = []
        while Hermes.OPEN in self._held:
            before, _, rest = self._held.partition(Hermes.OPEN)
            body, closed, after = rest.partition(Hermes.CLOSE)
            if not closed:
                certain = before.rstrip("\n")
                self._held = self._held[len(certain) :]
                return Parsed(shown + certain, tuple(calls))
            call = self._call(body)
            shown += before.rstrip("\n") if call else before + Hermes.OPEN + body + Hermes.CLOSE
            calls += [call] if call else []
            self._held = after.lstrip("\n") if call else after
            self._called = call is not None and not self._held
        keep = _may_open(self._held)
        shown, self._held = shown + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Parsed(shown, tuple(calls))

    def finish(self, stop_token: int | None) -> Parsed:
        held, self._held = self._held, ""
        return Parsed(held)

    def _call(self, body: str) -> ToolCall | None:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", {})
        return (
            make_call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
        )


def _may_open(text: str) -> int:
    """Length of the end of `text` that may belong to a call: the start of a tag, and line breaks before it."""
    lengths = range(min(len(text), len(Hermes.OPEN) - 1), 0, -1)
    tag = next((length for length in lengths if text.endswith(Hermes.OPEN[:length])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip("\n"))
