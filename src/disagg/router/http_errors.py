"""Errors as OpenAI's clients know them: an HTTP status and {"error": {message, type, param, code}}."""

import math
from typing import Final

import msgspec
from starlette.responses import Response

from disagg.core.errors import (
    DisaggError,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    PeerFault,
    RateLimited,
    RequestError,
    Unavailable,
)

JSON: Final = "application/json"
_BODIES_RETRY_S: Final = 1.0


class ErrorBody(msgspec.Struct, frozen=True):
    """The inside of OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class HttpError(msgspec.Struct, frozen=True):
    """An error ready to be sent."""

    status: int
    body: ErrorBody
    retry_after_s: float | None = None
    ends_connection: bool = False  # the rest of the body may still come, or never

    @property
    def json(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.body))

    def response(self) -> Response:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:  # clients count in whole seconds; 0 would be a busy loop
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.ends_connection:
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.json, self.status, headers, media_type=JSON)


def http_error(error: Exception) -> HttpError:
    """Translate at the border. What is not a DisaggError is told without its details, which belong in the log."""
    message = str(error)
    match error:
        case InvalidRequest():
            return HttpError(400, ErrorBody(message, "invalid_request_error", error.param, error.code))
        case ModelNotFound():
            code = error.code or "model_not_found"
            return HttpError(404, ErrorBody(message, "invalid_request_error", error.param or "model", code))
        case NotAuthenticated():
            code = error.code or "invalid_api_key"
            return HttpError(401, ErrorBody(message, "authentication_error", error.param, code))
        case NotAllowed():
            return HttpError(403, ErrorBody(message, "permission_error", error.param, error.code))
        case RequestError():
            return HttpError(400, ErrorBody(message, "invalid_request_error", error.param, error.code))
        case RateLimited():
            body = ErrorBody(message, "rate_limit_error", None, "rate_limit_exceeded")
            return HttpError(429, body, error.retry_after_s)
        case Overloaded():
            return HttpError(
                429, ErrorBody(message, "server_overloaded", None, "server_overloaded"), error.retry_after_s
            )
        case Unavailable():
            body = ErrorBody(message, "service_unavailable", None, "service_unavailable")
            return HttpError(503, body, error.retry_after_s)
        case PeerFault():
            return HttpError(502, ErrorBody(message, "server_error", None, "worker_failed"))
        case DisaggError():
            return HttpError(500, ErrorBody(message, "server_error", None, "internal_error"))
        case _:
            text = f"the server failed on this request ({type(error).__name__}); its log has the details"
            return HttpError(500, ErrorBody(text, "server_error", None, "internal_error"))


def body_too_large(max_body_bytes: int) -> HttpError:
    """413: the body is over the limit."""
    message = f"the body is larger than {max_body_bytes} bytes; send less text at once"
    return HttpError(413, ErrorBody(message, "invalid_request_error", None, "body_too_large"), ends_connection=True)


class Refused(Exception):
    """An answer that is decided: the request is not looked at further."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.body.message)
        self.error = error


def body_too_slow(timeout_s: float) -> HttpError:
    """408: the body did not come in time."""
    message = f"the body did not come within {timeout_s:g} s; send it in one go"
    return HttpError(408, ErrorBody(message, "invalid_request_error", None, "request_timeout"), ends_connection=True)


def too_many_large_bodies(max_held_bytes: int) -> HttpError:
    """429: others' bodies take all the room there is for large ones."""
    message = f"large bodies that are being read take all of {max_held_bytes} bytes; send it again in a moment"
    body = ErrorBody(message, "server_overloaded", None, "server_overloaded")
    return HttpError(429, body, _BODIES_RETRY_S, ends_connection=True)


def unsupported_endpoint(path: str) -> HttpError:
    """404: a part of OpenAI's API that is not here."""
    message = f"{path} is not supported here: this server completes text, at /v1/chat/completions and /v1/completions"
    return HttpError(404, ErrorBody(message, "invalid_request_error", None, "unsupported_endpoint"))


def timeline_not_kept(name: str) -> HttpError:
    """404: a request that is not among the last ones, or not the caller's."""
    message = f"no timeline of {name[:128]!r} is kept; give the id of one of your last answers, after its end"
    return HttpError(404, ErrorBody(message, "invalid_request_error", "request_id", "timeline_not_kept"))


def routing_error(status: int, method: str, path: str) -> HttpError:
    """404 or 405 of the HTTP layer itself."""
    if status == 405:
        text, code = f"{path} does not take {method}", "method_not_allowed"
    else:
        text, code = f"there is nothing at {path}", "not_found"
    return HttpError(status, ErrorBody(text, "invalid_request_error", None, code))
