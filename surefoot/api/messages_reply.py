"""/v1/messages: Anthropic's message as it grows, the events that tell of it, and errors in its shape.

message_start
  content_block_start, content_block_delta …, content_block_stop      text, or a call of a tool
message_delta, message_stop
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from surefoot.api.gate import JsonResponse, error_response
from surefoot.api.messages import FIELDS, CountRequest, MessagesRequest
from surefoot.api.narrated import Json, NarratedReply
from surefoot.api.openai import renamed
from surefoot.api.serving import Delta, Job, Serving
from surefoot.api.sse import EventStream, event_frame, unless_disconnected
from surefoot.api.tools import ToolCall
from surefoot.errors import InvalidRequest, RequestError

_R = TypeVar("_R", bound=CountRequest)

PATH: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's names of errors, by status; invalid_request_error for other 4xx, api_error for the rest."""
_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}


class Read(Protocol):
    def __call__(self, request: Request, schema: type[_R], /) -> Any: ...


class Messages:
    """The endpoints, each a method."""

    def __init__(self, serving: Serving, read: Read) -> None:
        self._serving, self._read = serving, read

    async def create(self, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        arrival = time.monotonic()
        asked: MessagesRequest = await self._read(request, MessagesRequest)
        chat = asked.chat()
        try:
            job = await unless_disconnected(request.receive, self._serving.chat_job(chat, arrival))
        except InvalidRequest as error:
            raise renamed(error, FIELDS) from None
        reply = MessageReply(job, self._serving.check_model(asked.model))
        if not asked.stream:
            return JsonResponse(await unless_disconnected(request.receive, reply.run(self._serving)))
        frames = reply.frames(self._serving)
        first = await unless_disconnected(request.receive, anext(frames))
        return EventStream(first, frames, lambda error: self._serving.metrics.error(error.type), _last_words)

    async def count(self, request: Request) -> Response:
        """How many tokens a prompt has, however long it is."""
        asked: CountRequest = await self._read(request, CountRequest)
        ids = await self._serving.chat_ids(asked.chat())
        return JsonResponse({"input_tokens": len(ids)})


def refusal(error: RequestError) -> Response:
    """An error before anything was said, with status and headers like any other."""
    response = error_response(error)
    response.body = response.render(error_body(error))
    response.headers["content-length"] = str(len(response.body))
    return response


def error_body(error: RequestError) -> Json:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "param": error.param}}


def _last_words(error: RequestError) -> bytes:
    return event_frame("error", error_body(error))


class MessageReply(NarratedReply):
    """One message; `json` is the object as it is now, `job` has a single choice."""

    def __init__(self, job: Job, model: str) -> None:
        self._job = job
        self._text: list[str] | None = None  # of the block that is open
        self._kind = "text"
        self._output_tokens = 0
        self.json: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    async def events(self, serving: Serving) -> AsyncGenerator[list[Json], None]:
        opened = False
        async with aclosing(serving.generate(self._job)) as steps:
            async for deltas in steps:
                events: list[Json] = []
                for delta in deltas:
                    self._output_tokens += len(delta.tokens)
                    self.json["usage"] = self._usage(delta.cached)
                    if not opened:
                        opened = True
                        start = {**self.json, "content": [], "usage": self.json["usage"] | {"output_tokens": 0}}
                        events.append({"type": "message_start", "message": start})
                    events += self._take(delta)
                yield events

    def _take(self, delta: Delta) -> list[Json]:
        events: list[Json] = []
        if delta.reasoning:
            events += self._grow(delta.reasoning, "thinking")
        if delta.text:
            events += self._grow(delta.text, "text")
        for call in delta.calls:
            events += self._close() + self._use(call)
        return events if delta.finish is None else events + self._end(delta.finish, delta.stop_reason)

    def _grow(self, text: str, kind: str) -> list[Json]:
        """More of a block of kind text or thinking, which are alike."""
        events: list[Json] = []
        if self._text is None or self._kind != kind:
            events = self._close()
            self._text, self._kind = [], kind
            self.json["content"].append(self._whole(""))
            events.append(self._block("start", content_block=self._whole("")))
        self._text.append(text)
        return [*events, self._block("delta", delta={"type": f"{kind}_delta", kind: text})]

    def _whole(self, text: str) -> Json:
        """The block that is open. Thoughts are not signed: nobody checks that they come back unchanged."""
        return {"type": self._kind, self._kind: text} | ({"signature": ""} if self._kind == "thinking" else {})

    def _close(self) -> list[Json]:
        if self._text is None:
            return []
        self.json["content"][-1] = self._whole("".join(self._text))
        self._text = None
        return [self._block("stop")]

    def _use(self, call: ToolCall) -> list[Json]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        self.json["content"].append(block)
        return [
            self._block("start", content_block={**block, "input": {}}),
            self._block("delta", delta={"type": "input_json_delta", "partial_json": call.arguments}),
            self._block("stop"),
        ]

    def _end(self, finish: str, stop: str | int | None) -> list[Json]:
        events = self._close()
        sequence = stop if isinstance(stop, str) else None
        reason = _REASONS.get(finish, "end_turn" if sequence is None else "stop_sequence")
        ending = {"stop_reason": reason, "stop_sequence": sequence}
        self.json |= ending
        usage = self.json["usage"]
        return [*events, {"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]

    def _block(self, what: str, **fields: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self.json["content"]) - 1, **fields}

    def _usage(self, cached: int) -> Json:
        """Cached tokens count apart, as they do there."""
        return {
            "input_tokens": self._job.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
        }
