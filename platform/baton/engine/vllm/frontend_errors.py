"""What a client is told when the fleet cannot serve it, in the words of each API."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

from baton.domain.errors import BatonError, Rejected


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
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "BadRequestError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    505: "BadRequestError",
}
_COME_BACK = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
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
# Sooner than any queue empties, and what a client that reads only the status would wait anyway.
_LEAST_WAIT_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error on its way to a client: an HTTP status, a text, and when to come back."""

    status: int
    message: str
    retry_after_s: float | None = None
    challenge: str | None = None
    """How to prove who asks, where that was not done."""
    close: bool = False
    """Nothing more is read from this client's connection."""

    @classmethod
    def of(cls, error: BatonError) -> Problem:
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
        if self.close or self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            # Otherwise the server would go on reading a body that may have no end.
            return [(b"connection", b"close")]
        if self.challenge is not None:
            return [(b"www-authenticate", self.challenge.encode())]
        if self.retry_after_s is None and self.status not in _COME_BACK:
            return []
        seconds = max(_LEAST_WAIT_S, math.ceil(self.retry_after_s or 0.0))
        return [(b"retry-after", str(seconds).encode())]

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
        if dialect is Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, "InternalServerError"),
                "param": None,
                "code": self.status,
            }
        }


def in_dialect(status: int, body: bytes, dialect: Dialect) -> bytes | None:
    """An error of vLLM's, or of the framework under it, in the shape of a route's API.

    None where it has that shape already, or says nothing that could be put into it.
    """
    try:
        document = json.loads(body)
    except ValueError:
        return None
    match document:
        case {"type": "error", "error": {"type": str() as kind}} if (
            dialect is Dialect.ANTHROPIC and kind in _ANTHROPIC_TYPES.values()
        ):
            return None
        case {"error": {"message": str() as message}}:
            if dialect is not Dialect.ANTHROPIC:
                return None
        case {"detail": str() as message}:
            pass
        case _:
            return None
    return Problem(status=status, message=message).body(dialect)


INTERNAL = Problem(status=500, message="the engine could not go on; the same request may succeed")
