"""OpenAI's /v1/responses: what a request may say, as a chat.

    instructions, previous response, input items  →  messages
    text.format, tools, tool_choice               →  response_format, tools, tool_choice of a chat

Everything below is the chat endpoint's: one set of checks, with the names of fields put back in what callers read.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from surefoot.api import openai
from surefoot.api.openai import ChatRequest, Only, Schema, Tokens
from surefoot.errors import InvalidRequest
from surefoot.sampling import MAX_LOGPROBS

Message = dict[str, Any]
"""One turn, as /v1/chat/completions takes it."""

LOGPROBS: Final = "message.output_text.logprobs"
FIELDS: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat, and what they are called here."""


class TextPart(Schema):
    """Text in a message; `output_text` is what an earlier response said, with what clients send back along with it."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[TextPart], BeforeValidator(_parts), WithJsonSchema({"type": ["string", "array"]})]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Schema):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: str | None = None

    def message(self) -> Message:
        return {"role": self.role, "content": [{"type": "text", "text": part.text} for part in self.content]}


class CallItem(Schema):
    """A function call that an earlier response made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None

    def call(self) -> dict[str, Any]:
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ResultItem(Schema):
    """What such a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None

    def message(self) -> Message:
        text = "\n".join(part.text for part in self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


class ReasoningItem(Schema):
    """What an earlier response thought; models are not shown it again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(value: object) -> str:
    """A message needs not say that it is one."""
    return f"type={value.get('type', 'message')}" if isinstance(value, dict) else "type=message"


Item = Annotated[
    Annotated[MessageItem, Tag("type=message")]
    | Annotated[CallItem, Tag("type=function_call")]
    | Annotated[ResultItem, Tag("type=function_call_output")]
    | Annotated[ReasoningItem, Tag("type=reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="must be a message, function_call, function_call_output or reasoning",
    ),
]


def _items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Function(Schema):
    """A tool; here its fields stand beside its type."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class Format(Schema):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        given = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": {name: value for name, value in given.items() if value is not None}}


class TextConfig(Schema):
    format: Format | None = None
    verbosity: Only("medium") = None  # type: ignore[valid-type]


class NamedTool(Schema):
    type: Literal["function"]
    name: str


class StreamOptions(Schema):
    include_obfuscation: Only(False) = None  # type: ignore[valid-type]


class ResponsesRequest(Schema):
    input: Annotated[
        list[Item], Field(min_length=1), BeforeValidator(_items), WithJsonSchema({"type": ["string", "array"]})
    ]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    tools: Annotated[list[Function], Field(max_length=openai.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    truncation: Only("disabled") = None  # type: ignore[valid-type]
    reasoning: dict[str, Any] | None = None
    max_tool_calls: Only() = None  # type: ignore[valid-type]
    conversation: Only() = None  # type: ignore[valid-type]
    prompt: Only() = None  # type: ignore[valid-type]
    context_management: Only() = None  # type: ignore[valid-type]
    moderation: Only() = None  # type: ignore[valid-type]
    prompt_cache_options: Only() = None  # type: ignore[valid-type]
    # vLLM's extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(openai.listed, json_schema_input_type=str | list[str] | None)] = (
        None
    )
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """What no single field can tell. Raises InvalidRequest."""
        if self.background and self.stream:
            raise InvalidRequest(
                "A background response cannot be streamed; ask for it again by its id.", param="stream"
            )
        if self.background and self.store is False:
            raise InvalidRequest("background needs store: the response is asked for later.", param="background")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream=true.", param="stream_options")

    def messages(self) -> list[Message]:
        """The input as turns; calls in a row belong to one turn of the assistant's, and to the text right before."""
        turns: list[Message] = []
        for item in self.input:
            if isinstance(item, CallItem):
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": None})
                turns[-1].setdefault("tool_calls", []).append(item.call())
            elif not isinstance(item, ReasoningItem):
                turns.append(item.message())
        return turns

    def chat(self, before: list[Message]) -> ChatRequest:
        """The same as a chat that goes on from `before`. Raises InvalidRequest with names of this endpoint's fields."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        body: dict[str, Any] = {"messages": [*system, *before, *self.messages()], **self._same()}
        body["max_completion_tokens"] = self.max_output_tokens
        body["tools"] = None if self.tools is None else [tool.tool() for tool in self.tools]
        choice = self.tool_choice
        named = isinstance(choice, NamedTool)
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            body["response_format"] = self.text.format.response_format()
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.get("effort")
        if self.wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        try:
            request = openai.parse(ChatRequest, {name: value for name, value in body.items() if value is not None})
            request.check()
        except InvalidRequest as error:
            raise openai.renamed(error, FIELDS) from None
        return request

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def _same(self) -> dict[str, Any]:
        """Fields that a chat has by the same name and with the same meaning."""
        names = (
            "model", "temperature", "top_p", "parallel_tool_calls", "user", "top_k", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "priority",
            "cache_salt",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}
