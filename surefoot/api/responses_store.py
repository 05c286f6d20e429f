"""/v1/responses: make responses, and keep the latest of them for a while, in memory, bounded in number and bytes.

A kept response belongs to the key that made it; for any other there is none of that id. Those that still run in the
background are never dropped to make room: where they fill it, a new one is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from surefoot.api.gate import JsonResponse, credential
from surefoot.api.openai import renamed
from surefoot.api.responses import FIELDS, Message, ResponsesRequest
from surefoot.api.responses_reply import ResponseReply
from surefoot.api.serving import RETRY_AFTER, Serving
from surefoot.api.sse import EventStream, unless_disconnected
from surefoot.errors import EngineFailure, InvalidRequest, NotFound, Overloaded, RequestError
from surefoot.sampling import shown

MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 64 << 20

_log = structlog.get_logger(__name__)
Read = Callable[[Request, type[ResponsesRequest]], Awaitable[ResponsesRequest]]


class Kept:
    """A response, with the turns that another one may go on from."""

    def __init__(self, reply: ResponseReply, owner: bytes, turns: list[Message]) -> None:
        self.reply, self.owner, self.turns = reply, owner, turns
        self.task: asyncio.Task[None] | None = None
        """What generates it in the background."""
        self.size = 0

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def weigh(self) -> int:
        """Bytes that it takes, about."""
        return len(msgspec.json.encode((self.reply.json, self.turns)))

    def history(self) -> list[Message]:
        """Its turns and its own answer."""
        answer: Message = {"role": "assistant", "content": None}
        for item in self.reply.json["output"]:
            if item["type"] == "message":
                answer["content"] = (answer["content"] or "") + "".join(part["text"] for part in item["content"])
            elif item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                answer.setdefault("tool_calls", []).append(
                    {"id": item["call_id"], "type": "function", "function": function}
                )
        return [*self.turns, answer] if answer["content"] or "tool_calls" in answer else self.turns


class Responses:
    """The endpoints, each a method, and what they keep."""

    def __init__(
        self, serving: Serving, read: Read, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._serving, self._read = serving, read
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    async def create(self, request: Request) -> Response:
        """Answer, at once, as events, or in the background."""
        arrival = time.monotonic()
        asked = await self._read(request, ResponsesRequest)
        asked.check()
        owner = _owner(request)
        before = self._before(asked, owner)
        chat = asked.chat(before)
        try:
            job = await unless_disconnected(request.receive, self._serving.chat_job(chat, arrival))
        except InvalidRequest as error:
            raise renamed(error, FIELDS) from None
        reply = ResponseReply(asked, job, self._serving.check_model(asked.model), self._serving.tokenizer)
        kept = Kept(reply, owner, [*before, *asked.messages()])
        if asked.background:
            self._keep(kept)
            kept.task = asyncio.create_task(self._work(kept))
            return JsonResponse(reply.json)
        if asked.stream:
            return await self._stream(request, kept, store=asked.store is not False)
        answer = await unless_disconnected(request.receive, reply.run(self._serving))
        if asked.store is not False:
            self._keep(kept)
        return JsonResponse(answer)

    async def get(self, request: Request, id: str) -> Response:
        """A response that was kept, as it is now."""
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise InvalidRequest("A kept response is not streamed again; ask for it without stream.", param="stream")
        return JsonResponse(self._find(id, _owner(request)).reply.json)

    async def delete(self, request: Request, id: str) -> Response:
        """Forget a response; one that runs in the background is stopped."""
        kept = self._find(id, _owner(request))
        await _stop(kept)
        self._drop(id)
        return JsonResponse({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, id: str) -> Response:
        """Stop a response that runs in the background; one that is done stays as it is."""
        kept = self._find(id, _owner(request))
        if not kept.reply.json["background"]:
            raise InvalidRequest("Only a response made with background=true can be cancelled.", param="id")
        await _stop(kept)
        return JsonResponse(kept.reply.json)

    # ---- making -----------------------------------------------------------------------------------------------------

    def _before(self, asked: ResponsesRequest, owner: bytes) -> list[Message]:
        if asked.previous_response_id is None:
            return []
        kept = self._kept.get(asked.previous_response_id)
        if kept is None or kept.owner != owner:
            raise InvalidRequest(
                f"There is no response {shown(asked.previous_response_id)} any more. The latest are kept, unless "
                "store=false; send the conversation in input.",
                param="previous_response_id",
            )
        if kept.reply.json["status"] in ("queued", "in_progress"):
            raise InvalidRequest("That response is not done yet.", param="previous_response_id")
        return kept.history()

    async def _stream(self, request: Request, kept: Kept, *, store: bool) -> Response:
        frames = kept.reply.frames(self._serving)
        first = await unless_disconnected(request.receive, anext(frames))

        async def all_frames() -> AsyncGenerator[bytes, None]:
            async with aclosing(frames):
                async for data in frames:
                    yield data
            if store:
                self._keep(kept)

        return EventStream(first, all_frames(), lambda error: self._serving.metrics.error(error.type))

    async def _work(self, kept: Kept) -> None:
        """Generate in the background; whatever happens is in the object."""
        try:
            await kept.reply.run(self._serving)
        except RequestError as error:
            kept.reply.fail(error)
            self._serving.metrics.error(error.type)
        except Exception:
            _log.exception("a background response failed unexpectedly")
            kept.reply.fail(EngineFailure("Internal error; the server's log has the details."))
        if kept.reply.json["id"] in self._kept:
            self._weigh(kept)
            self._make_room()

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def _find(self, id: str, owner: bytes) -> Kept:
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            raise NotFound(f"There is no response {shown(id)}; the latest are kept, unless store=false.", param="id")
        return kept

    def _keep(self, kept: Kept) -> None:
        if kept.reply.json["background"]:
            running = sum(other.running for other in self._kept.values())
            if running >= self._max_responses:
                raise Overloaded(
                    f"{running:,} responses run in the background already. Try again later.", retry_after=RETRY_AFTER
                )
        self._kept[kept.reply.json["id"]] = kept
        self._weigh(kept)
        self._make_room()

    def _weigh(self, kept: Kept) -> None:
        before, kept.size = kept.size, kept.weigh()
        self._bytes += kept.size - before

    def _make_room(self) -> None:
        """Drop the oldest that are done."""
        done = [id for id, kept in self._kept.items() if not kept.running and kept.reply.json["status"] != "queued"]
        for id in done:
            if len(self._kept) <= self._max_responses and self._bytes <= self._max_bytes:
                return
            self._drop(id)

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id, None)
        self._bytes -= kept.size if kept is not None else 0


async def _stop(kept: Kept) -> None:
    if kept.task is not None and not kept.task.done():
        kept.task.cancel()
        await asyncio.wait([kept.task])
        if kept.task.cancelled():
            kept.reply.cancel()


def _owner(request: Request) -> bytes:
    """Whose request this is; the key itself is not kept."""
    return hashlib.sha256(credential(request.scope)).digest()
