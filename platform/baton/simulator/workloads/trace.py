"""A trace: requests in order of arrival, each with its lengths and what its prompt shares."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from baton.domain.hashed_prompt import HashedPrompt
from baton.domain.request import Request
from baton.domain.tenant import DEFAULT_TENANT


class TraceRequest(NamedTuple):
    """One request of a trace. A NamedTuple: there may be millions."""

    at_s: float
    """Since the trace began."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Of the prompt's blocks, the last perhaps partly filled, and perhaps of the output's behind
    them; equal ids mean equal text. Without any, the prompt shares nothing with any other."""
    session_id: str | None = None
    slo_class: str | None = None
    """What it is, and the class it asks for where that is one; see `to_request`."""
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 512
    """Tokens of one block that `block_ids` name."""
    skipped_lines: int = 0
    """Bad ones that were left out when the trace was read."""
    reordered_lines: int = 0
    """That stood in the file behind one that arrived later; they were sorted in, stably."""

    def __post_init__(self) -> None:
        arrivals = [request.at_s for request in self.requests]
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError(f"trace {self.name!r}: requests are not in order of arrival")

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def rate_per_s(self) -> float:
        """Requests per second over the span; 0 when there is no span."""
        return (len(self.requests) - 1) / self.span_s if self.span_s else 0.0

    def to_requests(
        self,
        *,
        declared_tokens: int = 1024,
        start_s: float = 0.0,
        classes: Container[str] = (),
    ) -> Iterator[Request]:
        """The requests as clients send them, one at a time; see `to_request`."""
        for number, request in enumerate(self.requests):
            yield to_request(
                request,
                number,
                block_tokens=self.block_tokens,
                declared_tokens=declared_tokens,
                start_s=start_s,
                classes=classes,
            )


def to_request(
    trace_request: TraceRequest,
    index: int,
    *,
    block_tokens: int,
    declared_tokens: int = 1024,
    start_s: float = 0.0,
    classes: Container[str] = (),
) -> Request:
    """A request of a trace as a client sends it; it asks for its class if that is among `classes`.

    Traces also name kinds of requests that are no classes of the deployment that serves them.

    How much it will generate is in the payload, which only the engine reads: as in life, nobody
    else knows before it has ended. `max_tokens` is `declared_tokens`, or what is needed if more.
    """
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=HashedPrompt(
            trace_request.block_ids,
            trace_request.prompt_tokens,
            block_tokens=block_tokens,
            tail_id=index + 1,
        ),
        max_tokens=max(trace_request.output_tokens, declared_tokens),
        arrived_at_s=start_s + trace_request.at_s,
        session_id=trace_request.session_id,
        tenant=trace_request.tenant,
        slo_class=trace_request.slo_class if trace_request.slo_class in classes else None,
        payload=encode_output_tokens(trace_request.output_tokens),
    )


def encode_output_tokens(output_tokens: int) -> bytes:
    """How a request tells a counted engine how many tokens it will generate in all."""
    return b"%d" % output_tokens


def decode_output_tokens(payload: bytes) -> int | None:
    """What `encode_output_tokens` was given; None for a payload that does not say."""
    return int(payload) if payload.isdigit() else None
