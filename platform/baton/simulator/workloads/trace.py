"""A trace: requests in order of arrival, each with its lengths and what its prompt shares."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from baton.domain.hashed_prompt import Outline
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
    """What it is, and the class it asks for where that is one; see `as_request`."""
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
        arrivals = [one.at_s for one in self.requests]
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

    def asked(
        self,
        *,
        declared_tokens: int = 1024,
        start_s: float = 0.0,
        classes: Container[str] = (),
    ) -> Iterator[Request]:
        """The requests as clients send them, one at a time; see `as_request`."""
        for number, one in enumerate(self.requests):
            yield as_request(
                one,
                number,
                block_tokens=self.block_tokens,
                declared_tokens=declared_tokens,
                start_s=start_s,
                classes=classes,
            )


def as_request(
    one: TraceRequest,
    number: int,
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
        request_id=f"r{number}",
        prompt_token_ids=Outline(
            one.block_ids, one.prompt_tokens, block_tokens=block_tokens, own=number + 1
        ),
        max_tokens=max(one.output_tokens, declared_tokens),
        arrived_at_s=start_s + one.at_s,
        session_id=one.session_id,
        tenant=one.tenant,
        slo_class=one.slo_class if one.slo_class in classes else None,
        payload=output_payload(one.output_tokens),
    )


def output_payload(output_tokens: int) -> bytes:
    """How a request tells a counted engine how many tokens it will generate in all."""
    return b"%d" % output_tokens


def output_of(payload: bytes) -> int | None:
    """What `output_payload` was given; None for a payload that does not say."""
    return int(payload) if payload.isdigit() else None
