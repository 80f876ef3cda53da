"""Errors that clients get, in the shape of each API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

from baton.domain.errors import BatonError, Rejected
from baton.domain.names.retry_after import retry_after_seconds
from baton.domain.names.words import few

_MAX_FIELDS = 10
_MAX_CHARS = 300
"""Of the description of a field."""
_PYDANTIC_HEADER = re.compile(r"\d+ validation errors? for [^\n]*\n")
_DETAILS = re.compile(r"\s*\[type=.*", re.DOTALL)

# A field, or an index of a list. Other parts of a location name a class or a check.
_FIELD = re.compile(r"[a-z_][a-z0-9_]*|[0-9]+")
_NON_FIELD_PARTS = frozenset(
    {
        "body",
        "str",
        "int",
        "float",
        "bool",
        "bytes",
        "list",
        "tuple",
        "dict",
        "set",
        "none",
        "nonetype",
        "union",
        "nullable",
        "default",
        "call",
        "callable",
        "arguments",
        "chain",
        "json",
        "lax",
        "strict",
        "constrained",
    }
)

# Of the server's files; `/v1/models` does not match.
_FILE_PATH = re.compile(
    r'(?:File )?"?(?:/(?:[\w.\-]+/)*(?:home|usr|opt|var|tmp|root|lib|mnt|srv|etc|site-packages)'
    r'(?:/[\w.\-]+)+|(?:/[\w.\-]+)+\.py)"?(?:, line \d+(?:, in \S+)?)?'
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PREFIXES = ("Value error, ", "Assertion failed, ")
_JSON_WORDS = (
    ("a valid dictionary or object to extract fields from", "an object"),
    ("a valid dictionary", "an object"),
)
_UNABLE_TO_PARSE = re.compile(r", unable to (parse|interpret) .*")
_SHOULD_PREFIX = "Input should "
_UNREADABLE = "the body is not valid JSON"


class Dialect(StrEnum):
    """The shape of a route's errors."""

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
    """An error for a client."""

    status: int
    message: str
    retry_after_s: float | None = None
    challenge: str | None = None
    """How to authenticate (`WWW-Authenticate`), after a failure of that."""
    param: str | None = None
    """The field that is wrong, if it is a field."""
    allow: str | None = None
    """Methods of the path, after another method."""
    close: bool = False
    """Whether the connection closes after the response."""

    @classmethod
    def from_error(cls, error: BatonError) -> Problem:
        """The client's view of `error`."""
        retry_after_s = error.retry_after_s if isinstance(error, Rejected) else None
        return cls(status=error.http_status, message=str(error), retry_after_s=retry_after_s)

    @classmethod
    def unpack(cls, packed: object) -> Problem:
        """The problem in an output's stop reason; `INTERNAL` for an engine's own error."""
        if not isinstance(packed, str):
            return INTERNAL
        try:
            status, message, retry_after_s = json.loads(packed)
        except ValueError:
            return INTERNAL
        return cls(status=status, message=message, retry_after_s=retry_after_s)

    def pack(self) -> str:
        """A string for the stop reason of an output."""
        return json.dumps((self.status, self.message, self.retry_after_s))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers other than content type and length."""
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
        """The server-sent event that reports it within a stream.

        No `[DONE]` follows: a client that misses the event still sees that the stream broke off.
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
    """An API's name for errors of this status."""
    by_client = _FIRST_CLIENT_ERROR <= status < _FIRST_SERVER_ERROR
    if dialect is Dialect.ANTHROPIC:
        return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if by_client else "api_error")
    return _OPENAI_TYPES.get(status, "BadRequestError" if by_client else "InternalServerError")


def to_dialect(status: int, body: bytes, dialect: Dialect) -> bytes | None:
    """An error of vLLM or its framework in the shape of a route's API; None if unchanged."""
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
    """An error response of vLLM, without details that only its developers understand."""
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return INTERNAL  # an exception's text is not for clients
    message, param = _parse_message(body)
    return Problem(status=status, message=sanitize(message or _phrase(status)), param=param)


def _parse_message(body: bytes) -> tuple[str | None, str | None]:
    """The message and the field in the body of an error of any shape."""
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


def describe_field_errors(errors: Sequence[object]) -> str:
    """The fields that are wrong and why, from a framework's list of errors.

    pydantic's text names classes, repeats inputs and links to its own manual. Clients know fields.
    """
    descriptions = list(dict.fromkeys(_describe_field_error(error) for error in errors))
    return few(descriptions, _MAX_FIELDS)


def sanitize(message: str) -> str:
    """A message without pydantic's text, paths of the server and addresses in its memory."""
    header = _PYDANTIC_HEADER.search(message)
    if header is not None:
        return describe_field_errors(list(_parse_pydantic_errors(message[header.end() :])))
    return _ADDRESS.sub("", _FILE_PATH.sub("a file", message)).strip()


def _parse_pydantic_errors(text: str) -> Iterator[Mapping[str, object]]:
    """The errors in pydantic's text: a line with the location, then an indented line."""
    location = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            location = line
        elif not line.startswith("   "):
            yield {"loc": tuple(location.split(".")), "msg": _DETAILS.sub("", line.strip())}


def _describe_field_error(error: object) -> str:
    if not isinstance(error, Mapping):
        return str(error)[:_MAX_CHARS]
    message = str(error.get("msg", "is not valid"))[:_MAX_CHARS]
    if error.get("type") == "json_invalid":
        context = error.get("ctx")
        reason = context.get("error") if isinstance(context, Mapping) else None
        return f"{_UNREADABLE}: {str(reason).lower()}" if reason else _UNREADABLE
    for prefix in _PREFIXES:
        message = message.removeprefix(prefix)
    field = _field_path(error.get("loc"))
    name = f"'{field}'" if field else "the body"
    if message == "Field required":
        return f"{name} is required"
    if message.startswith(_SHOULD_PREFIX):
        message = _UNABLE_TO_PARSE.sub("", message)
        for pydantic_words, json_words in _JSON_WORDS:
            message = message.replace(pydantic_words, json_words)
        return f"{name} should {message.removeprefix(_SHOULD_PREFIX)}"
    return f"{name}: {message}"


def _field_path(location: object) -> str:
    """The dotted field at a framework's location; empty for the body itself."""
    parts = [str(part) for part in location] if isinstance(location, (list, tuple)) else []
    return ".".join(part for part in parts if _is_field(part))


def strip_class_names(param: str) -> str:
    """A location of vLLM (`body.messages.0`) without names of classes."""
    return ".".join(part for part in param.split(".") if _FIELD.fullmatch(part))


def _is_field(part: str) -> bool:
    return _FIELD.fullmatch(part) is not None and part not in _NON_FIELD_PARTS
