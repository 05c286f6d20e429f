"""The HTTP API: one visible list of routes, and one shape for every error.

    Gate (key, status counts, 500)  →  body: bounded, strict  →  schema  →  sampling ranges  →  model name
      →  tokenize in a thread  →  context  →  admission  →  first event  →  headers, then the rest

Headers are sent when the first step has brought something: whatever fails before has an HTTP status of its own.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import surefoot
from surefoot.api import messages_reply, openai
from surefoot.api.body import read_json_object
from surefoot.api.deadline import Patience
from surefoot.api.engine import Engine
from surefoot.api.gate import Gate, JsonResponse, error_response
from surefoot.api.messages import CountRequest, MessagesRequest
from surefoot.api.messages_reply import Messages
from surefoot.api.metrics import Metrics
from surefoot.api.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from surefoot.api.replies import ChatReply, CompletionReply, Reply
from surefoot.api.responses import ResponsesRequest
from surefoot.api.responses_store import Responses
from surefoot.api.serving import RETRY_AFTER, Serving
from surefoot.api.sse import EventStream, unless_disconnected
from surefoot.api.tokenizer import Tokenizer
from surefoot.config import ServerConfig
from surefoot.errors import EngineFailure, InvalidRequest, MethodNotAllowed, NotFound, Overloaded, RequestError
from surefoot.sampling import shown
from surefoot.spec import NO_DEFAULTS, GenerationDefaults

_S = TypeVar("_S", bound=openai.Schema)


def create_app(
    engine: Engine, tokenizer: Tokenizer, config: ServerConfig, defaults: GenerationDefaults = NO_DEFAULTS
) -> FastAPI:
    """The ASGI application; `config.served_model_name` holds at least one name, `defaults` fill in what requests leave
    out.

    The engine's life belongs to the caller; while `engine.draining`, new work is refused with 503 and Retry-After.
    """
    names = config.served_model_name
    metrics = Metrics(engine, names[0])
    serving = Serving(
        engine,
        tokenizer,
        metrics,
        names=names,
        max_preparing=config.max_queued_requests,
        defaults=defaults,
        refuse_while_restarting=config.while_restarting == "refuse",
        refuse_while_sleeping=config.while_sleeping == "refuse",
        patience=Patience(whole=config.request_timeout, first_token=config.first_token_timeout),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    api = Api(serving, max_body_bytes=config.max_body_bytes, drain_timeout=config.drain_timeout)
    app = FastAPIOffline(
        title="Surefoot", version=surefoot.__version__, redoc_url=None,
        description="OpenAI-compatible inference where a request that fails, fails alone.",
    )  # fmt: skip
    app.router.redirect_slashes = False
    api.route(app, Responses(serving, api.read), Messages(serving, api.read))
    app.add_exception_handler(RequestError, api.refuse)
    app.add_exception_handler(HTTPException, api.refuse_route)
    app.add_middleware(Gate, keys=config.api_key, admin_keys=config.admin_api_key, metrics=metrics)
    return app


class Api:
    """The endpoints, each a method."""

    def __init__(self, serving: Serving, *, max_body_bytes: int, drain_timeout: float) -> None:
        self._serving, self._metrics, self._engine = serving, serving.metrics, serving.engine
        self._max_body_bytes, self._drain_timeout = max_body_bytes, drain_timeout
        self._created = int(time.time())

    def route(self, app: FastAPI, responses: Responses, messages: Messages) -> None:
        """Every route of the API."""
        post, get = ["POST"], ["GET"]
        for path, endpoint, methods, schema in (
            ("/v1/chat/completions", self.chat, post, ChatRequest),
            ("/v1/completions", self.completions, post, CompletionRequest),
            ("/v1/responses", responses.create, post, ResponsesRequest),
            ("/v1/responses/{id}", responses.get, get, None),
            ("/v1/responses/{id}", responses.delete, ["DELETE"], None),
            ("/v1/responses/{id}/cancel", responses.cancel, post, None),
            (messages_reply.PATH, messages.create, post, MessagesRequest),
            (messages_reply.PATH + "/count_tokens", messages.count, post, CountRequest),
            ("/v1/models", self.models, get, None),
            ("/v1/models/{name:path}", self.model, get, None),
            ("/tokenize", self.tokenize, post, TokenizeRequest),
            ("/detokenize", self.detokenize, post, DetokenizeRequest),
            ("/health/live", self.live, get, None),
            ("/health/ready", self.ready, get, None),
            ("/health", self.health, get, None),
            ("/ping", self.health, get, None),
            ("/drain", self.drain, post, None),
            ("/memory", self.memory, get, None),
            ("/memory", self.limit_memory, post, None),
            ("/sleep", self.sleep, post, None),
            ("/wake_up", self.wake_up, post, None),
            ("/is_sleeping", self.is_sleeping, get, None),
            ("/version", self.version, get, None),
            ("/metrics", self.metrics, get, None),
        ):
            extra = None if schema is None else _documented(schema)
            app.add_api_route(path, endpoint, methods=methods, openapi_extra=extra, response_model=None)

    # ---- generating -------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        arrival = time.monotonic()
        asked = await self.read(request, ChatRequest)
        asked.check()
        job = await unless_disconnected(request.receive, self._serving.chat_job(asked, arrival))
        model = self._serving.check_model(asked.model)
        return await self._answer(request, ChatReply(asked, job, model, self._serving.tokenizer), asked.stream)

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts, whole or as server-sent events."""
        arrival = time.monotonic()
        asked = await self.read(request, CompletionRequest)
        asked.check()
        job = await unless_disconnected(request.receive, self._serving.completion_job(asked, arrival))
        model = self._serving.check_model(asked.model)
        return await self._answer(request, CompletionReply(asked, job, model, self._serving.tokenizer), asked.stream)

    async def _answer(self, request: Request, reply: Reply, stream: bool | None) -> Response:
        if not stream:
            return JsonResponse(await unless_disconnected(request.receive, reply.whole(self._serving)))
        frames = reply.frames(self._serving)
        first = await unless_disconnected(request.receive, anext(frames))
        return EventStream(first, frames, lambda error: self._metrics.error(error.type))

    # ---- tokens -----------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        asked = await self.read(request, TokenizeRequest)
        asked.check()
        ids, strings = await self._serving.tokenize(asked)
        length = self._serving.max_model_len
        return JsonResponse({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        asked = await self.read(request, DetokenizeRequest)
        return JsonResponse({"prompt": await self._serving.detokenize(asked)})

    # ---- models, health, numbers ------------------------------------------------------------------------------------

    async def models(self) -> Response:
        """The names this server answers to."""
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self._serving.names]})

    async def model(self, name: str) -> Response:
        """One of the names this server answers to."""
        return JsonResponse(self._card(self._serving.check_model(name)))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "surefoot",
            "root": self._serving.names[0],
            "parent": None,
            "max_model_len": self._serving.max_model_len,
            "generation_config": self._serving.defaults.given(),
        }

    async def live(self) -> Response:
        """200 while this process answers at all."""
        return JsonResponse({"status": "live"})

    async def ready(self) -> Response:
        """200 while a request sent now would be served; else 503, also where requests wait and no step is made."""
        self._serving.check_open()
        self._serving.check_worker()
        if self._engine.stalled:
            raise Overloaded("Requests wait, and the engine has made no step for a while.", retry_after=RETRY_AFTER)
        return JsonResponse({"status": "ready"})

    async def health(self) -> Response:
        """200 while the engine runs, draining included, or sleeps; else 503."""
        if not (self._engine.alive or self._engine.sleeping):
            raise Overloaded("The engine is not running.")
        return JsonResponse({"status": "sleeping" if self._engine.sleeping else "ok"})

    async def drain(self) -> Response:
        """Refuse new requests from now on, and answer when the running ones are done, or after --drain-timeout."""
        done = await self._engine.drain(self._drain_timeout)
        return JsonResponse({"status": "drained" if done else "requests are still running"})

    async def memory(self) -> Response:
        """What memory goes to: the plan's rows, the cache as it is, and what is measured."""
        return JsonResponse(self._serving.memory.report())

    async def limit_memory(self, request: Request) -> Response:
        """Hold the server to a new limit, `{"limit": "24GiB"}`; running requests go on."""
        return JsonResponse(await self._serving.memory.limit(await read_json_object(request, limit=1 << 16)))

    async def sleep(self) -> Response:
        """Give back all memory of the device, until a request comes or /wake_up is called."""
        await self._engine.sleep()
        return JsonResponse({"is_sleeping": True})

    async def wake_up(self) -> Response:
        """Load the model again, and answer when that is done."""
        await self._engine.wake()
        return JsonResponse({"is_sleeping": False})

    async def is_sleeping(self) -> Response:
        """Whether the server sleeps."""
        return JsonResponse({"is_sleeping": self._engine.sleeping})

    async def version(self) -> Response:
        """The server's version."""
        return JsonResponse({"version": surefoot.__version__})

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # ---- reading and refusing ---------------------------------------------------------------------------------------

    async def read(self, request: Request, schema: type[_S]) -> _S:
        """The body of a request for new work. Raises RequestError."""
        self._serving.check_open()
        return openai.parse(schema, await read_json_object(request, limit=self._max_body_bytes))

    async def refuse(self, request: Request, error: Exception) -> Response:
        """A RequestError as its HTTP answer."""
        assert isinstance(error, RequestError)
        self._metrics.error(error.type)
        if request.url.path.startswith(messages_reply.PATH):
            return messages_reply.refusal(error)
        return error_response(error)

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """What the router refuses, in the shape of every other error."""
        assert isinstance(error, HTTPException)
        known = _routing_error(request, error)
        self._metrics.error(known.type)
        response = error_response(known)
        response.headers.update(error.headers or {})
        return response


def _routing_error(request: Request, error: HTTPException) -> RequestError:
    path = shown(request.url.path)
    if error.status_code == NotFound.status:
        return NotFound(f"There is no route {path}; /docs lists them.")
    if error.status_code == MethodNotAllowed.status:
        return MethodNotAllowed(f"{path} does not take {shown(request.method)[1:-1]}.")
    if 400 <= error.status_code < 500:
        return InvalidRequest(str(error.detail))
    return EngineFailure("Internal error; the server's log has the details.")


def _documented(schema: type[openai.Schema]) -> dict[str, Any]:
    """The body's schema for /docs; reading it is ours, see `body`."""
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
