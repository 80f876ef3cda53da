"""Admission: let a request through, hold it for a moment, or say no before any work is done.

*Theory of operation.* `decide` is asked when a request arrives, and again whenever it is first in
line and something may have come free. It is told what is predicted: how long until the first token
if the request is let in now, how long it would wait for its turn, at what pace it would get its
tokens by the time that its prompt is computed, and how many streams it would break. Then

- it is *admitted* when it is first in line, the engine has hardly a queue, and both objectives will
  be met, its own and those of streams of its priority or above;
- *held* when it will still be in time after its turn has come: a prompt that waits here can be
  overtaken by who is more urgent, one that waits inside an engine cannot;
- *shed* as soon as it is predicted to be late: its prompt is then never computed, and the client
  knows within milliseconds when to come back.

Where nothing is promised to anybody, only those are turned away who would wait in an engine's
queue for so long that they would be given up there, to be the last in another line.

An objective that a request could not meet on an idle fleet either (a prompt too long for its TTFT)
is no reason to refuse it: it is served when there is room, after those of its priority that can be
met, and waits no longer than one to whom nothing is promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.slo import Slo

_MAX_STREAMS_BROKEN = 0.5
"""Streams broken, as expected: from here on it is likelier than not that one is."""
_QUEUED_EXTRA_MARGIN_FRACTION = 0.1
"""Of the TTFT: where some were held in vain of late, who is to be held must be predicted to be so
much earlier, at most, than who is let in at once. More is predicted of it, so more can go wrong."""
_QUEUED_MARGIN_KEPT_FRACTION = 0.25
"""Of what is kept free for errors, what is still kept free for one who was held: the rest is there
to be used up. Found by trying, with the above and with twice the load on fleets short of either
phase: at 1, an eighth of all refusals came late, after the tenth of a second and more that it takes
a prediction to change its mind; at 0, up to 6 % of the prompts were computed in vain."""
_QUEUE_WAIT_INFLATION = 1.25
"""Turns are taken to last so much longer than predicted: who is held in vain learns late that it
must come back, and who is turned away learns at once."""


class AdmissionPolicy(StrEnum):
    """How it is decided who is let in."""

    PREDICTED = "predicted"
    """By the time to first token and the pace that a request is predicted to get."""
    BOUNDED = "bounded"
    """Everyone, as long as the bounded queue has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """What admission aims at."""

    policy: AdmissionPolicy = AdmissionPolicy.PREDICTED
    max_engine_queue_delay_s: float = 0.05
    """How much predicted prompt work may wait inside an engine, where nobody's priority or share
    counts any more; what is beyond waits at the coordinator."""
    slo_safety_margin_fraction: float = 0.1
    """Of an objective: kept free, since predictions err; more of it where they are seen to."""

    def __post_init__(self) -> None:
        if self.max_engine_queue_delay_s < 0:
            raise ValueError(
                f"admission: engine_queue_s is {self.max_engine_queue_delay_s}, expected >= 0"
            )
        if not 0 <= self.slo_safety_margin_fraction < 1:
            raise ValueError(
                f"admission: margin_fraction is {self.slo_safety_margin_fraction}, expected from"
                " 0 to below 1"
            )


class AdmissionReason(StrEnum):
    """Why a request was let in, held or turned away."""

    MEETS_SLO = "in_time"
    """It is predicted to get what it is promised."""
    NOT_EVALUATED = "not_judged"
    """Nothing is promised to anybody, or nothing can be predicted."""
    BEHIND_OTHERS = "turn"
    """Others come first."""
    ENGINE_QUEUE = "engine_queue"
    """The engine that would take it has prompts enough for now."""
    TPOT_UNATTAINABLE = "pace"
    """Streams would be too many by the time its prompt is computed."""
    INTERFERENCE = "breaks"
    """Streams that are under way would miss their pace because of it."""
    SLO_UNATTAINABLE = "too_late"
    """It could not have its first token in time."""


