"""Admission: admit, queue or reject a request before any work is done.

*Theory of operation.* `decide` runs when a request arrives, and again while it is first in the
queue and resources may be free. Its inputs are predictions: TTFT if admitted now, the wait for its
turn, its TPOT once its prompt is computed, and the streams that it would break.

- *Admit* when it is first, prompts and KV pulls hardly queue in engines, and all objectives will be
  met: its own, and those of streams of its priority or above.
- *Queue* when it will still be in time after its turn. A more urgent request can overtake a prompt
  here, but not inside an engine.
- *Reject* as soon as it is predicted to be late: its prompt is then never computed.

Without objectives, a request is rejected only if it would wait in an engine's queue until its
timeout. An objective that an idle fleet could not meet either (a prompt too long for its TTFT) is
no reason to reject. Such a request runs after attainable requests of its priority, and waits no
longer than a request without objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.slo import Slo

_MAX_STREAMS_BROKEN = 0.5
"""Streams broken, as expected: from here on it is likelier than not that one is."""
_QUEUED_EXTRA_MARGIN_FRACTION = 0.1
"""Of the TTFT: after recent misses in the queue, a queued request needs this margin more than a
request that is admitted at once. More is predicted of it, so more can go wrong."""
_QUEUED_MARGIN_KEPT_FRACTION = 0.25
"""The share of the error margin that a queued request keeps; the rest is there to be used up. Found
by trying, with the above and with twice the load on fleets short of either phase. At 1, an eighth
of all rejections came late, because a prediction takes over 0.1 s to change. At 0, up to 6 % of the
prompts were computed too late."""
_QUEUE_WAIT_INFLATION = 1.25
"""Waits are taken to last this much longer than predicted: a request that is held too long learns
late that it must come back, a rejected one at once."""


class AdmissionPolicy(StrEnum):
    """Options of admission."""

    PREDICTED = "predicted"
    """By the time to first token and the pace that a request is predicted to get."""
    BOUNDED = "bounded"
    """Everyone, as long as the bounded queue has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """The objectives of admission."""

    policy: AdmissionPolicy = AdmissionPolicy.PREDICTED
    max_engine_queue_delay_s: float = 0.05
    """How much predicted prompt work may wait inside an engine, where priorities and shares do not
    count any more; the rest waits at the coordinator."""
    slo_safety_margin_fraction: float = 0.1
    """Of an objective: kept free, since predictions err; more of it where they are seen to."""

    def __post_init__(self) -> None:
        if self.max_engine_queue_delay_s < 0:
            raise ValueError(
                f"admission: max_engine_queue_delay_s is {self.max_engine_queue_delay_s},"
                " expected >= 0"
            )
        if not 0 <= self.slo_safety_margin_fraction < 1:
            raise ValueError(
                f"admission: slo_safety_margin_fraction is {self.slo_safety_margin_fraction},"
                " expected from 0 to below 1"
            )


class AdmissionReason(StrEnum):
    """Why a request was admitted, held or rejected."""

    MEETS_SLO = "meets_slo"
    """It is predicted to meet its objectives."""
    NOT_EVALUATED = "not_evaluated"
    """There are no objectives, or no predictions."""
    BEHIND_OTHERS = "behind_others"
    """Others come first."""
    ENGINE_QUEUE = "engine_queue"
    """The engine that would take it has prompts enough for now."""
    TPOT_UNATTAINABLE = "tpot_unattainable"
    """Streams would be too many by the time its prompt is computed."""
    INTERFERENCE = "interference"
    """Streams that are under way would miss their pace because of it."""
    PULL_QUEUE = "pull_queue"
    """Decode replicas have as many blocks to pull as they can for now."""
    SLO_UNATTAINABLE = "slo_unattainable"
    """It could not have its first token in time."""


class AdmissionForecast(NamedTuple):
    """The predictions for one request."""

    waited_s: float
    """Since it arrived."""
    unqueued_ttft_s: float
    """To its first token from when its prompt is begun."""
    engine_queue_s: float
    """Until its prompt is begun, in the engine, if it is admitted now."""
    current_step_s: float = 0.0
    """Of that, what no queue is: the rest of the step that the engine is in."""
    queue_wait_s: float | None = None
    """Until it is first in line; None: it is."""
    was_queued: bool = False
    """It was held before."""
    misprediction_rate: float = 0.0
    """How unreliable predictions for queued requests are, from 0 to 1: some waited too long."""
    has_idle_alternative: bool = False
    """Another replica would begin at once: the request waits where it is cheaper in all, which
    delays no other request."""
    tpot_s: float = 0.0
    """Between two of its tokens, by the time that its prompt is computed."""
    unloaded_tpot_s: float = 0.0
    """The same on an idle fleet."""
    pull_queue_s: float = 0.0
    """Until its blocks are pulled, from when its prompt is computed: others are pulled before."""
    streams_broken: float = 0.0
    """How many streams of its priority or above will miss their pace because of it."""


class Admit(NamedTuple):
    """The request is admitted."""

    reason: AdmissionReason


class Enqueue(NamedTuple):
    """It waits at the coordinator."""

    reason: AdmissionReason
    ttft_s: float
    """As predicted, from its arrival on."""
    slack_s: float
    """How long it can wait from now on."""
    reevaluate_after_s: float = 0.0
    """When to ask again, if nothing comes free before."""


class Shed(NamedTuple):
    """It is rejected."""

    reason: AdmissionReason
    ttft_s: float
    """As predicted, from its arrival on."""
    ttft_limit_s: float
    """The limit of the predicted TTFT."""
    retry_after_s: float
    """Until enough of the work ahead is done for the request to be in time."""


AdmissionDecision = Admit | Enqueue | Shed


