"""The outermost layer: who may come in, what came out, and the last resort for a bug.

Plain ASGI, so that streams and disconnects pass through untouched.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.api.metrics import Metrics
from surefoot.errors import EngineFailure, RequestError, Unauthorized

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready"})
"""Probes carry no key."""
ADMIN_PATHS: Final = frozenset({"/drain", "/memory", "/sleep", "/wake_up"})
"""What changes the server for everybody; only an admin key opens it, and without one it is closed."""
CLIENT_CLOSED: Final = 499
"""Counted where the client left before there was an answer."""

_log = structlog.get_logger(__name__)


class JsonResponse(Response):
    """JSON by msgspec: fast, and never NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: RequestError) -> JsonResponse:
    """The error as a caller sees it."""
    response = JsonResponse(error.body(), status_code=error.status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    if error.status == Unauthorized.status:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        response.headers["connection"] = "close"  # the rest of the body stays unread
    return response


class Gate:
    """Checks the key, counts statuses, and turns an unexpected exception into a 500 that is logged once."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_keys: Sequence[str], metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._keys = tuple(key.encode() for key in keys)
        self._admin_keys = tuple(key.encode() for key in admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, counted)
        except ClientDisconnect:
            status = status or CLIENT_CLOSED
        except Exception:
            _log.exception("a request failed unexpectedly", path=scope["path"])
            if not status:
                answer = error_response(EngineFailure("Internal error; the server's log has the details."))
                await answer(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.http(_method(scope["method"]), route, status)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (error := self._refusal(scope)) is not None:
            self._metrics.error(error.type)
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        """Why this request may not come in; an admin key opens everything."""
        path = scope["path"]
        if path in ADMIN_PATHS:
            if _known(scope, self._admin_keys):
                return None
            return Unauthorized(f"{path} needs a key that the server was given with --admin-api-key.")
        if not self._keys or path in OPEN_PATHS or _known(scope, (*self._keys, *self._admin_keys)):
            return None
        return Unauthorized("This server needs an API key: send the header `Authorization: Bearer <key>`.")


def _known(scope: Scope, keys: Sequence[bytes]) -> bool:
    """Takes as long for a wrong key as for a right one, and as long for the first key as for the last."""
    key = credential(scope)
    matches = [hmac.compare_digest(key, known) for known in keys]
    return bool(key) and any(matches)


def credential(scope: Scope) -> bytes:
    """The key that came along: `Authorization: Bearer …`, or `X-Api-Key: …` as Anthropic's clients send it."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _method(method: str) -> str:
    """Clients may invent methods; labels may not grow with them."""
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
