"""The dashboard of pools: how many there are, what is asked of them, and what was decided."""

from __future__ import annotations

from collections.abc import Iterator

from baton.domain.fleet import Role
from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import TokenKind
from baton.telemetry.dashboards.choices import BY_POOL, IN_POOL, JOB, POOL
from baton.telemetry.dashboards.model import (
    FULL_IS_BAD,
    NONE_IS_BAD,
    NONE_IS_GOOD,
    SOME_IS_CARE,
    Board,
    Panel,
    Query,
    Row,
    Shape,
    Unit,
)
from baton.telemetry.dashboards.promql import (
    BAR_WINDOW,
    Expr,
    average,
    increase,
    largest,
    rate,
    series,
    smallest,
    targets_up,
    total,
)
from baton.telemetry.label_values import PoolBound, PoolCount


def board() -> Board:
    """Pools & autoscaler."""
    return Board(
        name="pools",
        title="baton / Pools & autoscaler",
        about="How many replicas there are and should be, what is asked of them, and why.",
        choices=(JOB, POOL),
        rows=(
            Row(title="Are there enough?", panels=(*_now(), *_hands())),
            Row(title="Replicas", panels=(*_replicas(), *_use())),
            Row(title="Demand against capacity", panels=tuple(_demand())),
            Row(title="What was decided, and why", panels=tuple(_decisions())),
            Row(title="The loop itself", panels=tuple(_loop())),
        ),
    )


def _now() -> Iterator[Panel]:
    yield Panel(
        title="Ready",
        about="Replicas that take work. Red: a pool has none, so its role is played by others, or"
        " by nobody.",
        shape=Shape.NUMBERS,
        runbook="BatonNoDecode",
        queries=(Query(expr=_count(PoolCount.READY), legend="{{job}} {{pool}}"),),
        unit=Unit.COUNT,
        width=6,
        height=5,
        steps=NONE_IS_BAD,
    )
    yield Panel(
        title="Below what is wanted",
        about="Replicas that are wanted and are neither ready nor starting. Steady: Ray has no"
        " place for them; see `baton status` and the resources of the cluster.",
        shape=Shape.NUMBERS,
        runbook="BatonPoolShort",
        queries=(
            Query(
                expr=_count(PoolCount.WANT) - _count(PoolCount.READY) - _count(PoolCount.STARTING),
                legend="{{job}} {{pool}}",
            ),
        ),
        unit=Unit.COUNT,
        width=6,
        height=5,
        lowest=None,
        steps=SOME_IS_CARE,
    )
    yield Panel(
        title="Of the largest size allowed",
        about="Wanted replicas as a share of the pool's bound. Full: raise `replicas.max`, or"
        " accept that the rest is refused.",
        shape=Shape.NUMBERS,
        runbook="BatonPoolAtMax",
        queries=(
            Query(expr=_count(PoolCount.WANT) / _bound(PoolBound.MAX), legend="{{job}} {{pool}}"),
        ),
        unit=Unit.FRACTION,
        width=6,
        height=5,
        steps=FULL_IS_BAD,
    )


def _hands() -> Iterator[Panel]:
    yield Panel(
        title="Autoscaler holds",
        about="1 while it changes nothing, for want of something that it needs to see: `baton"
        " explain scale` says what.",
        shape=Shape.NUMBERS,
        runbook="BatonAutoscalerHeld",
        queries=(Query(expr=largest(series(c.SCALING_HELD)), legend="held"),),
        unit=Unit.COUNT,
        width=3,
        height=5,
        steps=NONE_IS_GOOD,
    )
    yield Panel(
        title="Pools in an operator's hand",
        about="Their size was set by `baton scale`, and stays so until that ends.",
        shape=Shape.NUMBERS,
        queries=(Query(expr=largest(series(c.OVERRIDES)), legend="overridden"),),
        unit=Unit.COUNT,
        width=3,
        height=5,
        steps=SOME_IS_CARE,
    )


def _replicas() -> Iterator[Panel]:
    yield Panel(
        title="Replicas, by state",
        about="Wanted (dashed), ready, starting, draining. Wanted above ready for longer than a"
        " cold start: starts fail, see `baton logs`.",
        shape=Shape.LINES,
        queries=(
            *(
                Query(expr=_count(state), legend="{{job}} {{pool}} " + state)
                for state in (PoolCount.READY, PoolCount.STARTING, PoolCount.DRAINING)
            ),
            Query(expr=_count(PoolCount.WANT), legend="{{job}} {{pool}} wanted", promise=True),
        ),
        unit=Unit.COUNT,
        width=12,
    )
    yield Panel(
        title="Replicas, by what they play",
        about="Roles flip without a restart: a pool may play another role while that one is short.",
        shape=Shape.STACK,
        queries=(
            Query(
                expr=total(series(c.POOL_ROLES, **IN_POOL), *BY_POOL, "role"),
                legend="{{job}} {{pool}} as {{role}}",
            ),
        ),
        unit=Unit.COUNT,
        width=12,
    )


