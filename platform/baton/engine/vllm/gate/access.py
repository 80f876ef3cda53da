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
from baton.runtime.keys.api_keys import PREFIX, Known, Unknown

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

MAX_CLASS_CHARS = 64
SLO_CLASS_HEADER = b"x-slo-class"
_CREDENTIALS = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"cookie"})
_OURS = frozenset(
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
TAKEN_OFF = _CREDENTIALS | _OURS | TRACE_HEADERS
"""Headers that go no further than a gate."""
OUR_PREFIX = b"x-baton-"
"""Likewise, of whatever begins so."""
_REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_CHARS = "[A-Za-z0-9._:/=@+-]"
_REQUEST_IDS = re.compile(f"{REQUEST_ID_CHARS}+".encode())
_CLASS = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who is let in, and as whom."""

    look_up: Callable[[str], Known | Unknown] | None = None
    """Whose key that is; None where there are no keys: what a caller sends is then ignored."""
    anonymous: bool = True
    """Whether callers without a key are served, as tenant `default`."""
    isolated: Collection[str] = frozenset()
    """Tenants whose cached prefixes are their own."""
    begin_share: float | None = None
    """Of requests whose callers say no trace, which share is sampled; None: none begins one."""

    def caller(self, headers: Headers) -> Caller | Problem:
        """Who asks with these headers, or why that is refused."""
        headers = tuple(headers)
        tenant = self._tenant(headers)
        if isinstance(tenant, Problem):
            return tenant
        slo_class = _slo_class(headers)
        if isinstance(slo_class, Problem):
            return slo_class
        return Caller(tenant, slo_class, tenant if tenant in self.isolated else None)

    def administrator(self, headers: Headers) -> Known | Problem:
        """The key by which a caller may change what is served, or why it may not."""
        if self.look_up is None:
            return NO_KEYS
        tokens = _tokens(headers)
        if not tokens:
            return MISSING_KEY
        if len(tokens) > 1:
            return SEVERAL_KEYS
        found = self.look_up(tokens.pop())
        if not isinstance(found, Known):
            return _refused(found)
        return found if found.administers else NO_ADMINISTRATOR

    def _tenant(self, headers: Headers) -> str | Problem:
        if self.look_up is None:
            return DEFAULT_TENANT if self.anonymous else MISSING_KEY
        tokens = _tokens(headers)
        if self.anonymous:
            tokens = {token for token in tokens if token.startswith(PREFIX)}
            if not tokens:
                return DEFAULT_TENANT
        if not tokens:
            return MISSING_KEY
        if len(tokens) > 1:
            return SEVERAL_KEYS
        return _known(self.look_up(tokens.pop()))


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What vLLM may see of a request's headers: no credentials, and nothing that is ours to say.

    A client may name its request, so that it finds it again in logs and records. What would not be
    one short word there is no name, and the request gets one of vLLM's making.
    """
    kept = [
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in TAKEN_OFF and not lower.startswith(OUR_PREFIX)
    ]
    request_ids = [value for name, value in kept if name.lower() == _REQUEST_ID]
    if not request_ids or (len(request_ids) == 1 and _is_request_id(request_ids[0])):
        return kept
    return [(name, value) for name, value in kept if name.lower() != _REQUEST_ID]


def _is_request_id(value: bytes) -> bool:
    return len(value) <= MAX_REQUEST_ID_CHARS and _REQUEST_IDS.fullmatch(value) is not None


def _known(found: Known | Unknown) -> str | Problem:
    return found.tenant if isinstance(found, Known) else _refused(found)


def _refused(found: Unknown) -> Problem:
    return UNKNOWN_KEY if found.state is None else unauthorized(f"this API key is {found.state}")


def _tokens(headers: Headers) -> set[str]:
    found: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == b"x-api-key":
            found.add(value.decode("latin-1").strip())
        elif lower == b"authorization":
            scheme, _, token = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer":
                found.add(token.strip())
    return found - {""}


def _slo_class(headers: Headers) -> str | Problem | None:
    asked = {value.strip() for name, value in headers if name.lower() == SLO_CLASS_HEADER}
    if not asked - {b""}:
        return None
    if len(asked) > 1:
        return SEVERAL_CLASSES
    (value,) = asked
    if len(value) > MAX_CLASS_CHARS or not _CLASS.fullmatch(value):
        return NO_CLASS
    return value.decode("ascii")


def unauthorized(message: str) -> Problem:
    """Why a key does not let its caller in."""
    return Problem(
        status=401, message=message, challenge='Bearer realm="baton", error="invalid_token"'
    )


MISSING_KEY = Problem(
    status=401,
    message="wanted an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    challenge='Bearer realm="baton"',
)
SEVERAL_KEYS = unauthorized("several different API keys were sent, wanted one")
UNKNOWN_KEY = unauthorized("this API key is not known")
NO_ADMINISTRATOR = Problem(
    status=403,
    message="this API key may not administer; 'baton keys create --administer' makes one that may",
)
NO_KEYS = Problem(
    status=403,
    message="nobody may administer, for no tenant has keys; give one a keys_file, and make a key"
    " with 'baton keys create --administer'",
)
SEVERAL_CLASSES = Problem(status=400, message="several x-slo-class headers differ, wanted one")
NO_CLASS = Problem(
    status=400,
    message=f"x-slo-class is no name of a class, wanted at most {MAX_CLASS_CHARS} letters,"
    " digits, '.', '_' and '-'",
)
