"""Whether one request got what its class is promised; said once, when it has ended.

Who finished is judged by the latencies. Who was shed, evicted or failed was not served: a miss, and
its latencies are judged all the same. Who left early is judged by what was due when the client
left: the first token while there was none, and then the next one at the pace that is promised. So
a client that is tired of waiting counts against the fleet, and one that has read enough does not.
One that left before anything was due and got nothing has shown nothing: see `excused`.
"""

from __future__ import annotations

from baton.domain.commands import RequestRecord
from baton.domain.request import Phase
from baton.domain.slo import Judgement, Slo
from baton.domain.value import Value

SLOW_GAPS_ALLOWED = 0.01
"""Of the gaps between two tokens of a request: what a promise for the 99th percentile leaves."""
_REFUSED = frozenset({Phase.SHED, Phase.EVICTED, Phase.FAILED})
ROUNDING_S = 1e-9
"""Sums of times miss a bound by so much that nobody could measure."""


class Got(Value, kw_only=False):
    """What one request got, as far as it is judged by it: so that its record is written once."""

    outcome: Phase
    output_tokens: int
    arrived_at_s: float
    first_token_at_s: float | None
    last_token_at_s: float | None
    ended_at_s: float
    slow_gaps: int = 0


Ended = Got | RequestRecord


def judge(ended: Ended, slo: Slo) -> Judgement:
    """Compare what a request got with what it was promised; what is not promised is met."""
    return Judgement(
        served=ended.outcome not in _REFUSED,
        ttft_met=_within(_ttft_due_s(ended), slo.ttft_s),
        tpot_met=slo.tpot_s is None or _pace_met(ended, slo.tpot_s),
        itl_met=slo.itl_p99_s is None or _gaps_met(ended),
    )


def excused(ended: Ended, judgement: Judgement) -> bool:
    """Whether a request counts neither for nor against: its client left, owed and given nothing."""
    return ended.outcome is Phase.CANCELLED and not ended.output_tokens and judgement.good


def ttft_s(ended: Ended) -> float | None:
    """From arrival to the first token; None when there was none."""
    first_at_s = ended.first_token_at_s
    return None if first_at_s is None else first_at_s - ended.arrived_at_s


def tpot_s(ended: Ended) -> float | None:
    """(last token - first token) / (output tokens - 1), pauses and all; None below two tokens.

    Source: vLLM's benchmark_serving.
    """
    first_at_s, last_at_s = ended.first_token_at_s, ended.last_token_at_s
    if first_at_s is None or last_at_s is None or ended.output_tokens <= 1:
        return None
    return (last_at_s - first_at_s) / (ended.output_tokens - 1)


def _ttft_due_s(ended: Ended) -> float:
    """The time to first token; without one, how long it was waited for."""
    took_s = ttft_s(ended)
    return ended.ended_at_s - ended.arrived_at_s if took_s is None else took_s


def _pace_met(ended: Ended, tpot: float) -> bool:
    """Whether tokens came as promised, and none was due that never came.

    With a promise of 50 ms, a client that has 3 tokens and leaves 200 ms after the first one was
    owed a fourth after 150 ms.
    """
    pace_s = tpot_s(ended)
    if pace_s is not None and not _within(pace_s, tpot):
        return False
    if ended.outcome is Phase.FINISHED or ended.first_token_at_s is None:
        return True
    return _within(ended.ended_at_s - ended.first_token_at_s, ended.output_tokens * tpot)


def _gaps_met(ended: Ended) -> bool:
    return ended.slow_gaps <= SLOW_GAPS_ALLOWED * max(0, ended.output_tokens - 1)


def _within(took_s: float, bound_s: float | None) -> bool:
    return bound_s is None or took_s <= bound_s + ROUNDING_S
