"""The dashboard of tenants: who asks, what they get, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import Objective, TokenKind
from baton.telemetry.dashboards.choices import (
    BY_POOL,
    CLASS,
    IN_CLASS,
    IN_POOL,
    JOB,
    OF_TENANT,
    POOL,
    TENANT,
)
from baton.telemetry.dashboards.model import Board, Panel, Query, Row, Shape, Unit
from baton.telemetry.dashboards.promql import Expr, increase, largest, rate, series, total

_TENANT: Final = "tenant"
_HOUR_S: Final = 3600.0
_MILLION: Final = 1_000_000.0
_SHOWN: Final = {**OF_TENANT, **IN_CLASS}


def board() -> Board:
    """Tenants & cost."""
    return Board(
        name="tenants",
        title="baton / Tenants & cost",
        about="Who asks, whether they get what they are promised, and what it costs.",
        choices=(JOB, TENANT, CLASS, POOL),
        rows=(
            Row(title="What does it cost?", panels=tuple(_cost())),
            Row(title="Who asks, and what do they get?", panels=(*_requests(), *_kinds())),
            Row(title="Who uses the devices?", panels=tuple(_devices())),
        ),
    )


def _cost() -> Iterator[Panel]:
    spent = total(rate(c.COST)) * _HOUR_S
    good = total(rate(c.SLO_GOOD, objective=Objective.GOODPUT)) * _HOUR_S
    output = total(rate(c.TOKENS, tokens=TokenKind.OUTPUT)) * (_HOUR_S / _MILLION)
    yield Panel(
        title="Cost per hour",
        about="At the pools' prices, in the configuration's currency, used or not.",
        shape=Shape.NUMBERS,
        queries=(Query(expr=spent, legend="per hour"),),
        unit=Unit.MONEY_PER_HOUR,
        width=6,
        height=5,
    )
    yield Panel(
        title="Cost of a million output tokens",
        about="All that is paid, over all tokens that were generated. High with low use: fewer"
        " replicas would do.",
        shape=Shape.NUMBERS,
        queries=(Query(expr=spent / output, legend="per million"),),
        unit=Unit.MONEY,
        width=6,
        height=5,
    )
    yield Panel(
        title="Cost of a good request",
        about="All that is paid, over the requests that got what they were promised.",
        shape=Shape.NUMBERS,
        queries=(Query(expr=spent / good, legend="per good request"),),
        unit=Unit.MONEY,
        width=6,
        height=5,
    )
    yield Panel(
        title="Price of a replica",
        about="Per hour, as configured by `resources.price_per_hour`; none: costs are 0.",
        shape=Shape.NUMBERS,
        queries=(
            Query(
                expr=largest(series(c.POOL_PRICE, **IN_POOL), *BY_POOL), legend="{{job}} {{pool}}"
            ),
        ),
        unit=Unit.MONEY_PER_HOUR,
        width=6,
        height=5,
    )
    yield Panel(
        title="Cost, by tenant",
        about="Per hour. `(idle)`: paid and not used. `(overhead)`: computed for nobody in"
        " particular. Together they are what is paid.",
        shape=Shape.STACK,
        queries=(Query(expr=total(rate(c.COST), _TENANT) * _HOUR_S, legend="{{tenant}}"),),
        unit=Unit.MONEY_PER_HOUR,
        width=12,
    )
    yield Panel(
        title="Cost over what is shown, by tenant",
        about="What each tenant has used since the left edge; for bills, `baton usage` is exact.",
        shape=Shape.LEVELS,
        queries=(Query(expr=total(increase(c.COST), _TENANT), legend="{{tenant}}"),),
        unit=Unit.MONEY,
        width=12,
    )


def _requests() -> Iterator[Panel]:
    judged = total(rate(c.SLO_REQUESTS, **_SHOWN), _TENANT)
    good = total(rate(c.SLO_GOOD, **_SHOWN, objective=Objective.GOODPUT), _TENANT)
    yield Panel(
        title="Requests, by tenant",
        about="That ended, however they did; tenants beyond the first few hundred are `other`.",
        shape=Shape.STACK,
        queries=(Query(expr=total(rate(c.REQUESTS, **_SHOWN), _TENANT), legend="{{tenant}}"),),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Attainment, by tenant",
        about="The share of each tenant's judged requests that was good. One below the others: look"
        " at its class, its weight and its limits.",
        shape=Shape.LINES,
        queries=(Query(expr=good / judged, legend="{{tenant}}"),),
        unit=Unit.FRACTION,
        lowest=None,
        highest=1.0,
    )


def _kinds() -> Iterator[Panel]:
    yield Panel(
        title="Refused, by tenant",
        about="`barred`: over the tenant's own limits, or not allowed. `shed`, `evicted`: there"
        " was no capacity for it.",
        shape=Shape.STACK,
        runbook="BatonTenantLimited",
        queries=(
            Query(
                expr=total(
                    rate(c.REQUESTS, **_SHOWN, outcome="=~barred|shed|evicted"),
                    _TENANT,
                    "outcome",
                ),
                legend="{{tenant}} {{outcome}}",
            ),
        ),
        unit=Unit.REQUESTS_PER_S,
    )
    yield _tokens("Prompt tokens, by tenant", TokenKind.PROMPT, "Cached ones among them.")
    yield _tokens("Output tokens, by tenant", TokenKind.OUTPUT, "That were generated.")
    yield Panel(
        title="Cached, by tenant",
        about="The share of its prompt tokens that no engine had to compute.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=_tokens_of(TokenKind.CACHED) / _tokens_of(TokenKind.PROMPT),
                legend="{{tenant}}",
            ),
        ),
        unit=Unit.FRACTION,
        highest=1.0,
    )
    yield Panel(
        title="Tenants and their classes",
        about="Over what is shown: ended requests by tenant and class.",
        shape=Shape.MATRIX,
        queries=(Query(expr=total(increase(c.REQUESTS, **_SHOWN), _TENANT, "slo_class")),),
        unit=Unit.COUNT,
        width=24,
        height=6,
        matrix=(_TENANT, "slo_class"),
    )


def _tokens(title: str, kind: TokenKind, about: str) -> Panel:
    return Panel(
        title=title,
        about=about,
        shape=Shape.STACK,
        queries=(Query(expr=_tokens_of(kind), legend="{{tenant}}"),),
        unit=Unit.TOKENS_PER_S,
    )


def _tokens_of(kind: TokenKind) -> Expr:
    return total(rate(c.TOKENS, **_SHOWN, tokens=kind), _TENANT)


def _devices() -> Iterator[Panel]:
    used = total(rate(c.GPU_SECONDS, **IN_POOL), *BY_POOL)
    paid = total(rate(c.PAID_GPU_SECONDS, **IN_POOL), *BY_POOL)
    yield Panel(
        title="Devices in use, by tenant",
        about="Device-seconds per second: how many devices each keeps busy.",
        shape=Shape.STACK,
        queries=(
            Query(
                expr=total(rate(c.GPU_SECONDS, **IN_POOL, **OF_TENANT), _TENANT),
                legend="{{tenant}}",
            ),
        ),
        unit=Unit.GPUS,
    )
    yield Panel(
        title="Paid and used",
        about="Devices that are paid for (dashed), and those that tenants' requests kept busy.",
        shape=Shape.LINES,
        queries=(
            Query(expr=used, legend="{{job}} {{pool}} used"),
            Query(expr=paid, legend="{{job}} {{pool}} paid", promise=True),
        ),
        unit=Unit.GPUS,
    )
    yield Panel(
        title="Used, of what is paid",
        about="By pool. Low for long: lower `replicas.min`, or `autoscaler.down.headroom`.",
        shape=Shape.LINES,
        queries=(Query(expr=used / paid, legend="{{job}} {{pool}}"),),
        unit=Unit.FRACTION,
        highest=1.0,
    )
