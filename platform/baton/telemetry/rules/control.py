"""Alerts on baton itself: autoscaler, reports, configuration, scrape targets.

None stops service, so all are tickets. A target that is not scraped is one, because no other alert
would see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry.catalogue import (
    AUTOSCALER_PAUSED,
    CONFIG_GENERATION,
    CONFIG_REJECTED,
    INGRESS_GENERATION,
    REPORT_AGE,
    UNREACHABLE_REPLICAS,
    UNRESPONSIVE_INGRESSES,
    Component,
)
from baton.telemetry.rules.promql import ScrapeLabel, aggregate, is_up, join_lines, on, series
from baton.telemetry.rules.rule import Alert, Group, Rule, Severity

_STALE_S: Final = 60


def control_groups() -> tuple[Group, ...]:
    """The alerts on baton itself."""
    rules = (*_reports(), *_configuration(), *_targets())
    return (Group(name="baton-control", interval="30s", rules=rules),)


def _reports() -> Iterator[Rule]:
    unresponsive = f"{aggregate('max', series(UNRESPONSIVE_INGRESSES))} > 0"
    age = f"{aggregate('max', series(REPORT_AGE))} > {_STALE_S}"
    yield Alert(
        name="BatonAutoscalerHeld",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{aggregate('max', series(AUTOSCALER_PAUSED))} > 0",
            f"or {on()} ({age} unless {on()} {unresponsive})",
        ),
        for_="5m",
        summary="the autoscaler of {{ $labels.job }} is paused, because inputs are missing",
        description="For five minutes pools have kept their sizes, regardless of demand.",
    )
    yield Alert(
        name="BatonIngressSilent",
        severity=Severity.TICKET,
        expr=unresponsive,
        for_="2m",
        summary="unresponsive ingresses of {{ $labels.job }}: {{ $value }}",
        description="For two minutes they have not answered the controller: they hang, start or are"
        " unreachable. Meanwhile the autoscaler is paused.",
    )
    yield Alert(
        name="BatonReplicasUnreachable",
        severity=Severity.TICKET,
        expr=f"{aggregate('max', series(UNREACHABLE_REPLICAS))} > 0",
        for_="5m",
        summary="unreachable replicas of {{ $labels.job }}: {{ $value }}",
        description="For five minutes an ingress has not reached replicas that Ray lists as"
        " running: their fleet link is blocked, or they hang.",
    )


def _configuration() -> Iterator[Rule]:
    rejected = series(CONFIG_REJECTED, "15m")
    yield Alert(
        name="BatonConfigRefused",
        severity=Severity.TICKET,
        expr=f"{aggregate('sum', f'increase({rejected})')} > 0",
        for_="0s",
        summary="a configuration of {{ $labels.job }} was rejected",
        description="Within a quarter of an hour a process rejected it; the previous configuration"
        " stays active.",
    )
    current = aggregate("max", series(CONFIG_GENERATION))
    oldest, newest = (aggregate(how, series(INGRESS_GENERATION)) for how in ("min", "max"))
    yield Alert(
        name="BatonGenerationsDiffer",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{oldest} != {on()} {current}",
            f"or {on()} {newest} != {on()} {current}",
        ),
        for_="2m",
        summary="processes of {{ $labels.job }} use different configurations",
        description="For two minutes an ingress has used generation {{ $value }}, and the"
        " controller another one. Limits and routes of a request depend on its ingress.",
    )


def _targets() -> Iterator[Rule]:
    no_controller = f'absent(up{{{ScrapeLabel.COMPONENT}="{Component.CONTROLLER}"}})'
    yield Alert(
        name="BatonTargetDown",
        severity=Severity.TICKET,
        expr=join_lines(
            aggregate("count", f"{is_up()} == 0", ScrapeLabel.COMPONENT),
            f"or {no_controller}",
        ),
        for_="5m",
        summary="Prometheus cannot scrape every {{ $labels.component }}",
        description="Targets that have not answered for five minutes: {{ $value }}. Alerts and"
        " dashboards lack their data. Without the controller, Prometheus discovers no new target.",
    )
