"""Anthropic's /v1/messages: what a request may say, as a chat.

    system, blocks of text, tool_use, tool_result   →   messages with tool_calls and roles tool
    stop_sequences, tools, tool_choice              →   stop, tools, tool_choice of a chat

Everything below is the chat endpoint's: one set of checks, with the names of fields put back in what callers read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from surefoot.api import openai
from surefoot.api.openai import ChatRequest, Only, Schema, Tokens
from surefoot.errors import InvalidRequest

Turn = dict[str, Any]
"""One turn, as /v1/chat/completions takes it."""

FIELDS: Final = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
"""Fields of a chat, and what they are called here."""


class TextBlock(Schema):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


def _texts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(_texts), WithJsonSchema({"type": ["string", "array"]})]


class UseBlock(Schema):
    """A call of a tool that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None

    def call(self) -> dict[str, Any]:
        arguments = json.dumps(self.input, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ResultBlock(Schema):
    """What such a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None

    def turn(self) -> Turn:
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": _joined(self.content or [])}


class ThoughtBlock(Schema):
    """What the assistant thought earlier; models are not shown it again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "type=thinking" if kind == "redacted_thinking" else f"type={kind}"


Block = Annotated[
    Annotated[TextBlock, Tag("type=text")]
    | Annotated[UseBlock, Tag("type=tool_use")]
    | Annotated[ResultBlock, Tag("type=tool_result")]
    | Annotated[ThoughtBlock, Tag("type=thinking")],
    Discriminator(
        _kind, custom_error_type="block", custom_error_message="must be text, tool_use, tool_result or thinking"
    ),
]


class Message(Schema):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_texts), WithJsonSchema({"type": ["string", "array"]})]

    def turns(self) -> list[Turn]:
        """Results of tools are turns of their own, before what the user says besides."""
        turns = [block.turn() for block in self.content if isinstance(block, ResultBlock)]
        calls = [block.call() for block in self.content if isinstance(block, UseBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if calls:
            turns.append({"role": self.role, "content": _joined(texts) or None, "tool_calls": calls})
        elif texts or not turns:
            turns.append({"role": self.role, "content": _joined(texts)})
        return turns


def _joined(texts: list[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)


class Tool(Schema):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None

    def tool(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Schema):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Schema):
    format: OutputFormat | None = None
    effort: Only() = None  # type: ignore[valid-type]


class CountRequest(Schema):
    """What makes up a prompt."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=openai.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Only({"type": "disabled"}) = None  # type: ignore[valid-type]
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: Only() = None  # type: ignore[valid-type]
    mcp_servers: Only([]) = None  # type: ignore[valid-type]

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises InvalidRequest with names of this endpoint's fields."""
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "messages must not end with the assistant's: an answer is not gone on with here.", param="messages"
            )
        try:
            request = openai.parse(ChatRequest, {k: v for k, v in self._body().items() if v is not None})
            request.check()
        except InvalidRequest as error:
            raise openai.renamed(error, FIELDS) from None
        return request

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": _joined(self.system)}] if self.system else []
        choice = self.tool_choice
        config = self.output_config
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *(turn for message in self.messages for turn in message.turns())],
            "tools": [tool.tool() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.choice() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        }
        if config is not None and config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


class MessagesRequest(CountRequest):
    max_tokens: Tokens
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Only() = None  # type: ignore[valid-type]
    inference_geo: str | None = None

    def _body(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in names}
        return super()._body() | given | {"stop": self.stop_sequences, "max_completion_tokens": self.max_tokens}
