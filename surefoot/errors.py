"""Every error a user can meet, and how it shows itself.

    SurefootError
    ├── RequestError                 about one request; has an HTTP status, a type and maybe a field
    │   ├── InvalidRequest     400   BadRequestError       a field is wrong, missing, unknown or out of range
    │   ├── Unauthorized       401   AuthenticationError
    │   ├── NotFound           404   NotFoundError         unknown model or route
    │   ├── MethodNotAllowed   405   MethodNotAllowedError
    │   ├── PayloadTooLarge    413   RequestTooLargeError  body over the limit, refused before it is parsed
    │   ├── InsufficientMemory 413   insufficient_memory   ran, and failed alone at the smallest step
    │   ├── Overloaded         503   ServiceUnavailableError + Retry-After: queue full, draining
    │   └── EngineFailure      500   InternalServerError   a bug, a lost row, a lost worker
    └── StartupError                 ends the process; has an exit code
        ├── ConfigError        2     a flag, variable or file is wrong
        ├── ModelNotFound      3
        ├── CheckpointError    4     corrupt, incomplete or unsupported weights; names file and tensor
        ├── DoesNotFit         5     memory plan refused, with the numbers
        └── WorkerLost         70    the worker process died

413 is deliberate for a request that ran out of memory: client libraries retry 5xx by themselves, and this would only
fail again.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SurefootError(Exception):
    """Base of all. `message` is written for the reader: what was asked, what there is, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(SurefootError):
    """About one request. `param` names the field at fault, `retry_after` is in seconds, `details` go along with it."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        """The OpenAI error object: `{"error": {"message", "type", "param", "code"}}`, and what `details` add."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error | self.details}


class InvalidRequest(RequestError):
    status = 400
    type = "BadRequestError"


class Unauthorized(RequestError):
    status = 401
    type = "AuthenticationError"


class NotFound(RequestError):
    status = 404
    type = "NotFoundError"


class MethodNotAllowed(RequestError):
    status = 405
    type = "MethodNotAllowedError"


class TimedOut(RequestError):
    status = 408
    type = "RequestTimeoutError"


class PayloadTooLarge(RequestError):
    status = 413
    type = "RequestTooLargeError"


class InsufficientMemory(RequestError):
    status = 413
    type = "insufficient_memory"


class Overloaded(RequestError):
    status = 503
    type = "ServiceUnavailableError"


class EngineFailure(RequestError):
    status = 500
    type = "InternalServerError"


FAILED_KINDS: dict[str, type[RequestError]] = {
    "insufficient_memory": InsufficientMemory,
    "engine_failure": EngineFailure,
    "invalid_request": InvalidRequest,
}
"""What `types.Failed.kind` may say, and the error that a caller then sees."""


class StartupError(SurefootError):
    """Ends the process with `exit_code`."""

    exit_code: ClassVar[int] = 1


class ConfigError(StartupError):
    exit_code = 2


class ModelNotFound(StartupError):
    exit_code = 3


class CheckpointError(StartupError):
    exit_code = 4


class DoesNotFit(StartupError):
    exit_code = 5


class WorkerLost(StartupError):
    exit_code = 70
