"""Whether baton sees and does what it should: autoscaler, reports, configuration, targets.

Nothing here stops requests from being served: all of it are tickets. But what is not seen cannot
call anybody, which is why a target that is not scraped is told, too.
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
        summary="the autoscaler of {{ $labels.job }} does nothing, because it does not see enough",
        description="For five minutes pools have stayed as they are, whatever is asked for.",
    )
    yield Alert(
        name="BatonIngressSilent",
        severity=Severity.TICKET,
        expr=unresponsive,
        for_="2m",
        summary="ingresses of {{ $labels.job }} do not report: {{ $value }}",
        description="So many have not answered the controller for two minutes: they hang, start, or"
        " cannot be reached. The autoscaler holds still meanwhile.",
    )
    yield Alert(
        name="BatonReplicasUnreachable",
        severity=Severity.TICKET,
        expr=f"{aggregate('max', series(UNREACHABLE_REPLICAS))} > 0",
        for_="5m",
        summary="replicas of {{ $labels.job }} are paid for and cannot be used: {{ $value }}",
        description="Ray says that they run, and an ingress has not reached so many of them for"
        " five minutes: their fleet link is blocked, or they hang.",
    )


def _configuration() -> Iterator[Rule]:
    rejected = series(CONFIG_REJECTED, "15m")
    yield Alert(
        name="BatonConfigRefused",
        severity=Severity.TICKET,
        expr=f"{aggregate('sum', f'increase({rejected})')} > 0",
        for_="0s",
        summary="a configuration of {{ $labels.job }} could not be taken",
        description="Within a quarter of an hour one was refused by a part of baton; what held"
        " before still holds.",
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
        summary="parts of {{ $labels.job }} go by different configurations",
        description="An ingress has gone by generation {{ $value }} for two minutes, the controller"
        " by another one: requests are treated differently by the ingress that they come to.",
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
        summary="Prometheus does not get the numbers of every {{ $labels.component }}",
        description="Targets of this kind that have not answered for five minutes: {{ $value }}."
        " Alerts and dashboards know nothing of them; if it is the controller, no new target is"
        " found either.",
    )