def _use() -> Iterator[Panel]:
    yield Panel(
        title="Busy",
        about="Time in engine steps, of the time that there was. Near 100 % with a queue: too few.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=average(series(c.POOL_BUSY, **IN_POOL), *BY_POOL), legend="{{job}} {{pool}}"
            ),
        ),
        unit=Unit.FRACTION,
        highest=1.0,
    )
    yield Panel(
        title="KV cache in use",
        about="Of each replica. Decode above 90 %: streams are about to be preempted.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=largest(series(c.KV_USED, **IN_POOL), *BY_POOL, "replica"),
                legend="{{replica}}",
            ),
        ),
        unit=Unit.FRACTION,
        highest=1.0,
    )
    yield Panel(
        title="Requests in engines",
        about="Running, queued inside an engine, or waiting for their blocks, by pool.",
        shape=Shape.STACK,
        queries=(
            Query(
                expr=total(series(c.RUNNING, **IN_POOL), *BY_POOL, "state"),
                legend="{{job}} {{pool}} {{state}}",
            ),
        ),
        unit=Unit.COUNT,
    )


def _demand() -> Iterator[Panel]:
    yield _against(
        "Prompt tokens", TokenKind.PROMPT, Role.PREFILL, "Uncached prompt tokens asked for"
    )
    yield _against("Output tokens", TokenKind.OUTPUT, Role.DECODE, "Tokens generated or expected")
    yield Panel(
        title="Requests asked for",
        about="Per second over the autoscaler's window, also those that were refused.",
        shape=Shape.LINES,
        queries=(Query(expr=total(series(c.DEMAND_REQUESTS)), legend="asked for"),),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Capacity of one replica",
        about="As calibrated from its own steps. A sudden drop: a slow replica, or another mix.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=average(series(c.POOL_CAPACITY, **IN_POOL), *BY_POOL, "tokens"),
                legend="{{job}} {{pool}} {{tokens}}",
            ),
        ),
        unit=Unit.TOKENS_PER_S,
    )
    yield Panel(
        title="Replicas needed, now and at the horizon",
        about="What baton's own policy works out before bounds: for what is asked now, at the end"
        " of a cold start, for the backlog, for streams under way. The largest wins.",
        shape=Shape.LINES,
        queries=(Query(expr=_inputs("=~need_.*"), legend="{{job}} {{pool}} {{input}}"),),
        unit=Unit.COUNT,
    )
    tokens = "=~(prompt|output)_tokens_per_s(_later)?"
    yield Panel(
        title="Forecast, prompt and output tokens",
        about="What is asked now, and what is forecast (`_later`) for when a new replica would be"
        " ready.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=largest(series(c.SCALING_INPUT, **IN_POOL, input=tokens), "job", "input"),
                legend="{{job}} {{input}}",
            ),
        ),
        unit=Unit.TOKENS_PER_S,
    )


def _against(title: str, tokens: TokenKind, role: Role, about: str) -> Panel:
    # Of all pools, whichever are chosen: what is asked for is asked of no pool.
    playing = total(series(c.POOL_ROLES, role=f"=~{role}|{Role.MIXED}"), *BY_POOL)
    each = largest(series(c.POOL_CAPACITY, tokens=tokens), *BY_POOL)
    return Panel(
        title=f"{title}: demand against capacity",
        about=f"{about}, against what the replicas that play {role} in all pools can do (dashed)."
        " Close to the line there is no room for bursts.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(series(c.DEMAND_TOKENS, tokens=tokens), "job"), legend="{{job}} demand"
            ),
            Query(expr=total(each * playing, "job"), legend="{{job}} capacity", promise=True),
        ),
        unit=Unit.TOKENS_PER_S,
    )