class TtftLimit(NamedTuple):
    """When a request's first token must come."""

    limit_s: float
    """So long after its arrival, at the latest."""
    is_attainable: bool
    """Whether that is its objective, which an idle fleet would meet; or else only the timeout."""
    queued_limit_s: float
    """The same for one who was held; later, or else every small change of a prediction would send
    away those who have waited."""


def ttft_limit(
    slo: Slo,
    unqueued_ttft_s: float,
    *,
    overrun_s: float,
    options: AdmissionOptions,
    queue_timeout_s: float,
) -> TtftLimit:
    """How long after its arrival a request's first token may come.

    `overrun_s` is how much later than predicted first tokens have come, all but a few of them. This
    margin is kept free, but never more than half of the remaining time: with worse predictions,
    every request would be rejected.
    """
    if slo.ttft_s is None:
        return TtftLimit(
            queue_timeout_s + unqueued_ttft_s,
            is_attainable=True,
            queued_limit_s=queue_timeout_s + unqueued_ttft_s,
        )
    spare_s = max(0.0, slo.ttft_s - unqueued_ttft_s)
    margin_s = max(slo.ttft_s * options.slo_safety_margin_fraction, min(overrun_s, spare_s / 2))
    if margin_s > spare_s:
        return TtftLimit(
            queue_timeout_s + unqueued_ttft_s,
            is_attainable=False,
            queued_limit_s=queue_timeout_s + unqueued_ttft_s,
        )
    return TtftLimit(
        slo.ttft_s - margin_s,
        is_attainable=True,
        queued_limit_s=slo.ttft_s - _QUEUED_MARGIN_KEPT_FRACTION * margin_s,
    )


def decide(
    slo: Slo, forecast: AdmissionForecast, limit: TtftLimit, *, options: AdmissionOptions
) -> AdmissionDecision:
    """Whether a request is admitted now, waits, or is rejected."""
    limit_s = limit.queued_limit_s if forecast.was_queued else limit.limit_s
    wait_s = forecast.engine_queue_s + forecast.pull_queue_s
    if forecast.queue_wait_s is not None:
        wait_s += forecast.queue_wait_s * _QUEUE_WAIT_INFLATION
    ttft_s = forecast.waited_s + wait_s + forecast.unqueued_ttft_s
    if ttft_s > limit_s and slo.has_objectives:
        return Shed(
            reason=AdmissionReason.SLO_UNATTAINABLE,
            ttft_s=ttft_s,
            ttft_limit_s=limit_s,
            retry_after_s=ttft_s - limit_s,
        )
    decision = _admit_or_enqueue(slo, forecast, limit, ttft_s=ttft_s, options=options)
    if (
        isinstance(decision, Admit)
        or forecast.was_queued
        or slo.ttft_s is None
        or not limit.is_attainable
    ):
        return decision
    enqueue_limit_s = (
        limit_s - _QUEUED_EXTRA_MARGIN_FRACTION * forecast.misprediction_rate * slo.ttft_s
    )
    if ttft_s > enqueue_limit_s:
        return Shed(
            reason=AdmissionReason.SLO_UNATTAINABLE,
            ttft_s=ttft_s,
            ttft_limit_s=enqueue_limit_s,
            retry_after_s=ttft_s - enqueue_limit_s,
        )
    return decision


def decide_without_slo(
    ttft_s: float, *, queue_s: float, first_token_timeout_s: float
) -> Admit | Shed:
    """The same without any objective.

    A request without a first token times out `first_token_timeout_s` after its placement. Without a
    queue it is admitted, however slow an engine is.
    """
    excess_s = ttft_s - first_token_timeout_s
    if queue_s > 0.0 and excess_s > 0.0:
        return Shed(
            reason=AdmissionReason.SLO_UNATTAINABLE,
            ttft_s=ttft_s,
            ttft_limit_s=first_token_timeout_s,
            retry_after_s=excess_s,
        )
    return Admit(AdmissionReason.NOT_EVALUATED)


def _admit_or_enqueue(
    slo: Slo,
    forecast: AdmissionForecast,
    limit: TtftLimit,
    *,
    ttft_s: float,
    options: AdmissionOptions,
) -> Admit | Enqueue:
    """The decision on a request that will be in time."""
    slack_s = limit.queued_limit_s - forecast.waited_s - forecast.unqueued_ttft_s
    if forecast.queue_wait_s is not None:
        return Enqueue(AdmissionReason.BEHIND_OTHERS, ttft_s, slack_s)
    excess_s = forecast.engine_queue_s - forecast.current_step_s - options.max_engine_queue_delay_s
    if excess_s > 0 and not forecast.has_idle_alternative:
        return Enqueue(
            reason=AdmissionReason.ENGINE_QUEUE,
            ttft_s=ttft_s,
            slack_s=slack_s,
            reevaluate_after_s=excess_s,
        )
    excess_s = forecast.pull_queue_s - options.max_engine_queue_delay_s
    if excess_s > 0:
        return Enqueue(
            reason=AdmissionReason.PULL_QUEUE,
            ttft_s=ttft_s,
            slack_s=slack_s,
            reevaluate_after_s=excess_s,
        )
    if slo.tpot_s is not None and forecast.unloaded_tpot_s <= slo.tpot_s:
        # Only what others add to its pace is uncertain, so that is what the margin is of.
        margin_s = options.slo_safety_margin_fraction * (slo.tpot_s - forecast.unloaded_tpot_s)
        if forecast.tpot_s > slo.tpot_s - margin_s:
            return Enqueue(AdmissionReason.TPOT_UNATTAINABLE, ttft_s, slack_s)
    if forecast.streams_broken >= _MAX_STREAMS_BROKEN:
        return Enqueue(AdmissionReason.INTERFERENCE, ttft_s, slack_s)
    return Admit(AdmissionReason.MEETS_SLO)
