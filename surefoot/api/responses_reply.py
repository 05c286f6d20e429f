"""OpenAI's response object as it grows, and the events that tell of it.

created, in_progress
  output_item.added, content_part.added, output_text.delta …, output_text.done, content_part.done, output_item.done
    (for thoughts reasoning_text instead of output_text)
  output_item.added, function_call_arguments.delta, function_call_arguments.done, output_item.done
completed | incomplete | failed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from surefoot.api.narrated import Json, NarratedReply
from surefoot.api.replies import finite
from surefoot.api.responses import ResponsesRequest
from surefoot.api.serving import Delta, Job, Serving
from surefoot.api.tokenizer import Tokenizer
from surefoot.api.tools import ToolCall
from surefoot.errors import RequestError
from surefoot.types import Sampled

_STATUS: Final = {"length": "incomplete"}
"""How a response ends, by the finish reason; completed for all others."""


class ResponseReply(NarratedReply):
    """One response. `json` is the object as it is now; `job` has a single choice."""

    def __init__(self, request: ResponsesRequest, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._with_logprobs = request.wants_logprobs
        self._sequence = 0
        self._text: _Text | None = None
        self._held: list[Json] = []  # log-probabilities of tokens whose text has not come yet
        self._output_tokens = self._reasoning_tokens = self._cached = 0
        self.json: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if request.background else "in_progress",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            **_echo(request, job),
        }

    async def events(self, serving: Serving) -> AsyncGenerator[list[Json], None]:
        """A failure is noted in the object, and told unless nothing was yet."""
        opened = False
        try:
            async with aclosing(serving.generate(self._job)) as steps:
                async for deltas in steps:
                    events = [] if opened else self._open()
                    opened = True
                    for delta in deltas:
                        events += self._take(delta)
                    yield events
        except RequestError as error:
            self.fail(error)
            if opened:  # before that the error has an HTTP status of its own
                yield [self._event("response.failed", response=self._snapshot())]
            raise

    def fail(self, error: RequestError) -> None:
        """Note why there will be no more."""
        self.json |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}

    def cancel(self) -> None:
        self.json["status"] = "cancelled"

    # ---- as it grows ------------------------------------------------------------------------------------------------

    def _open(self) -> list[Json]:
        self.json["status"] = "in_progress"
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def _take(self, delta: Delta) -> list[Json]:
        self._output_tokens += len(delta.tokens)
        self._cached = delta.cached
        if self._with_logprobs:
            self._held += [self._entry(sampled) for sampled in delta.tokens]
        events: list[Json] = []
        if delta.reasoning:
            self._reasoning_tokens += len(delta.tokens)
            events += self._grow(delta.reasoning, thoughts=True)
        if delta.text:
            events += self._grow(delta.text, thoughts=False)
        for call in delta.calls:
            events += self._close_text("completed") + self._call(call)
        return events if delta.finish is None else events + self._end(delta.finish)

    def _grow(self, text: str, *, thoughts: bool) -> list[Json]:
        events = self._open_text(thoughts=thoughts)
        assert self._text is not None
        self._text.parts.append(text)
        scores, self._held = self._held, []
        self._text.logprobs += scores
        return [*events, self._text_event("delta", delta=text, logprobs=scores)]

    def _open_text(self, *, thoughts: bool) -> list[Json]:
        if self._text is not None and self._text.thoughts == thoughts:
            return []
        closing = self._close_text("completed")
        self._text = _Text(f"{'rs' if thoughts else 'msg'}_{uuid.uuid4().hex}", len(self.json["output"]), thoughts)
        item = self._text.item("in_progress", [])
        self.json["output"].append(item)
        return [
            *closing,
            self._event("response.output_item.added", output_index=self._text.index, item=item),
            self._part_event("added", self._text.part("")),
        ]

    def _close_text(self, status: str) -> list[Json]:
        if self._text is None:
            return []
        text, self._text.logprobs = "".join(self._text.parts), self._text.logprobs + self._held
        self._held = []
        part = self._text.part(text)
        item = self.json["output"][self._text.index] = self._text.item(status, [part])
        events = [
            self._text_event("done", text=text, logprobs=self._text.logprobs),
            self._part_event("done", part),
            self._event("response.output_item.done", output_index=self._text.index, item=item),
        ]
        self._text = None
        return events

    def _call(self, call: ToolCall) -> list[Json]:
        index, id = len(self.json["output"]), f"fc_{uuid.uuid4().hex}"
        item = {"id": id, "type": "function_call", "call_id": call.id, "name": call.name}
        done = item | {"status": "completed", "arguments": call.arguments}
        self.json["output"].append(done)
        where = {"item_id": id, "output_index": index}
        return [
            self._event(
                "response.output_item.added", output_index=index, item=item | {"status": "in_progress", "arguments": ""}
            ),
            self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
            self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=done),
        ]

    def _end(self, finish: str) -> list[Json]:
        status = _STATUS.get(finish, "completed")
        events = self._open_text(thoughts=False) if not self.json["output"] else []
        events += self._close_text(status)
        self.json |= {"status": status, "usage": self._usage()}
        if status == "incomplete":
            self.json["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def _usage(self) -> Json:
        prompt, output = self._job.prompt_tokens, self._output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": prompt + output,
        }

    # ---- shapes -----------------------------------------------------------------------------------------------------

    def _event(self, type: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": type, "sequence_number": self._sequence - 1, **fields}

    def _text_event(self, what: str, *, logprobs: list[Json], **fields: Any) -> Json:
        """About the text that is being written; thoughts have no log-probabilities."""
        assert self._text is not None
        scores = {} if self._text.thoughts else {"logprobs": logprobs}
        return self._event(f"response.{self._text.kind}.{what}", **self._text.where, **fields, **scores)

    def _part_event(self, what: str, part: Json) -> Json:
        assert self._text is not None
        return self._event(f"response.content_part.{what}", **self._text.where, part=part)

    def _snapshot(self) -> Json:
        """The object as it is now: events of one step are encoded when all of them are made."""
        return {**self.json, "output": list(self.json["output"])}

    def _entry(self, sampled: Sampled) -> Json:
        top = [self._token(token, logprob) for token, logprob in sampled.top]
        return self._token(sampled.token, sampled.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> Json:
        text, spelled = self._tokenizer.token_text(token), self._tokenizer.token_bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(spelled)}


class _Text(msgspec.Struct):
    """What is being written: item `index` of the output, a message or thoughts."""

    id: str
    index: int
    thoughts: bool
    parts: list[str] = []
    logprobs: list[Json] = []

    @property
    def kind(self) -> str:
        return "reasoning_text" if self.thoughts else "output_text"

    @property
    def where(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def item(self, status: str, content: list[Json]) -> Json:
        kind: Json = {"type": "reasoning", "summary": []} if self.thoughts else {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "status": status, "content": content}

    def part(self, text: str) -> Json:
        rest: Json = {} if self.thoughts else {"annotations": [], "logprobs": self.logprobs}
        return {"type": self.kind, "text": text, **rest}


def _echo(request: ResponsesRequest, job: Job) -> Json:
    """What the object repeats of the request, with what it came to."""
    params = job.prompts[0][1]
    given = request.model_dump(include={"tools", "tool_choice", "text"}, by_alias=True, exclude_none=True)
    return {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "tools": [{"parameters": None, "strict": None, **tool} for tool in given.get("tools", ())],
        "tool_choice": given.get("tool_choice", "auto"),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}} | given.get("text", {}),
        "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
        "metadata": request.metadata or {},
        "user": request.user,
        "store": request.store is not False,
        "service_tier": "default",
        "truncation": "disabled",
    }
