"""Caller and trace of a request, on the way from the gate through vLLM's handlers.

vLLM passes trace headers to an engine only where tracing is on, and copies sampling parameters to
every child of a request with several answers. So both travel in the parameters' `extra_args`.
Clients cannot set their names: the gate replaces the values, and the codec removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import NamedTuple

import msgspec

from baton.domain.names.trace_context import TraceContext
from baton.domain.tenant import DEFAULT_TENANT

CALLER_ARG = "baton_caller"
TRACE_ARG = "baton_trace"
IDENTITY_ARGS = frozenset({CALLER_ARG, TRACE_ARG})
MAX_SESSION_CHARS = 128
MAX_SALT_CHARS = 256
"""Clients may send salts of any length; the fleet link and the index carry short names."""
_RESERVED_PREFIX = "baton:"
SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",  # Claude Code
    b"x-session-affinity",  # OpenCode, and several routers
    b"session_id",  # Codex
)
"""In order of precedence."""
SESSION_FIELD = "prompt_cache_key"
"""OpenAI's field, in all of its APIs; Codex puts the id of its conversation there."""
_FIELD = f'"{SESSION_FIELD}"'.encode()


class _BodyFields(msgspec.Struct):
    prompt_cache_key: str | None = None


class Caller(NamedTuple):
    """The tenant, the requested class and the cache scope of a request."""

    tenant: str = DEFAULT_TENANT
    slo_class: str | None = None
    cache_scope: str | None = None
    """The tenant whose prefixes its prompts may hit; None: prefixes of all tenants that share."""


ANONYMOUS = Caller()


def tenant_session_id(caller: Caller, *session_ids: str | None) -> str | None:
    """The fleet-wide name of a client's session, distinct from equal names of other tenants.

    The first valid name counts. A long one becomes its digest, because placement keeps ten
    thousands.
    """
    session_id = next(filter(_is_valid_session, session_ids), None)
    if session_id is None:
        return None
    if len(session_id) > MAX_SESSION_CHARS:
        digest = sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()
        session_id = f"sha256:{digest}"
    return f"{caller.tenant}/{session_id}"  # a tenant's name has no slash


def with_caller(
    extra_args: Mapping[str, object] | None, caller: Caller, trace: TraceContext | None = None
) -> dict[str, object] | None:
    """Extra arguments with the caller and trace instead of any that they had; None for none."""
    arguments = {
        name: value for name, value in (extra_args or {}).items() if name not in IDENTITY_ARGS
    }
    if caller != ANONYMOUS:
        arguments[CALLER_ARG] = list(caller)
    if trace is not None:
        arguments[TRACE_ARG] = list(trace)
    return arguments or None


def caller_of(extra_args: Mapping[str, object] | None) -> Caller:
    """The caller that `with_caller` wrote."""
    match (extra_args or {}).get(CALLER_ARG):
        case [str() as tenant, str() | None as slo_class, str() | None as cache_scope]:
            return Caller(tenant, slo_class, cache_scope)
        case _:
            return ANONYMOUS


def trace_of(extra_args: Mapping[str, object] | None) -> TraceContext | None:
    """The trace that `with_caller` wrote."""
    match (extra_args or {}).get(TRACE_ARG):
        case [
            str() as trace_id,
            str() as parent_id,
            bool() as sampled,
            str() as state,
            str() as op,
        ]:
            return TraceContext(
                trace_id=trace_id, parent_id=parent_id, sampled=sampled, state=state, operation=op
            )
        case _:
            return None


def scoped_salt(cache_scope: str | None, cache_salt: str | None) -> str | None:
    """The salt under which an engine computes a prompt. Different arguments give different salts.

    A prompt hits only prefixes with the same salt. An isolated tenant gets salts with a reserved
    prefix; another client's salt that begins with this prefix is rewritten. A client's own salt
    still separates prompts within a tenant.

    `cache_scope` is a tenant's name, which has no colon, or None for all tenants that share.
    """
    if cache_scope is None:
        if cache_salt is None or not cache_salt.startswith(_RESERVED_PREFIX):
            return cache_salt
        return f"{_RESERVED_PREFIX}shared:{cache_salt}"
    if cache_salt is None:
        return f"{_RESERVED_PREFIX}tenant:{cache_scope}"
    return f"{_RESERVED_PREFIX}tenant:{cache_scope}:{cache_salt}"


def salt_name(cache_salt: str | None) -> str | None:
    """The name of a salt: itself, or its digest if it is longer than `MAX_SALT_CHARS`.

    The engine hashes the salt as sent, so two salts with one name share an index entry, never a
    block.
    """
    if cache_salt is None or len(cache_salt) <= MAX_SALT_CHARS:
        return cache_salt
    return f"sha256:{sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"


_FIELDS_DECODER = msgspec.json.Decoder(_BodyFields)


def _is_valid_session(name: str | None) -> bool:
    """Whether a name is present and printable."""
    return name is not None and name != "" and name.isprintable()


def session_in_headers(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The session that headers name, or None.

    A session is a hint for placement, so an invalid name is ignored and fails no request. vLLM's
    handlers read `session_id` of the body and `X-Session-ID` themselves; those take precedence.
    Fields that name a person (`user`, `safety_identifier`, Anthropic's `metadata.user_id`) are not
    read: a person has many conversations at a time, and placement would send all of them to one
    replica.
    """
    session_by_header: dict[bytes, str] = {}
    for name, value in headers:
        if (lower := name.lower()) in SESSION_HEADERS:
            session = value.decode("latin-1").strip()
            if _is_valid_session(session):
                session_by_header.setdefault(lower, session)
    return next(
        (session_by_header[name] for name in SESSION_HEADERS if name in session_by_header), None
    )


def session_in_body(body: bytes) -> str | None:
    """The session that a complete body names; None without one, or without valid JSON."""
    if _FIELD not in body:
        return None
    try:
        session = _FIELDS_DECODER.decode(body).prompt_cache_key
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return session if _is_valid_session(session) else None
