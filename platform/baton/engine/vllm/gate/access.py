"""Authentication of callers by API key, and the headers that go on to vLLM.

A key comes as `Authorization: Bearer` (OpenAI's clients) or as `x-api-key` (Anthropic's), on every
route. vLLM's handlers never see it.

Where anonymous callers are served, a key without baton's prefix counts as none, because some
clients must send a key and send any word. An invalid key with baton's prefix is refused even there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from baton.domain.names.trace_context import TraceContext, is_in_sample, parse_traceparent
from baton.domain.tenant import DEFAULT_TENANT
from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.keys.api_keys import KEY_PREFIX, InvalidKey, KeyState, ValidKey

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
MAX_CLASS_CHARS = 64
SLO_CLASS_HEADER = b"x-slo-class"
_CREDENTIALS = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"cookie"})
_BATON_HEADERS = frozenset(
    {
        SLO_CLASS_HEADER,
        # Ray Serve's own, between its proxy and a replica.
        b"x-request-disconnect-disabled",
        b"x-request-timeout-seconds",
        # vLLM's, for operators of its engines: here that is baton.
        b"x-data-parallel-rank",
        b"x-vllm-priority",
    }
)
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
STRIPPED_HEADERS = _CREDENTIALS | _BATON_HEADERS | _TRACE_HEADERS
"""Headers that the gate does not pass on."""
BATON_HEADER_PREFIX = b"x-baton-"
"""Likewise, of headers with this prefix."""
_REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_CHARS = "[A-Za-z0-9._:/=@+-]"
_REQUEST_IDS = re.compile(f"{REQUEST_ID_CHARS}+".encode())
_CLASS = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
"""Values of `gen_ai.operation.name` by path."""


class Unauthorized(StrEnum):
    """Why a request gets status 401."""

    MISSING = "missing"
    SEVERAL = "several"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    REVOKED = "revoked"


def _count_nothing(_cause: Unauthorized) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which callers are served, and as which tenant."""

    look_up: Callable[[str], ValidKey | InvalidKey] | None = None
    """Finds a key; None without keys, and then keys of callers are ignored."""
    anonymous: bool = True
    """Whether callers without a key are served, as tenant `default`."""
    isolated: Collection[str] = frozenset()
    """Tenants with a prefix cache of their own."""
    trace_sample_fraction: float | None = None
    """Share of requests without a trace that is sampled; None: no trace begins here."""
    count_unauthorized: Callable[[Unauthorized], None] = _count_nothing
    """Called for each request that gets status 401."""

    def identify_caller(self, headers: Headers) -> Caller | Problem:
        """The caller with these headers, or why the request is refused."""
        headers = tuple(headers)
        tenant = self._tenant(headers)
        if isinstance(tenant, Problem):
            return tenant
        slo_class = _slo_class(headers)
        if isinstance(slo_class, Problem):
            return slo_class
        return Caller(tenant, slo_class, tenant if tenant in self.isolated else None)

    def identify_administrator(self, headers: Headers) -> ValidKey | Problem:
        """The key by which a caller may administer, or why it may not."""
        if self.look_up is None:
            return NO_KEYS
        key = self._look_up_one(_tokens(headers), self.look_up)
        if isinstance(key, Problem):
            return key
        return key if key.is_admin else NOT_AN_ADMIN

    def _tenant(self, headers: Headers) -> str | Problem:
        if self.look_up is None:
            return DEFAULT_TENANT if self.anonymous else self._unauthorized(Unauthorized.MISSING)
        tokens = _tokens(headers)
        if self.anonymous:
            tokens = {token for token in tokens if token.startswith(KEY_PREFIX)}
            if not tokens:
                return DEFAULT_TENANT
        key = self._look_up_one(tokens, self.look_up)
        return key if isinstance(key, Problem) else key.tenant

    def _look_up_one(
        self, tokens: set[str], look_up: Callable[[str], ValidKey | InvalidKey]
    ) -> ValidKey | Problem:
        if not tokens:
            return self._unauthorized(Unauthorized.MISSING)
        if len(tokens) > 1:
            return self._unauthorized(Unauthorized.SEVERAL)
        key = look_up(tokens.pop())
        if isinstance(key, ValidKey):
            return key
        return self._unauthorized(
            Unauthorized.UNKNOWN if key.state is None else Unauthorized(key.state)
        )

    def _unauthorized(self, cause: Unauthorized) -> Problem:
        self.count_unauthorized(cause)
        return _UNAUTHORIZED_PROBLEMS[cause]


