"""Who a caller is, by the key that it shows; and what of its headers goes on to vLLM.

A key comes as `Authorization: Bearer` (OpenAI's clients) or as `x-api-key` (Anthropic's), on every
route. It goes no further than this: vLLM's handlers never see it.

Where callers without a key are served, too, so are those whose key does not even look like one of
ours, because clients that must send a key send any word. One that looks like ours and is not good
is refused even there: whoever sends it takes itself for somebody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from baton.domain.tenant import DEFAULT_TENANT
from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.traces import TRACE_HEADERS
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.keys.api_keys import KEY_PREFIX, InvalidKey, ValidKey

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
        # vLLM's, for whoever runs its engines: here that is us.
        b"x-data-parallel-rank",
        b"x-vllm-priority",
    }
)
STRIPPED_HEADERS = _CREDENTIALS | _BATON_HEADERS | TRACE_HEADERS
"""Headers that go no further than a gate."""
BATON_HEADER_PREFIX = b"x-baton-"
"""Likewise, of whatever begins so."""
_REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_CHARS = "[A-Za-z0-9._:/=@+-]"
_REQUEST_IDS = re.compile(f"{REQUEST_ID_CHARS}+".encode())
_CLASS = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who is let in, and as whom."""

    look_up: Callable[[str], ValidKey | InvalidKey] | None = None
    """Whose key that is; None where there are no keys: what a caller sends is then ignored."""
    anonymous: bool = True
    """Whether callers without a key are served, as tenant `default`."""
    isolated: Collection[str] = frozenset()
    """Tenants whose cached prefixes are their own."""
    trace_sample_fraction: float | None = None
    """Of requests whose callers say no trace, which share is sampled; None: none begins one."""

    def identify_caller(self, headers: Headers) -> Caller | Problem:
        """Who asks with these headers, or why that is refused."""
        headers = tuple(headers)
        tenant = self._tenant(headers)
        if isinstance(tenant, Problem):
            return tenant
        slo_class = _slo_class(headers)
        if isinstance(slo_class, Problem):
            return slo_class
        return Caller(tenant, slo_class, tenant if tenant in self.isolated else None)

    def identify_administrator(self, headers: Headers) -> ValidKey | Problem:
        """The key by which a caller may change what is served, or why it may not."""
        if self.look_up is None:
            return NO_KEYS
        tokens = _tokens(headers)
        if not tokens:
            return MISSING_KEY
        if len(tokens) > 1:
            return SEVERAL_KEYS
        key = self.look_up(tokens.pop())
        if not isinstance(key, ValidKey):
            return _key_problem(key)
        return key if key.is_admin else NOT_AN_ADMIN

    def _tenant(self, headers: Headers) -> str | Problem:
        if self.look_up is None:
            return DEFAULT_TENANT if self.anonymous else MISSING_KEY
        tokens = _tokens(headers)
        if self.anonymous:
            tokens = {token for token in tokens if token.startswith(KEY_PREFIX)}
            if not tokens:
                return DEFAULT_TENANT
        if not tokens:
            return MISSING_KEY
        if len(tokens) > 1:
            return SEVERAL_KEYS
        return _tenant_or_problem(self.look_up(tokens.pop()))


def forwarded_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What vLLM may see of a request's headers: no credentials, and nothing that is ours to say.

    A client may name its request, so that it finds it again in logs and records. What would not be
    one short word there is no name, and the request gets one of vLLM's making.
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


def _tenant_or_problem(key: ValidKey | InvalidKey) -> str | Problem:
    return key.tenant if isinstance(key, ValidKey) else _key_problem(key)


def _key_problem(key: InvalidKey) -> Problem:
    return UNKNOWN_KEY if key.state is None else unauthorized(f"this API key is {key.state}")


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
    """Why a key does not let its caller in."""
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
NOT_AN_ADMIN = Problem(
    status=403,
    message="this API key may not administer; 'baton keys create --administer' makes one that may",
)
NO_KEYS = Problem(
    status=403,
    message="nobody may administer, for no tenant has keys; give one a keys_file, and make a key"
    " with 'baton keys create --administer'",
)
SEVERAL_CLASSES = Problem(status=400, message="several x-slo-class headers differ, expected one")
INVALID_CLASS = Problem(
    status=400,
    message=f"x-slo-class is no name of a class, expected at most {MAX_CLASS_CHARS} letters,"
    " digits, '.', '_' and '-'",
)
