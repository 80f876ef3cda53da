"""Alerts on capacity: ingresses, replicas that decode or prefill, pools at their bounds.

Absent processes report nothing, so every count falls back to zero while the controller is scraped.
Ingresses see a killed replica within a second or two, earlier than Ray. The group is evaluated
every `_INTERVAL_S`, and pages after `15s`. With a scrape every 5 s that is within a minute, and not
for a replica that is back at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.domain.fleet import Role
from baton.telemetry.catalogue import (
    CONFIG_GENERATION,
    DEMAND_REQUESTS,
    DESIRED,
    POOL_BOUNDS,
    POOL_COLD_START,
    POOL_REPLICAS,
    POOL_ROLES,
    QUEUED_REQUESTS,
    SCALING_ACTIONS,
    SCALING_INPUT,
    UNMET,
    Component,
    Label,
    PoolBound,
    PoolCount,
    ScalingAction,
)
from baton.telemetry.rules.promql import aggregate, is_up, join_lines, on, parenthesize, series
from baton.telemetry.rules.rule import Alert, Group, Record, Rule, Severity

_INTERVAL_S: Final = 5
_DECODING: Final = "baton:decoding_replicas:sum"
_PREFILLING: Final = "baton:prefilling_replicas:sum"
_EMPTY: Final = "baton:empty_pools:count"
_MISSING: Final = "baton:missing_replicas:sum"
_POOL: Final = on(Label.POOL)
_ON_NOTHING: Final = on()
_MAX_ACTIONS_PER_HOUR: Final = 4
"""Starts, and stops, of a pool in an hour that do not alert."""


def capacity_groups() -> tuple[Group, ...]:
    """Recorded counts of replicas, and the alerts on them."""
    return (
        Group(
            name="baton-capacity",
            interval=f"{_INTERVAL_S}s",
            rules=(*_records(), *_absence()),
        ),
        Group(name="baton-pools", interval="30s", rules=tuple(_pools())),
    )


def _records() -> Iterator[Rule]:
    for name, roles in (
        (_DECODING, (Role.DECODE, Role.MIXED)),
        (_PREFILLING, (Role.PREFILL, Role.MIXED)),
    ):
        replicas = aggregate("sum", series(POOL_ROLES, role=roles))
        yield Record(
            name=name, expr=f"{replicas} or 0 * {aggregate('max', series(CONFIG_GENERATION))}"
        )
    # Pools with a minimum of 0 may be empty.
    min_replicas = series(POOL_BOUNDS, bound=PoolBound.MIN)
    empty = (
        f"{_replicas(PoolCount.READY)} == 0 and {_POOL}"
        f" {aggregate('max', min_replicas, Label.POOL)} > 0"
    )
    yield Record(name=_EMPTY, expr=aggregate("count", empty))
    missing = f"{_replicas(PoolCount.DESIRED)} - {_POOL} {_replicas(PoolCount.READY)}"
    yield Record(name=_MISSING, expr=f"clamp_min({missing}, 0)")


def _replicas(state: PoolCount) -> str:
    return aggregate("max", series(POOL_REPLICAS, state=state), Label.POOL)


def _absence() -> Iterator[Rule]:
    ingresses = aggregate("sum", is_up(Component.INGRESS))
    controllers = aggregate("sum", is_up(Component.CONTROLLER))
    yield Alert(
        name="BatonNoIngress",
        severity=Severity.PAGE,
        expr=f"({ingresses} or 0 * {controllers}) == 0",
        for_="1m",
        summary="no ingress of {{ $labels.job }} is reachable",
        description="Clients are rejected or get no response: Prometheus reaches {{ $value }}"
        " ingresses. Goodput alerts do not fire, because requests that never arrive are not"
        " counted.",
    )
    has_demand = f"{aggregate('sum', series(DEMAND_REQUESTS))} > 0"
    has_queued = f"{aggregate('sum', series(QUEUED_REQUESTS))} > 0"
    yield Alert(
        name="BatonNoDecode",
        severity=Severity.PAGE,
        expr=join_lines(
            f"{_DECODING} == 0",
            f"and {_ON_NOTHING}",
            # A first start without demand does not page.
            parenthesize(f"{has_demand} or {has_queued} or max_over_time({_DECODING}[1d]) > 0"),
            f"and {_ON_NOTHING}",
            f"{_EMPTY} > 0",
        ),
        for_="15s",
        summary="{{ $labels.job }} has no ready decode or mixed replica",
        description="{{ $value }} replicas of the roles decode and mixed are ready. Streams"
        " continue slowly on prefill replicas; without these, requests are rejected with 503.",
    )
    yield Alert(
        name="BatonNoPrefill",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{_PREFILLING} == 0",
            f"and {_ON_NOTHING} max_over_time({_PREFILLING}[1d]) > 0",
            f"and {_ON_NOTHING} {_EMPTY} > 0",
        ),
        for_="2m",
        summary="{{ $labels.job }} has no ready prefill or mixed replica",
        description="{{ $value }} replicas of the roles prefill and mixed are ready, and some were"
        " within a day. Decode replicas run prefill: their streams get slower, and total throughput"
        " drops.",
    )


def _pools() -> Iterator[Rule]:
    desired, unmet = (
        aggregate("max", series(SCALING_INPUT, input=name), Label.POOL) for name in (DESIRED, UNMET)
    )
    max_replicas = aggregate("max", series(POOL_BOUNDS, bound=PoolBound.MAX), Label.POOL)
    yield Alert(
        name="BatonPoolAtMax",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{desired} - {_POOL} {max_replicas} > 0",
            # baton's own policy respects the bounds, and reports the lack as an input.
            f"or {_POOL} ({unmet} > 0 and {_POOL} {desired} >= {_POOL} {max_replicas})",
        ),
        for_="10m",
        summary="pool {{ $labels.pool }} of {{ $labels.job }} needs more than its maximum size",
        description="{{ $value }} more replicas are needed than"
        " pools.{{ $labels.pool }}.replicas.max allows.",
    )
    yield Alert(
        name="BatonPoolShort",
        severity=Severity.TICKET,
        expr=f"{_MISSING} > 0",
        for_="15m",
        summary="pool {{ $labels.pool }} of {{ $labels.job }} lacks ready replicas",
        description="{{ $value }} desired replicas have been missing for a quarter of an hour; a"
        f" cold start takes {_cold_start()}.",
    )
    starts, stops = (
        aggregate("sum", f"increase({series(SCALING_ACTIONS, '1h', action=action)})", Label.POOL)
        for action in (ScalingAction.START, ScalingAction.STOP)
    )
    mean_replicas = f"avg_over_time({_READY}[1h])"
    yield Record(name=_READY, expr=_replicas(PoolCount.READY))
    yield Alert(
        name="BatonPoolFlaps",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{starts} > {_MAX_ACTIONS_PER_HOUR}",
            f"and {_POOL} {stops} > {_MAX_ACTIONS_PER_HOUR}",
            f"and {_POOL} {starts} > {_POOL} {mean_replicas}",
            f"and {_POOL} {stops} > {_POOL} {mean_replicas}",
        ),
        for_="10m",
        summary="pool {{ $labels.pool }} of {{ $labels.job }} scales up and down repeatedly",
        description='Within an hour {{ printf "%.0f" $value }} of its replicas were started, and'
        " about as many stopped: more than its mean size. Starts cost device time, and stops lose"
        " cached prefixes.",
    )


_READY: Final = "baton:ready_replicas:max"


def _cold_start() -> str:
    matchers = 'job=\\"%s\\",pool=\\"%s\\"'
    query = f'printf "{POOL_COLD_START.name}{{{matchers}}}" $labels.job $labels.pool | query'
    return (
        f"{{{{ with {query} }}}}{{{{ . | first | value | humanizeDuration }}}}"
        "{{ else }}an unknown time{{ end }}"
    )
