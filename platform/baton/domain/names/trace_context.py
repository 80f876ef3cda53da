"""A place in a distributed trace, as W3C's `traceparent` and `tracestate` headers say it.

Source: https://www.w3.org/TR/trace-context-2/ (§3.2 traceparent, §3.3 tracestate).
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple

MAX_STATE_CHARS = 512
"""Longer states need not be passed on (§3.3.1.5)."""
_TRACE_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]*")
_SAMPLED = 0x01
_SPAN_BYTES = 8
_RATIO_DIGITS = 14
"""Of a trace id, those whose value is compared with a share: its last 56 bits."""
_RATIO_VALUES = 1 << 56


class TraceContext(NamedTuple):
    """The trace that a request belongs to, and under which span of its caller's."""

    trace_id: str
    """32 hex digits."""
    parent_id: str = ""
    """16 hex digits: the caller's span; empty when the trace begins here."""
    sampled: bool = False
    """Whether the caller keeps its part of the trace."""
    state: str = ""
    """Other vendors' state of the trace; passed on as it is."""
    operation: str = ""
    """The operation, in the words of OpenTelemetry's `gen_ai.operation.name`."""


def parse_traceparent(parent: str, state: str = "") -> TraceContext | None:
    """The context that headers say; None when they say none that can be trusted.

    A version after 00 may say more behind what is known; 00 may not. All zeros are no id.
    """
    match = _TRACE_PARENT.fullmatch(parent.strip())
    if match is None:
        return None
    version, trace_id, parent_id, flags, extra = match.groups()
    if version == "ff" or (version == "00" and extra is not None):
        return None
    if not (int(trace_id, 16) and int(parent_id, 16)):
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    is_valid_state = len(state) <= MAX_STATE_CHARS and _STATE.fullmatch(state)
    return TraceContext(
        trace_id=trace_id,
        parent_id=parent_id,
        sampled=sampled,
        state=state.strip() if is_valid_state else "",
    )


def trace_headers(context: TraceContext, span_id: str) -> dict[str, str]:
    """The headers for a callee of span `span_id` of that trace."""
    flags = "01" if context.sampled else "00"
    headers = {"traceparent": f"00-{context.trace_id}-{span_id}-{flags}"}
    if context.state:
        headers["tracestate"] = context.state
    return headers


def span_id(trace_id: str, name: str) -> str:
    """The id of a trace's span by name: the same wherever, and whenever, it is computed.

    So a callee can get the id of its parent span before that span is written down.
    """
    digest = blake2b(f"{trace_id}/{name}".encode(), digest_size=_SPAN_BYTES).hexdigest()
    return digest if int(digest, 16) else digest[:-1] + "1"


def is_in_sample(trace_id: str, sample_fraction: float) -> bool:
    """Whether a trace is among that share (0-1) of all; every service decides alike.

    Source: OpenTelemetry specification, trace SDK, TraceIdRatioBased (the last 56 bits, as W3C's
    random trace ids have them).
    """
    return int(trace_id[-_RATIO_DIGITS:], 16) < sample_fraction * _RATIO_VALUES
