"""The dashboard that says whether the promise is kept, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import Metric, Objective
from baton.telemetry.dashboards.choices import (
    BY_CLASS,
    BY_POOL,
    BY_SERVED,
    CLASS,
    IN_CLASS,
    IN_POOL,
    JOB,
    MODEL,
    OF_MODEL,
    OF_SERVED,
    POOL,
    SERVED,
)
from baton.telemetry.dashboards.model import (
    FULL_IS_BAD,
    LOW_IS_BAD,
    NEGATIVE_IS_BAD,
    NONE_IS_GOOD,
    Board,
    Panel,
    Query,
    Row,
    Shape,
    Unit,
)
from baton.telemetry.dashboards.promql import (
    Expr,
    Part,
    firing,
    heat,
    largest,
    mean,
    part_rate,
    quantile,
    rate,
    series,
    smallest,
    total,
)
from baton.telemetry.label_values import Window

_QUANTILES: Final = (0.5, 0.9, 0.99)
_JUDGED: Final = {**IN_CLASS, **OF_MODEL}


def board() -> Board:
    """Goodput & SLO."""
    return Board(
        name="goodput",
        title="baton / Goodput & SLO",
        about="Whether what was promised is kept, by class, and where the time of requests goes.",
        choices=(JOB, CLASS, MODEL, POOL),
        rows=(
            Row(title="Are we keeping the promise?", panels=tuple(_promise())),
            Row(title="What was asked, and what was served", panels=(*_rates(), *_ends())),
            Row(title="What clients felt", panels=tuple(_latencies())),
            Row(title="Where the time to first token went", panels=(*_ttft(), *_waits())),
        ),
    )


def _promise() -> Iterator[Panel]:
    yield Panel(
        title="Error budget left",
        about="Of the misses that each class may have over its window, what is left: 100 % when"
        " there was none, below 0 % the promise is broken. Red: look below for the objective that"
        " is missed.",
        shape=Shape.NUMBERS,
        runbook="BatonGoodputBurnsFast",
        queries=(
            Query(
                expr=smallest(series(c.SLO_BUDGET, **IN_CLASS), *BY_CLASS),
                legend="{{job}} {{slo_class}}",
            ),
        ),
        unit=Unit.FRACTION,
        width=6,
        lowest=None,
        steps=LOW_IS_BAD,
    )
    yield Panel(
        title="Attainment above target, over the target's window",
        about="How far the share of good requests is above what is promised, by class. Negative:"
        " more was missed than is allowed.",
        shape=Shape.NUMBERS,
        queries=(Query(expr=_above_target(Window.TARGET), legend="{{job}} {{slo_class}}"),),
        unit=Unit.FRACTION,
        width=6,
        lowest=None,
        steps=NEGATIVE_IS_BAD,
    )
    yield Panel(
        title="Attainment",
        about="The share of judged requests that met every objective, refused ones among the"
        " misses; dashed: the target. Below its line a class burns its budget.",
        shape=Shape.LINES,
        runbook="BatonGoodputBurnsSlowly",
        queries=(
            Query(expr=_attainment(Objective.GOODPUT), legend="{{job}} {{slo_class}}"),
            Query(expr=_target(), legend="{{job}} {{slo_class}} promised", promise=True),
        ),
        unit=Unit.FRACTION,
        width=8,
        lowest=None,
        highest=1.0,
    )
    yield Panel(
        title="Alerts that fire",
        when_empty="none",
        about="From baton's rules; empty is good. Each has a runbook of its name.",
        shape=Shape.TABLE,
        queries=(Query(expr=firing(), legend="alerts"),),
        unit=Unit.COUNT,
        width=4,
    )


def _rates() -> Iterator[Panel]:
    judged = rate(c.SLO_REQUESTS, **_JUDGED)
    yield Panel(
        title="Offered, served, good",
        about="Offered: all that knocked. Throughput: those that finished. Goodput: those that got"
        " what their class is promised; who left early and had got what was due is among them. Less"
        " goodput than throughput is work that came too late. Of all models.",
        shape=Shape.LINES,
        queries=(
            Query(expr=total(rate(c.ADMISSIONS, **IN_CLASS)), legend="offered"),
            # At the door a request's model is not counted: neither is it after.
            Query(
                expr=total(rate(c.REQUESTS, **IN_CLASS, outcome="finished")), legend="throughput"
            ),
            Query(
                expr=total(rate(c.SLO_GOOD, **IN_CLASS, objective=Objective.GOODPUT)),
                legend="goodput",
            ),
        ),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Goodput by class",
        about="Requests per second that met every objective of their class.",
        shape=Shape.STACK,
        queries=(
            Query(expr=total(_good(Objective.GOODPUT), *BY_CLASS), legend="{{job}} {{slo_class}}"),
        ),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Misses by class",
        about="Judged requests per second that missed an objective, or were refused or failed."
        " Which objective: the next panels.",
        shape=Shape.STACK,
        queries=(
            Query(
                expr=total(judged, *BY_CLASS) - total(_good(Objective.GOODPUT), *BY_CLASS),
                legend="{{job}} {{slo_class}}",
            ),
        ),
        unit=Unit.REQUESTS_PER_S,
    )


def _ends() -> Iterator[Panel]:
    for objective in (Objective.TTFT, Objective.TPOT, Objective.ITL):
        yield _met(objective)
    yield Panel(
        title="How requests ended",
        about="Ended requests per second by outcome. `shed` and `evicted`: too little capacity for"
        " what is promised, see Pools & autoscaler. `failed`: see Routing & cache. `barred`: the"
        " caller's own doing.",
        shape=Shape.STACK,
        queries=(Query(expr=total(rate(c.REQUESTS, **_JUDGED), "outcome"), legend="{{outcome}}"),),
        unit=Unit.REQUESTS_PER_S,
        width=8,
    )
    yield Panel(
        title="Left, and owed nothing",
        about="Requests per second whose client left before anything was due: neither good nor a"
        " miss. Many: clients give up sooner than what they are promised.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(rate(c.SLO_EXCUSED, **_JUDGED), *BY_CLASS),
                legend="{{job}} {{slo_class}}",
            ),
        ),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Tokens",
        about="Prompt tokens, those of them that were cached, and output tokens of ended requests.",
        shape=Shape.LINES,
        queries=(Query(expr=total(rate(c.TOKENS, **_JUDGED), "tokens"), legend="{{tokens}}"),),
        unit=Unit.TOKENS_PER_S,
        width=8,
    )


def _met(objective: Objective) -> Panel:
    name = objective.upper()
    return Panel(
        title=f"{name} kept",
        about=f"The share of judged requests that met their {name} objective; requests without one"
        " meet it. The lowest of the three is the one to mend.",
        shape=Shape.LINES,
        queries=(
            Query(expr=_attainment(objective), legend="{{job}} {{slo_class}}"),
            Query(expr=_target(), legend="{{job}} {{slo_class}} promised", promise=True),
        ),
        unit=Unit.FRACTION,
        lowest=None,
        highest=1.0,
    )


def _latencies() -> Iterator[Panel]:
    yield _percentiles(
        "Time to first token",
        c.TTFT,
        Objective.TTFT,
        "From arrival to the first token. Above its line: see where it went, below.",
    )
    yield _percentiles(
        "Time per output token",
        c.TPOT,
        Objective.TPOT,
        "Between tokens, on average over a request. Above its line: decode is too full.",
    )
    yield _percentiles(
        "Worst gap of a request",
        c.WORST_GAP,
        Objective.ITL,
        "The longest time between two tokens of each request. High where TPOT is low: something"
        " interrupts streams, such as prompts that are computed beside them.",
    )
    yield Panel(
        title="Between tokens, of all streams",
        about="Percentiles of the gaps between tokens, by pool that decodes.",
        shape=Shape.LINES,
        queries=tuple(
            Query(
                expr=quantile(q, c.ITL, *BY_POOL, **IN_POOL),
                legend=f"{{{{job}}}} {{{{pool}}}} p{q * 100:g}",
            )
            for q in _QUANTILES
        ),
        unit=Unit.SECONDS,
        magnitudes=True,
        width=12,
    )
    yield Panel(
        title="From arrival to the end",
        about="Of finished requests; long answers take long, so compare it with itself.",
        shape=Shape.LINES,
        queries=tuple(_by_served(c.DURATION)),
        unit=Unit.SECONDS,
        magnitudes=True,
        width=12,
    )


def _percentiles(title: str, metric: Metric, objective: Objective, about: str) -> Panel:
    promised = Query(
        expr=largest(series(c.SLO_OBJECTIVE, **IN_CLASS, objective=objective), *BY_CLASS),
        legend="{{job}} {{slo_class}} promised",
        promise=True,
    )
    return Panel(
        title=title,
        about=f"{about} Dashed: what is promised.",
        shape=Shape.LINES,
        queries=(*_by_served(metric), promised),
        unit=Unit.SECONDS,
        magnitudes=True,
    )


def _ttft() -> Iterator[Panel]:
    parts = total(rate(c.TTFT_PARTS, **OF_SERVED), "part")
    firsts = total(part_rate(c.TTFT, Part.COUNT, **OF_SERVED))
    yield Panel(
        title="Time to first token, by part",
        about="Where the mean time to first token went; the height is the mean. `held`, `queue`:"
        " too little prefill. `prefill`: long or uncached prompts. `transfer`: see KV transfer."
        " `lost`: replicas failed.",
        shape=Shape.STACK,
        queries=(Query(expr=parts.per(firsts), legend="{{part}}"),),
        unit=Unit.SECONDS,
        width=12,
    )
    yield Panel(
        title="Mean time to first token",
        about="The same by class, model and pool; percentiles are above.",
        shape=Shape.LINES,
        queries=(Query(expr=mean(c.TTFT, *BY_SERVED, **OF_SERVED), legend=SERVED),),
        unit=Unit.SECONDS,
        width=6,
    )
    yield Panel(
        title="Share of the time, by part",
        about="Of all time to first token over the window, what went where. Mend the largest.",
        shape=Shape.LEVELS,
        queries=(Query(expr=parts.per(total(parts)), legend="{{part}}"),),
        unit=Unit.FRACTION,
        width=6,
        highest=1.0,
        steps=FULL_IS_BAD,
    )
    yield Panel(
        title="How long first tokens took",
        about="All requests over time: two bands are two kinds of prompt or two ways to run them.",
        shape=Shape.HEAT,
        queries=(Query(expr=heat(c.TTFT, **OF_SERVED)),),
        unit=Unit.SECONDS,
        width=12,
    )


def _waits() -> Iterator[Panel]:
    yield Panel(
        title="Hand-off gap",
        about="From the end of prefill to the first token, of requests that were handed off: what"
        " disaggregation costs. Compare with KV transfer when it grows.",
        shape=Shape.LINES,
        queries=tuple(_by_served(c.HANDOFF_GAP)),
        unit=Unit.SECONDS,
        width=6,
    )
    yield Panel(
        title="Held at the door",
        about="How long requests waited at the ingress before they were placed.",
        shape=Shape.LINES,
        runbook="BatonQueueGrows",
        queries=tuple(_by_served(c.HELD)),
        unit=Unit.SECONDS,
        width=6,
    )
    yield Panel(
        title="Slack of the most urgent",
        about="What the waiting request that is worst off has left of its objective; none waits:"
        " no data. Below 0 somebody is late already, and the autoscaler acts on it.",
        shape=Shape.LINES,
        runbook="BatonRequestsLate",
        queries=(Query(expr=smallest(series(c.SLACK)), legend="slack"),),
        unit=Unit.SECONDS,
        width=8,
        lowest=None,
    )
    yield Panel(
        title="Under way",
        about="Requests at the ingresses, by what they are doing.",
        shape=Shape.STACK,
        queries=(Query(expr=total(series(c.IN_FLIGHT), "phase"), legend="{{phase}}"),),
        unit=Unit.COUNT,
    )
    yield Panel(
        title="Streams that went on elsewhere",
        about="Their replica died, froze or drained; clients saw a pause. Steady: find out which.",
        shape=Shape.LINES,
        queries=(Query(expr=total(rate(c.RESUMES)), legend="resumes"),),
        unit=Unit.PER_S,
        steps=NONE_IS_GOOD,
    )


def _by_served(metric: Metric) -> Iterator[Query]:
    for q in _QUANTILES:
        yield Query(
            expr=quantile(q, metric, *BY_SERVED, **OF_SERVED),
            legend=f"{SERVED} p{q * 100:g}",
        )


def _good(objective: Objective) -> Expr:
    return rate(c.SLO_GOOD, **_JUDGED, objective=objective)


def _attainment(objective: Objective) -> Expr:
    judged = total(rate(c.SLO_REQUESTS, **_JUDGED), *BY_CLASS)
    return total(_good(objective), *BY_CLASS) / judged


def _target() -> Expr:
    return largest(series(c.SLO_TARGET, **IN_CLASS), *BY_CLASS)


def _above_target(window: Window) -> Expr:
    return smallest(series(c.SLO_ATTAINMENT, **IN_CLASS, window=window), *BY_CLASS) - _target()
