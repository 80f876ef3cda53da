"""Which session a request belongs to, in the ways that clients say it.

A session is a hint for placement: its next request goes where the last one was decoded, when that
costs hardly more. So a name that is none is passed over, and never fails a request.

vLLM's handlers read `session_id` of the body and `X-Session-ID` themselves; what they find counts
before what is found here. Fields that name a person (`user`, `safety_identifier`, Anthropic's
`metadata.user_id`) are not read: one person has many conversations at a time, and they would all be
drawn to one replica.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",  # Claude Code
    b"x-session-affinity",  # OpenCode, and several routers
    b"session_id",  # Codex
)
"""The first that has a name counts."""
SESSION_FIELD = "prompt_cache_key"
"""OpenAI's, in the bodies of all of its APIs; Codex puts the id of its conversation there."""

_FIELD = f'"{SESSION_FIELD}"'.encode()


class _BodyFields(msgspec.Struct):
    prompt_cache_key: str | None = None


_FIELDS_DECODER = msgspec.json.Decoder(_BodyFields)


def is_valid_session(name: str | None) -> bool:
    """Whether that is a name at all."""
    return name is not None and name != "" and name.isprintable()


def session_in_headers(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The session that a head names; None where it names none."""
    session_by_header: dict[bytes, str] = {}
    for name, value in headers:
        if (lower := name.lower()) in SESSION_HEADERS:
            session = value.decode("latin-1").strip()
            if is_valid_session(session):
                session_by_header.setdefault(lower, session)
    return next(
        (session_by_header[name] for name in SESSION_HEADERS if name in session_by_header), None
    )


def session_in_body(body: bytes) -> str | None:
    """The session that a complete body names; None where it names none, or is no JSON."""
    if _FIELD not in body:
        return None
    try:
        session = _FIELDS_DECODER.decode(body).prompt_cache_key
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return session if is_valid_session(session) else None
