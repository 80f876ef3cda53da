"""Whether one request met the objectives of its class; evaluated once, when it has ended.

A finished request is evaluated by its latencies. A shed, evicted or failed request was not served:
a miss, and its latencies are evaluated all the same. If the client left early, the tokens due until
then count: the first token while there was none, and then the next one at the pace of the TPOT
objective. So a client that is tired of waiting counts against the fleet, and a client that has read
enough does not. A request whose client left before anything was due has shown nothing: see
`excluded`.
"""

from __future__ import annotations

from baton.domain.commands import RequestRecord
from baton.domain.request import Phase
from baton.domain.slo import Slo, SloResult
from baton.domain.value import Value

MAX_ITL_VIOLATION_FRACTION = 0.01
"""Of the gaps between two tokens of a request: the rest of an objective for the 99th percentile."""
_NOT_SERVED = frozenset({Phase.SHED, Phase.EVICTED, Phase.FAILED})
ROUNDING_S = 1e-9
"""Rounding errors of sums of times, far below any measurement."""


class Served(Value, kw_only=False):
    """The evaluated results of one request, so that its record is written once."""

    outcome: Phase
    output_tokens: int
    arrived_at_s: float
    first_token_at_s: float | None
    last_token_at_s: float | None
    ended_at_s: float
    itl_violations: int = 0


EndedRequest = Served | RequestRecord


def evaluate_slo(ended: EndedRequest, slo: Slo) -> SloResult:
    """Compare a request's results with its objectives; a missing objective is met."""
    ttft_or_wait_s = ttft_s(ended)
    if ttft_or_wait_s is None:
        ttft_or_wait_s = ended.ended_at_s - ended.arrived_at_s
    return SloResult(
        was_served=ended.outcome not in _NOT_SERVED,
        ttft_met=_is_within(ttft_or_wait_s, slo.ttft_s),
        tpot_met=slo.tpot_s is None or _is_tpot_met(ended, slo.tpot_s),
        itl_met=slo.itl_p99_s is None or _is_itl_met(ended),
    )


def excluded(ended: EndedRequest, result: SloResult) -> bool:
    """Whether a request counts neither for nor against: its client left, owed and given nothing."""
    return ended.outcome is Phase.CANCELLED and not ended.output_tokens and result.is_good


def ttft_s(ended: EndedRequest) -> float | None:
    """From arrival to the first token; None when there was none."""
    first_at_s = ended.first_token_at_s
    return None if first_at_s is None else first_at_s - ended.arrived_at_s


def tpot_s(ended: EndedRequest) -> float | None:
    """(last token - first token) / (output tokens - 1), pauses and all; None below two tokens.

    Source: vLLM's benchmark_serving.
    """
    first_at_s, last_at_s = ended.first_token_at_s, ended.last_token_at_s
    if first_at_s is None or last_at_s is None or ended.output_tokens <= 1:
        return None
    return (last_at_s - first_at_s) / (ended.output_tokens - 1)


def _is_tpot_met(ended: EndedRequest, objective_s: float) -> bool:
    """Whether tokens came at the pace of the objective, and none was overdue.

    With an objective of 50 ms, a client that has 3 tokens and leaves 200 ms after the first one was
    owed a fourth after 150 ms.
    """
    measured_s = tpot_s(ended)
    if measured_s is not None and not _is_within(measured_s, objective_s):
        return False
    if ended.outcome is Phase.FINISHED or ended.first_token_at_s is None:
        return True
    return _is_within(ended.ended_at_s - ended.first_token_at_s, ended.output_tokens * objective_s)


def _is_itl_met(ended: EndedRequest) -> bool:
    return ended.itl_violations <= MAX_ITL_VIOLATION_FRACTION * max(0, ended.output_tokens - 1)


def _is_within(measured_s: float, bound_s: float | None) -> bool:
    return bound_s is None or measured_s <= bound_s + ROUNDING_S
