"""Messages and tools, as /v1/chat/completions takes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surefoot.api.schema import Only, Schema


class TextPart(Schema):
    type: Literal["text"]
    text: str


class Function(Schema):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    type: Literal["function"]
    function: Function


class FunctionName(Schema):
    name: str


class NamedTool(Schema):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Schema):
    name: str
    arguments: str


class Call(Schema):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Schema):
    """One turn. `developer` is OpenAI's newer name for `system`; `tool` is what a call of the assistant's returned."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    refusal: Only() = None  # type: ignore[valid-type]
    audio: Only() = None  # type: ignore[valid-type]
    annotations: Only([]) = None  # type: ignore[valid-type]
    function_call: Only() = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _whole(self) -> Message:
        """Which fields a role has."""
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required, but for an assistant's message with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to role assistant, not to {self.role}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id belongs to role tool, which needs one")
        return self

    def turn(self) -> dict[str, Any]:
        """As chat templates take it; parts of text are joined by newlines, as vLLM does."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": "\n".join(parts)}
        if self.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        return turn | {name: value for name, value in given.items() if value is not None}


Messages = Annotated[list[Message], Field(min_length=1)]