def _decisions() -> Iterator[Panel]:
    yield Panel(
        title="Decisions, by reason",
        about="How often each pool's size was decided for which reason. `held`: see the loop below."
        " `slack`: requests that wait would be late.",
        shape=Shape.BARS,
        queries=(
            Query(
                expr=total(
                    increase(c.SCALING_DECISIONS, BAR_WINDOW, **IN_POOL), *BY_POOL, "reason"
                ),
                legend="{{job}} {{pool}} {{reason}}",
            ),
        ),
        unit=Unit.COUNT,
        width=12,
    )
    yield Panel(
        title="Replicas started, stopped, flipped",
        about="What was done. Starts and stops that take turns: raise `autoscaler.down.cooldown`.",
        shape=Shape.BARS,
        runbook="BatonPoolFlaps",
        queries=(
            Query(
                expr=total(increase(c.SCALING_ACTIONS, BAR_WINDOW, **IN_POOL), *BY_POOL, "action"),
                legend="{{job}} {{pool}} {{action}}",
            ),
        ),
        unit=Unit.COUNT,
        width=12,
    )
    yield Panel(
        title="What the last decision was made from",
        about="Every number of it; `baton explain scale` tells it in words. Of several deployments"
        " the larger one is shown: choose one.",
        shape=Shape.MATRIX,
        queries=(Query(expr=largest(series(c.SCALING_INPUT, **IN_POOL), "pool", "input")),),
        unit=Unit.COUNT,
        width=16,
        matrix=("input", "pool"),
        lowest=None,
    )
    yield Panel(
        title="Cold start",
        about="From asking for a replica to its first work: how far ahead the forecast looks.",
        shape=Shape.NUMBERS,
        queries=(
            Query(
                expr=largest(series(c.POOL_COLD_START, **IN_POOL), *BY_POOL),
                legend="{{job}} {{pool}}",
            ),
        ),
        unit=Unit.SECONDS,
    )


def _loop() -> Iterator[Panel]:
    yield Panel(
        title="Turns of the loop",
        about="How turns of the autoscaler ended. Failed ones: see the controller's log.",
        shape=Shape.STACK,
        queries=(Query(expr=total(rate(c.SCALING_TURNS), "outcome"), legend="{{outcome}}"),),
        unit=Unit.PER_S,
    )
    yield Panel(
        title="Age of what is known",
        about="Since the last turn in which every ingress reported, and how many are silent."
        " Growing: an ingress hangs.",
        shape=Shape.LINES,
        runbook="BatonIngressSilent",
        queries=(Query(expr=largest(series(c.REPORT_AGE)), legend="age of the reports"),),
        unit=Unit.SECONDS,
    )
    yield Panel(
        title="Silent ingresses",
        about="Ingresses that did not report last turn.",
        shape=Shape.NUMBERS,
        runbook="BatonIngressSilent",
        queries=(Query(expr=largest(series(c.SILENT_INGRESSES)), legend="silent"),),
        unit=Unit.COUNT,
        width=4,
        steps=NONE_IS_GOOD,
    )
    yield Panel(
        title="Targets that answer",
        about="Processes that Prometheus reaches, by what they are.",
        shape=Shape.NUMBERS,
        runbook="BatonTargetDown",
        queries=(Query(expr=targets_up("job", "component"), legend="{{job}} {{component}}"),),
        unit=Unit.COUNT,
        width=4,
        steps=NONE_IS_BAD,
    )
    yield Panel(
        title="Configuration in force",
        about="Its number at the controller and, lowest and highest, at the ingresses: they differ"
        " only while `baton apply` runs.",
        shape=Shape.LINES,
        runbook="BatonGenerationsDiffer",
        queries=tuple(_generations()),
        unit=Unit.COUNT,
        width=12,
        lowest=None,
    )
    yield Panel(
        title="Configurations refused",
        about="That `baton apply` could not make hold; what was there before holds.",
        shape=Shape.BARS,
        runbook="BatonConfigRefused",
        queries=(Query(expr=total(increase(c.CONFIG_REFUSED, BAR_WINDOW)), legend="refused"),),
        unit=Unit.COUNT,
        width=12,
    )


def _generations() -> Iterator[Query]:
    ingresses = series(c.INGRESS_GENERATION)
    yield Query(expr=largest(series(c.CONFIG_GENERATION), "job"), legend="{{job}} controller")
    yield Query(expr=largest(ingresses, "job"), legend="{{job}} ingresses, highest")
    yield Query(expr=smallest(ingresses, "job"), legend="{{job}} ingresses, lowest")


def _count(state: PoolCount) -> Expr:
    return largest(series(c.POOL_REPLICAS, **IN_POOL, state=state), *BY_POOL)


def _bound(bound: PoolBound) -> Expr:
    return largest(series(c.POOL_BOUNDS, **IN_POOL, bound=bound), *BY_POOL)


def _inputs(which: str) -> Expr:
    return largest(series(c.SCALING_INPUT, **IN_POOL, input=which), *BY_POOL, "input")
