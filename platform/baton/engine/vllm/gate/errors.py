"""What a client is told when the fleet cannot serve it, in the words of each API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

from baton.domain.errors import BatonError, Rejected
from baton.domain.names.retry_after import retry_after_seconds
from baton.engine.vllm.gate.error_texts import sanitize


class Dialect(StrEnum):
    """Whose error shape a route speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """OpenAI too, but its streams are made of typed events."""
    ANTHROPIC = "anthropic"


_OPENAI_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "BadRequestError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    505: "BadRequestError",
}
_RETRYABLE = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
    505: "invalid_request_error",
}
_FIRST_CLIENT_ERROR, _FIRST_SERVER_ERROR = 400, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error on its way to a client: an HTTP status, a text, and when to come back."""

    status: int
    message: str
    retry_after_s: float | None = None
    challenge: str | None = None
    """How to prove who asks, where that was not done."""
    param: str | None = None
    """The field that is wrong, where it is one."""
    allow: str | None = None
    """Methods that the path has, where another one was used."""
    close: bool = False
    """Nothing more is read from this client's connection."""

    @classmethod
    def from_error(cls, error: BatonError) -> Problem:
        """What the client is told of `error`."""
        retry_after_s = error.retry_after_s if isinstance(error, Rejected) else None
        return cls(status=error.http_status, message=str(error), retry_after_s=retry_after_s)

    @classmethod
    def unpack(cls, packed: object) -> Problem:
        """The problem in an output's stop reason; an engine's own error has none there."""
        if not isinstance(packed, str):
            return INTERNAL
        try:
            status, message, retry_after_s = json.loads(packed)
        except ValueError:
            return INTERNAL
        return cls(status=status, message=message, retry_after_s=retry_after_s)

    def pack(self) -> str:
        """One string, small enough to ride on an output."""
        return json.dumps((self.status, self.message, self.retry_after_s))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers besides content type and length."""
        headers = []
        if self.close or self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            # Otherwise the server would go on reading a body that may have no end.
            headers.append((b"connection", b"close"))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.challenge is not None:
            headers.append((b"www-authenticate", self.challenge.encode()))
        if self.retry_after_s is not None or self.status in _RETRYABLE:
            seconds = retry_after_seconds(self.retry_after_s or 0.0)
            headers.append((b"retry-after", str(seconds).encode()))
        return headers

    def body(self, dialect: Dialect) -> bytes:
        """The JSON body of an error response."""
        return json.dumps(self._shape(dialect)).encode()

    def event(self, dialect: Dialect, *, sequence_number: int = 0) -> bytes:
        """The server-sent event that tells it in the middle of a stream.

        There is no `[DONE]` after it: a client that overlooks the event must still be able to see
        that the stream broke off.
        """
        shape = self._shape(dialect)
        if dialect is Dialect.OPENAI:
            return b"data: " + json.dumps(shape).encode() + b"\n\n"
        if dialect is Dialect.RESPONSES:
            # The flat fields are the documented event; `error` is what SDKs raise on.
            shape = {
                "type": "error",
                "code": str(self.status),
                "message": self.message,
                "param": None,
                "sequence_number": sequence_number,
            } | shape
        return b"event: error\ndata: " + json.dumps(shape).encode() + b"\n\n"

    def _shape(self, dialect: Dialect) -> dict[str, object]:
        kind = error_type(self.status, dialect)
        if dialect is Dialect.ANTHROPIC:
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }


def error_type(status: int, dialect: Dialect) -> str:
    """What an API calls errors of this status."""
    by_client = _FIRST_CLIENT_ERROR <= status < _FIRST_SERVER_ERROR
    if dialect is Dialect.ANTHROPIC:
        return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if by_client else "api_error")
    return _OPENAI_TYPES.get(status, "BadRequestError" if by_client else "InternalServerError")


def to_dialect(status: int, body: bytes, dialect: Dialect) -> bytes | None:
    """An error of vLLM's, or of the framework under it, in the shape of a route's API.

    None where it has that shape already.
    """
    problem = problem_from_vllm(status, body)
    is_anthropic = dialect is Dialect.ANTHROPIC
    valid_types = _ANTHROPIC_TYPES.values() if is_anthropic else (error_type(status, dialect),)
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    match document:
        case {"error": {"message": problem.message, "type": kind}} if (
            kind in valid_types and (document.get("type") == "error") == is_anthropic
        ):
            return None
        case _:
            return problem.body(dialect)


def problem_from_vllm(status: int, body: bytes) -> Problem:
    """What an error response of vLLM's says, without what only its developers understand."""
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return INTERNAL  # whatever was raised there
    message, param = _parse_message(body)
    return Problem(status=status, message=sanitize(message or _phrase(status)), param=param)


def _parse_message(body: bytes) -> tuple[str | None, str | None]:
    """The message and the field in the body of an error, in whichever shape that is."""
    try:
        document = json.loads(body)
    except ValueError:
        return None, None
    match document:
        case {"error": {"message": str() as message, **fields}}:
            param = fields.get("param")
            return message, param if isinstance(param, str) else None
        case {"detail": str() as message}:
            return message, None
        case _:
            return None, None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase.lower()
    except ValueError:
        return "the request was refused"


INTERNAL = Problem(status=500, message="the engine could not go on; the same request may succeed")