def forwarded_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that vLLM may see: no credentials, and none that are baton's to set.

    A client may name its request, to find it in logs and records. An invalid or second name is
    dropped, and vLLM makes one.
    """
    forwarded = [
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in STRIPPED_HEADERS
        and not lower.startswith(BATON_HEADER_PREFIX)
    ]
    request_ids = [value for name, value in forwarded if name.lower() == _REQUEST_ID]
    if not request_ids or (len(request_ids) == 1 and _is_request_id(request_ids[0])):
        return forwarded
    return [(name, value) for name, value in forwarded if name.lower() != _REQUEST_ID]


def _is_request_id(value: bytes) -> bool:
    return len(value) <= MAX_REQUEST_ID_CHARS and _REQUEST_IDS.fullmatch(value) is not None


def _tokens(headers: Headers) -> set[str]:
    tokens: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == b"x-api-key":
            tokens.add(value.decode("latin-1").strip())
        elif lower == b"authorization":
            scheme, _, token = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer":
                tokens.add(token.strip())
    return tokens - {""}


def _slo_class(headers: Headers) -> str | Problem | None:
    names = {value.strip() for name, value in headers if name.lower() == SLO_CLASS_HEADER}
    if not names - {b""}:
        return None
    if len(names) > 1:
        return SEVERAL_CLASSES
    (value,) = names
    if len(value) > MAX_CLASS_CHARS or not _CLASS.fullmatch(value):
        return INVALID_CLASS
    return value.decode("ascii")


def unauthorized(message: str) -> Problem:
    """The error for a key that is not valid."""
    return Problem(
        status=401, message=message, challenge='Bearer realm="baton", error="invalid_token"'
    )


MISSING_KEY = Problem(
    status=401,
    message="expected an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    challenge='Bearer realm="baton"',
)
SEVERAL_KEYS = unauthorized("several different API keys were sent, expected one")
UNKNOWN_KEY = unauthorized("this API key is not known")
_UNAUTHORIZED_PROBLEMS: Mapping[Unauthorized, Problem] = {
    Unauthorized.MISSING: MISSING_KEY,
    Unauthorized.SEVERAL: SEVERAL_KEYS,
    Unauthorized.UNKNOWN: UNKNOWN_KEY,
    Unauthorized.EXPIRED: unauthorized(f"this API key is {KeyState.EXPIRED}"),
    Unauthorized.REVOKED: unauthorized(f"this API key is {KeyState.REVOKED}"),
}
NOT_AN_ADMIN = Problem(
    status=403,
    message="this API key may not administer; 'baton keys create --administer' makes one that may",
)
NO_KEYS = Problem(
    status=403,
    message="no caller may administer, for no tenant has keys; give one a keys_file, and make a key"
    " with 'baton keys create --administer'",
)
SEVERAL_CLASSES = Problem(status=400, message="several x-slo-class headers differ, expected one")
INVALID_CLASS = Problem(
    status=400,
    message=f"x-slo-class is no name of a class, expected at most {MAX_CLASS_CHARS} letters,"
    " digits, '.', '_' and '-'",
)


def trace_context(
    headers: Iterable[tuple[bytes, bytes]], path: str, *, sample_fraction: float | None
) -> TraceContext | None:
    """The caller's context; without one a new one where traces begin here; else None.

    A share of new traces is sampled from the start, so that engines know. A context with two
    parents or an invalid parent is ignored.

    Source: W3C Trace Context 2, §4.2.
    """
    values_by_header: dict[bytes, list[str]] = {name: [] for name in _TRACE_HEADERS}
    for name, value in headers:
        if (lower := name.lower()) in _TRACE_HEADERS:
            values_by_header[lower].append(value.decode("latin-1").strip())
    operation = _OPERATIONS.get(path, "")
    if len(values_by_header[b"traceparent"]) == 1:
        context = parse_traceparent(
            values_by_header[b"traceparent"][0], ",".join(values_by_header[b"tracestate"])
        )
        if context is not None:
            return context._replace(operation=operation)
    if sample_fraction is None:
        return None
    trace_id = secrets.token_hex(16)
    return TraceContext(
        trace_id, sampled=is_in_sample(trace_id, sample_fraction), operation=operation
    )
