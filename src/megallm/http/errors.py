"""Errors as clients see them: one JSON object, its status and headers, whatever went wrong.

Nothing of an exception that is not ours is ever repeated to a client.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from msgspec import Struct
from werkzeug.exceptions import HTTPException

from megallm.core_async.errors import EngineBusy, EngineDeadError, MegaLLMError

log = logging.getLogger(__name__)

FAILED = HTTPStatus.INTERNAL_SERVER_ERROR
RETRY_AFTER_S = 1
"""What a refused client is told to wait: about as long as a waiting list takes to move."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""The field's word for each status; else it is `invalid_request_error` or `server_error`."""


class RequestError(MegaLLMError, ValueError):
    """A request that is refused; says where in its body the fault is. The caller's fault."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        """The path of the fault in the body, as `messages[0].role`."""
        self.code = code
        self.http_status = status
        self.headers = dict(headers or {})


class Refusal(Struct, frozen=True):
    """An error response, ready to be sent."""

    status: int
    body: bytes
    headers: dict[str, str]


def refusal_of(error: BaseException) -> Refusal:
    """Gives the response that an error becomes; one that is not ours is logged, and only its kind is told."""
    if isinstance(error, HTTPException):
        return _refusal_of_framework(error)
    if not isinstance(error, MegaLLMError) or error.http_status == FAILED:
        log.error("a request failed", exc_info=error)
        return _refusal(500, "the server failed on this request; its log says why", None, None, {})
    message, param, code, headers = str(error), None, None, dict[str, str]()
    if isinstance(error, RequestError):
        param, code, headers = error.param, error.code, error.headers
    elif isinstance(error, EngineBusy):
        code, headers = "engine_busy", {"Retry-After": str(RETRY_AFTER_S)}
    elif isinstance(error, EngineDeadError):  # its text is another exception's
        message = "the engine has failed; the server's log says why"
    return _refusal(error.http_status, message, param, code, headers)


def error_object(error: BaseException) -> bytes:
    """Gives an error's JSON alone, for a stream that has begun."""
    return refusal_of(error).body


def _refusal_of_framework(error: HTTPException) -> Refusal:
    """Gives what an error of the web framework becomes: an unknown route, a wrong method, too long a body."""
    status = error.code or 500
    phrases: dict[int, str] = {
        404: "there is no such route; GET / and the README name those there are",
        405: "the route does not take this method",
        408: "the request's body did not come in time",
        413: "the request's body is longer than the server takes",
    }
    message = phrases.get(status, error.name)
    headers: dict[str, str] = {}
    valid: object = getattr(error, "valid_methods", None)
    if isinstance(valid, list | tuple | set | frozenset):
        headers["Allow"] = ", ".join(sorted(str(method) for method in valid))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return _refusal(status, message, None, None, headers)


def _refusal(
    status: int, message: str, param: str | None, code: str | None, headers: Mapping[str, str]
) -> Refusal:
    is_fault_of_caller = status < FAILED
    kind = TYPES.get(status, "invalid_request_error" if is_fault_of_caller else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Refusal(
        status, msgspec.json.encode({"error": error}), {"Content-Type": "application/json", **headers}
    )
