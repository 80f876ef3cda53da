"""The trace that a request at the gate belongs to: its caller's, or one that begins here."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from baton.domain.names.trace_context import TraceContext, is_in_sample, parse_traceparent

TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
"""What the routes that generate are for, in the words of `gen_ai.operation.name`."""


def trace_context(
    headers: Iterable[tuple[bytes, bytes]], path: str, *, sample_fraction: float | None
) -> TraceContext | None:
    """The caller's context if it said one; a new one where traces begin here; else None.

    Of those that begin here a share is sampled from the start, so that engines know. A caller that
    says two parents says none, and what cannot be read was not said.
    Source: W3C Trace Context 2, §4.2.
    """
    values_by_header: dict[bytes, list[str]] = {name: [] for name in TRACE_HEADERS}
    for name, value in headers:
        if (lower := name.lower()) in TRACE_HEADERS:
            values_by_header[lower].append(value.decode("latin-1").strip())
    operation = OPERATIONS.get(path, "")
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
