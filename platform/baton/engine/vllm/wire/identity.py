"""Who asks, and in which trace, on the way from the gate through vLLM's handlers to the seam.

vLLM passes trace headers to an engine only where tracing is on, and copies sampling parameters to
every child of a request with several answers. So both ride on the parameters' `extra_args`, under
names of ours that a client cannot set: what stands there is replaced before a request goes on, and
taken off again at the seam.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from baton.domain.names.trace_context import TraceContext
from baton.domain.tenant import DEFAULT_TENANT
from baton.engine.vllm.wire.sessions import is_valid_session

CALLER_ARG = "baton_caller"
TRACE_ARG = "baton_trace"
IDENTITY_ARGS = frozenset({CALLER_ARG, TRACE_ARG})
MAX_SESSION_CHARS = 128
MAX_SALT_CHARS = 256
"""Clients may choose salts of any length; the fleet link and the books carry short ones."""
_RESERVED_PREFIX = "baton:"


class Caller(NamedTuple):
    """Who asks, and for which class of service."""

    tenant: str = DEFAULT_TENANT
    slo_class: str | None = None
    cache_scope: str | None = None
    """Among whose prefixes its prompts may be found; None: among those of all who share."""


ANONYMOUS = Caller()


def tenant_session_id(caller: Caller, *session_ids: str | None) -> str | None:
    """A client's session as it is known to all others: its own, whatever another tenant calls its.

    The first that is a name counts. Placement remembers sessions by the ten thousand, so a long
    name is kept as its digest.
    """
    session_id = next(filter(is_valid_session, session_ids), None)
    if session_id is None:
        return None
    if len(session_id) > MAX_SESSION_CHARS:
        digest = sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()
        session_id = f"sha256:{digest}"
    return f"{caller.tenant}/{session_id}"  # a tenant's name has no slash


def with_caller(
    extra_args: Mapping[str, object] | None, caller: Caller, trace: TraceContext | None = None
) -> dict[str, object] | None:
    """Extra arguments that say who asks, whatever they said of it before; None for nothing."""
    arguments = {
        name: value for name, value in (extra_args or {}).items() if name not in IDENTITY_ARGS
    }
    if caller != ANONYMOUS:
        arguments[CALLER_ARG] = list(caller)
    if trace is not None:
        arguments[TRACE_ARG] = list(trace)
    return arguments or None


def caller_of(extra_args: Mapping[str, object] | None) -> Caller:
    """Who asks, as `with_caller` wrote it down."""
    match (extra_args or {}).get(CALLER_ARG):
        case [str() as tenant, str() | None as slo_class, str() | None as cache_scope]:
            return Caller(tenant, slo_class, cache_scope)
        case _:
            return ANONYMOUS


def trace_of(extra_args: Mapping[str, object] | None) -> TraceContext | None:
    """The trace that it belongs to, as `with_caller` wrote it down."""
    match (extra_args or {}).get(TRACE_ARG):
        case [
            str() as trace_id,
            str() as parent_id,
            bool() as sampled,
            str() as state,
            str() as op,
        ]:
            return TraceContext(trace_id, parent_id, sampled, state, op)
        case _:
            return None


def scoped_salt(cache_scope: str | None, cache_salt: str | None) -> str | None:
    """The salt under which an engine computes a prompt. No two different arguments give the same.

    A prompt finds only prefixes that were computed under the same salt. A tenant whose cache is its
    own gets salts that no other caller can write: they begin with a word that is put in front of
    whatever another client sends beginning with it. Inside, a client's own salt still tells prompts
    apart.

    `cache_scope` is a tenant's name, which has no colon, or None for all who share.
    """
    if cache_scope is None:
        if cache_salt is None or not cache_salt.startswith(_RESERVED_PREFIX):
            return cache_salt
        return f"{_RESERVED_PREFIX}shared:{cache_salt}"
    if cache_salt is None:
        return f"{_RESERVED_PREFIX}tenant:{cache_scope}"
    return f"{_RESERVED_PREFIX}tenant:{cache_scope}:{cache_salt}"


def salt_name(cache_salt: str | None) -> str | None:
    """The name of a salt: itself, or a digest of one that is longer than `MAX_SALT_CHARS`.

    The engine hashes the salt as the client sent it, so two salts of one name, should anybody make
    them, share an entry in an index and never a block.
    """
    if cache_salt is None or len(cache_salt) <= MAX_SALT_CHARS:
        return cache_salt
    return f"sha256:{sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"
