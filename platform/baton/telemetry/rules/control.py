"""Whether baton sees and does what it should: autoscaler, reports, configuration, targets.

Nothing here stops requests from being served: all of it are tickets. But what is not seen cannot
call anybody, which is why a target that is not scraped is told, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry.catalogue import (
    CONFIG_GENERATION,
    CONFIG_REFUSED,
    INGRESS_GENERATION,
    REPORT_AGE,
    SCALING_HELD,
    SILENT_INGRESSES,
    UNJOINED,
    Component,
)
from baton.telemetry.rules.promql import Scraped, grouped, lines, on, series, up
from baton.telemetry.rules.rule import Alert, Group, Rule, Severity

_STALE_S: Final = 60


def control_groups() -> tuple[Group, ...]:
    """The alerts on baton itself."""
    rules = (*_sight(), *_configuration(), *_targets())
    return (Group(name="baton-control", interval="30s", rules=rules),)


def _sight() -> Iterator[Rule]:
    silent = f"{grouped('max', series(SILENT_INGRESSES))} > 0"
    age = f"{grouped('max', series(REPORT_AGE))} > {_STALE_S}"
    yield Alert(
        name="BatonAutoscalerHeld",
        severity=Severity.TICKET,
        expr=lines(
            f"{grouped('max', series(SCALING_HELD))} > 0",
            f"or {on()} ({age} unless {on()} {silent})",
        ),
        for_="5m",
        summary="the autoscaler of {{ $labels.job }} does nothing, because it does not see enough",
        description="For five minutes pools have stayed as they are, whatever is asked for.",
    )
    yield Alert(
        name="BatonIngressSilent",
        severity=Severity.TICKET,
        expr=silent,
        for_="2m",
        summary="ingresses of {{ $labels.job }} do not report: {{ $value }}",
        description="So many have not answered the controller for two minutes: they hang, start, or"
        " cannot be reached. The autoscaler holds still meanwhile.",
    )
    yield Alert(
        name="BatonReplicasUnreachable",
        severity=Severity.TICKET,
        expr=f"{grouped('max', series(UNJOINED))} > 0",
        for_="5m",
        summary="replicas of {{ $labels.job }} are paid for and cannot be used: {{ $value }}",
        description="Ray says that they run, and an ingress has not reached so many of them for"
        " five minutes: their fleet link is blocked, or they hang.",
    )


def _configuration() -> Iterator[Rule]:
    refused = series(CONFIG_REFUSED, "15m")
    yield Alert(
        name="BatonConfigRefused",
        severity=Severity.TICKET,
        expr=f"{grouped('sum', f'increase({refused})')} > 0",
        for_="0s",
        summary="a configuration of {{ $labels.job }} could not be taken",
        description="Within a quarter of an hour one was refused by a part of baton; what held"
        " before still holds.",
    )
    held = grouped("max", series(CONFIG_GENERATION))
    oldest, newest = (grouped(how, series(INGRESS_GENERATION)) for how in ("min", "max"))
    yield Alert(
        name="BatonGenerationsDiffer",
        severity=Severity.TICKET,
        expr=lines(
            f"{oldest} != {on()} {held}",
            f"or {on()} {newest} != {on()} {held}",
        ),
        for_="2m",
        summary="parts of {{ $labels.job }} go by different configurations",
        description="An ingress has gone by generation {{ $value }} for two minutes, the controller"
        " by another one: requests are treated differently by the ingress that they come to.",
    )


def _targets() -> Iterator[Rule]:
    none = f'absent(up{{{Scraped.COMPONENT}="{Component.CONTROLLER}"}})'
    yield Alert(
        name="BatonTargetDown",
        severity=Severity.TICKET,
        expr=lines(
            grouped("count", f"{up()} == 0", Scraped.COMPONENT),
            f"or {none}",
        ),
        for_="5m",
        summary="Prometheus does not get the numbers of every {{ $labels.component }}",
        description="Targets of this kind that have not answered for five minutes: {{ $value }}."
        " Alerts and dashboards know nothing of them; if it is the controller, no new target is"
        " found either.",
    )
