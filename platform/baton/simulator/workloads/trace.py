"""A trace: requests in order of arrival, with their lengths and shared blocks."""

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
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Blocks of the prompt, the last maybe partly filled, and maybe of the output behind them.
    Equal ids mean equal text; without ids, the prompt shares nothing."""
    session_id: str | None = None
    slo_class: str | None = None
    """The kind of request, and the class it asks for if there is one; see `to_request`."""
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 512
    """Tokens of a block in `block_ids`."""
    is_paced: bool = False
    """Whether its arrivals were made at a rate that was asked for: the file has none."""
    times: str = ""
    """How the file's arrival times were read, and why; empty where it says their unit."""
    skipped_lines: int = 0
    """Invalid lines of the file that were skipped."""
    reordered_lines: int = 0
    """Lines of the file behind a line that arrived later; sorted in, stably."""

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
        """Requests per second over the span; 0 without a span."""
        return (len(self.requests) - 1) / self.span_s if self.span_s else 0.0

    def to_requests(
        self,
        *,
        declared_tokens: int = 1024,
        start_s: float = 0.0,
        classes: Container[str] = (),
    ) -> Iterator[Request]:
        """The requests as clients send them, lazily; see `to_request`."""
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

    Traces may also name kinds that are no classes of the deployment. The payload has the output
    length, which only the engine reads: nothing else may know it. `max_tokens` is
    `declared_tokens`, or the output length if that is more.
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
    """Payload that tells a counted engine the total number of output tokens."""
    return b"%d" % output_tokens


def decode_output_tokens(payload: bytes) -> int | None:
    """Inverse of `encode_output_tokens`; None for any other payload."""
    return int(payload) if payload.isdigit() else None