class AdmissionForecast(NamedTuple):
    """What is predicted for one request."""

    waited_s: float
    """Since it arrived."""
    unqueued_ttft_s: float
    """To its first token from when its prompt is begun."""
    engine_queue_s: float
    """Until its prompt is begun, in the engine, if it is let in now."""
    current_step_s: float = 0.0
    """Of that, what no queue is: the rest of the step that the engine is in."""
    queue_wait_s: float | None = None
    """Until it is first in line; None: it is."""
    was_queued: bool = False
    """It was held before."""
    misprediction_rate: float = 0.0
    """How much predictions for those who wait are doubted, from 0 to 1: some waited in vain."""
    has_idle_alternative: bool = False
    """Another replica would begin at once: it is to wait where it is cheaper in all, which holds
    nobody else up."""
    tpot_s: float = 0.0
    """Between two of its tokens, by the time that its prompt is computed."""
    unloaded_tpot_s: float = 0.0
    """The same on an idle fleet."""
    streams_broken: float = 0.0
    """How many streams of its priority or above will miss their pace because of it."""


class Admit(NamedTuple):
    """It is let in."""

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
    """It is turned away."""

    reason: AdmissionReason
    ttft_s: float
    """As predicted, from its arrival on."""
    ttft_limit_s: float
    """What it should have been."""
    retry_after_s: float
    """Until what is ahead of it will have become so much less that it would be in time."""


AdmissionDecision = Admit | Enqueue | Shed


class TtftLimit(NamedTuple):
    """When a request's first token must come."""

    limit_s: float
    """So long after its arrival, at the latest."""
    is_attainable: bool
    """Whether that is its objective, which an idle fleet would meet; or else mere patience."""
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

    `overrun_s` is how much later than predicted first tokens have come, all but a few of them. As
    much is kept free, but never more than half of what the request leaves: where predictions are
    that bad, nobody would be let in.
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
    """Whether a request is let in now, waits, or is turned away."""
    limit_s = limit.queued_limit_s if forecast.was_queued else limit.limit_s
    wait_s = forecast.engine_queue_s
    if forecast.queue_wait_s is not None:
        wait_s += forecast.queue_wait_s * _QUEUE_WAIT_INFLATION
    ttft_s = forecast.waited_s + wait_s + forecast.unqueued_ttft_s
    if ttft_s > limit_s and slo.has_objectives:
        return Shed(AdmissionReason.SLO_UNATTAINABLE, ttft_s, limit_s, ttft_s - limit_s)
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
            AdmissionReason.SLO_UNATTAINABLE, ttft_s, enqueue_limit_s, ttft_s - enqueue_limit_s
        )
    return decision


def decide_without_slo(
    ttft_s: float, *, queue_s: float, first_token_timeout_s: float
) -> Admit | Shed:
    """The same where nothing is promised to anybody.

    `first_token_timeout_s` after it was placed a request is given up that has no first token. Who
    finds no queue is let in, however slow an engine is.
    """
    excess_s = ttft_s - first_token_timeout_s
    if queue_s > 0.0 and excess_s > 0.0:
        return Shed(AdmissionReason.SLO_UNATTAINABLE, ttft_s, first_token_timeout_s, excess_s)
    return Admit(AdmissionReason.NOT_EVALUATED)


def _admit_or_enqueue(
    slo: Slo,
    forecast: AdmissionForecast,
    limit: TtftLimit,
    *,
    ttft_s: float,
    options: AdmissionOptions,
) -> Admit | Enqueue:
    """The verdict on one who will be in time."""
    slack_s = limit.queued_limit_s - forecast.waited_s - forecast.unqueued_ttft_s
    if forecast.queue_wait_s is not None:
        return Enqueue(AdmissionReason.BEHIND_OTHERS, ttft_s, slack_s)
    excess_s = forecast.engine_queue_s - forecast.current_step_s - options.max_engine_queue_delay_s
    if excess_s > 0 and not forecast.has_idle_alternative:
        return Enqueue(AdmissionReason.ENGINE_QUEUE, ttft_s, slack_s, excess_s)
    if slo.tpot_s is not None and forecast.unloaded_tpot_s <= slo.tpot_s:
        # Only what others add to its pace is uncertain, so that is what the margin is of.
        margin_s = options.slo_safety_margin_fraction * (slo.tpot_s - forecast.unloaded_tpot_s)
        if forecast.tpot_s > slo.tpot_s - margin_s:
            return Enqueue(AdmissionReason.TPOT_UNATTAINABLE, ttft_s, slack_s)
    if forecast.streams_broken >= _MAX_STREAMS_BROKEN:
        return Enqueue(AdmissionReason.INTERFERENCE, ttft_s, slack_s)
    return Admit(AdmissionReason.MEETS_SLO)
