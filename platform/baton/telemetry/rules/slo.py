"""Goodput against its target, by class: burn rates of the error budget, and the alerts on them.

*Theory of operation.* Targets are read from the controller's metrics, so that one file serves every
configuration. They are remembered for an hour, because requests are served while no controller
runs.

Recorded names and labels are sloth's, for sloth's dashboards; each series also has `job` and
`slo_class`. Unlike sloth, all windows are shares of *requests*, not of time. Windows up to six
hours come from the counters. Longer windows add up what was recorded every `_INTERVAL_S`, and count
nothing before Prometheus began.

An alert needs a long and a short burning window, so that it starts and ends soon. It needs
`_MIN_MISSES` misses in the long one. No threshold is above half-way from the budget to 1: 14.4
times the budget of a target of 0.9 would exceed all requests.

Sources: The Site Reliability Workbook, chapter 5; the names are those that sloth 0.11 writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from baton.telemetry.catalogue import SLO_GOOD, SLO_REQUESTS, SLO_TARGET, Label, Objective
from baton.telemetry.rules.promql import (
    ScrapeLabel,
    aggregate,
    join_lines,
    on,
    parenthesize,
    series,
)
from baton.telemetry.rules.rule import Alert, Group, Record, Rule, Severity

_INTERVAL_S: Final = 30
_PERIOD_DAYS: Final = 30
_MIN_MISSES: Final = 10
_TARGET_LOOKBACK: Final = "1h"
_BASE: Final = "5m"
_COUNTER_WINDOWS: Final = ("5m", "30m", "1h", "2h", "6h")
_SUMMED_WINDOWS: Final = ("1d", "3d", f"{_PERIOD_DAYS}d")
_HOURS: Final = {"5m": 1 / 12, "30m": 0.5, "1h": 1, "2h": 2, "6h": 6, "1d": 24, "3d": 72}
_CLASS: Final = on(Label.SLO_CLASS)
_TARGET: Final = "baton:slo_target:ratio"
_INFO: Final = "sloth_slo_info"
_WITH_SLOTH_LABELS: Final = f"* {_CLASS} group_left (sloth_id, sloth_service, sloth_slo) {_INFO}"
_BUDGET: Final = "slo:error_budget:ratio"
_BUDGET_REMAINING: Final = "slo:period_error_budget_remaining:ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnRate:
    """A share of the error budget spent in a long window, and still burning in a short one."""

    budget_fraction: float
    long_window: str
    short_window: str

    @property
    def factor(self) -> float:
        """The burn rate that this is: 1 spends the budget exactly in its period."""
        return round(self.budget_fraction * _PERIOD_DAYS * 24 / _HOURS[self.long_window], 3)


FAST_BURN: Final = (
    BurnRate(budget_fraction=0.02, long_window="1h", short_window="5m"),
    BurnRate(budget_fraction=0.05, long_window="6h", short_window="30m"),
)
SLOW_BURN: Final = (
    BurnRate(budget_fraction=0.1, long_window="1d", short_window="2h"),
    BurnRate(budget_fraction=0.1, long_window="3d", short_window="6h"),
)


def slo_groups() -> tuple[Group, ...]:
    """The attainment of every class, and the alerts on it."""
    records = (*_targets(), *_windows(), *_budgets())
    interval = f"{_INTERVAL_S}s"
    return (
        Group(name="baton-slo", interval=interval, rules=tuple(records)),
        Group(name="baton-slo-alerts", interval=interval, rules=tuple(_alerts())),
    )


def _error_ratio(window: str) -> str:
    return f"slo:sli_error:ratio_rate{window}"


def _requests(window: str) -> str:
    return f"baton:slo_requests:increase{window}"


def _misses(window: str) -> str:
    return f"baton:slo_misses:increase{window}"


def _targets() -> Iterator[Rule]:
    """The objectives. The first records have the labels that all others get from them."""
    target = aggregate(
        "max", f"last_over_time({series(SLO_TARGET, _TARGET_LOOKBACK)})", Label.SLO_CLASS
    )
    service = f'label_replace({_TARGET}, "sloth_service", "$1", "{ScrapeLabel.JOB}", "(.*)")'
    name = f'label_replace({service}, "sloth_slo", "goodput-$1", "{Label.SLO_CLASS}", "(.*)")'
    labelled = f'label_join({name}, "sloth_id", "-", "sloth_service", "sloth_slo")'
    yield Record(name=_TARGET, expr=target)
    yield Record(name=_INFO, expr=f"0 * {labelled} + 1", labels={"sloth_mode": "baton"})
    yield Record(name="slo:objective:ratio", expr=f"{_TARGET} {_WITH_SLOTH_LABELS}")
    yield Record(name=_BUDGET, expr="1 - slo:objective:ratio")
    yield Record(name="slo:time_period:days", expr=f"0 * slo:objective:ratio + {_PERIOD_DAYS}")


def _windows() -> Iterator[Rule]:
    for window in _COUNTER_WINDOWS:
        requests = aggregate("sum", f"increase({series(SLO_REQUESTS, window)})", Label.SLO_CLASS)
        good_series = series(SLO_GOOD, window, objective=Objective.GOODPUT)
        good = aggregate("sum", f"increase({good_series})", Label.SLO_CLASS)
        yield Record(name=_requests(window), expr=requests)
        # A class without a good request has no such series.
        misses = f"{_requests(window)} - ({good} or 0 * {_requests(window)})"
        yield Record(name=_misses(window), expr=f"clamp_min({misses}, 0)")
    per_record = f"{_INTERVAL_S} / {_HOURS[_BASE] * 3600:.0f}"
    for window in _SUMMED_WINDOWS:
        for name in (_requests, _misses):
            summed = f"sum_over_time({name(_BASE)}[{window}]) * {per_record}"
            yield Record(name=name(window), expr=summed)
    for window in (*_COUNTER_WINDOWS, *_SUMMED_WINDOWS):
        yield Record(
            name=_error_ratio(window),
            expr=f"{_misses(window)} / ({_requests(window)} > 0) {_WITH_SLOTH_LABELS}",
            labels={"sloth_window": window},
        )


def _budgets() -> Iterator[Rule]:
    """Burn rates of the budget now and over its period, and the rest of it."""
    budget = f"{on(Label.SLO_CLASS)} group_left() ({_BUDGET} > 0)"
    for name, window in (("current", _BASE), ("period", f"{_PERIOD_DAYS}d")):
        share = f"sum without (sloth_window) ({_error_ratio(window)})"
        yield Record(name=f"slo:{name}_burn_rate:ratio", expr=f"{share} / {budget}")
    yield Record(name=_BUDGET_REMAINING, expr="1 - slo:period_burn_rate:ratio")


# ------------------------------------------------------------------------------------- alerts


def _alerts() -> Iterator[Rule]:
    alerts: Mapping[Severity, tuple[str, tuple[BurnRate, ...], str]] = {
        Severity.PAGE: ("BatonGoodputBurnsFast", FAST_BURN, "fast"),
        Severity.TICKET: ("BatonGoodputBurnsSlowly", SLOW_BURN, "slowly"),
    }
    for severity, (name, burns, adverb) in alerts.items():
        yield Alert(
            name=name,
            severity=severity,
            expr="\nor\n".join(parenthesize(_burn_expr(burn)) for burn in burns),
            for_="0s" if severity is Severity.PAGE else "5m",
            summary=f"class {{{{ $labels.slo_class }}}} of {{{{ $labels.job }}}} burns its error"
            f" budget {adverb}",
            description=f"{{{{ $value | humanizePercentage }}}} of its requests of the last"
            f" {burns[0].long_window} or {burns[1].long_window} missed an objective or were"
            " rejected; the target"
            f" allows {_queried_value(_BUDGET, 'humanizePercentage')}. Error budget left of"
            f" {_PERIOD_DAYS} days: {_queried_value(_BUDGET_REMAINING, 'humanizePercentage')}.",
            labels={"sloth_severity": str(severity)},
        )


def _burn_expr(burn: BurnRate) -> str:
    """The share of misses in the long window, where both windows burn."""
    long, short = _error_ratio(burn.long_window), _error_ratio(burn.short_window)
    return join_lines(
        _above(long, burn.factor),
        f"and {_CLASS}",
        _above(short, burn.factor),
        f"and {_CLASS}",
        f"{_misses(burn.long_window)} >= {_MIN_MISSES}",
    )


def _above(ratio: str, factor: float) -> str:
    """A ratio, without its window, where it exceeds either threshold."""
    share = f"sum without (sloth_window) ({ratio})"
    comparison = f"> {_CLASS} group_left()"
    return parenthesize(
        join_lines(
            f"{share} {comparison} ({factor:g} * {_BUDGET})",
            f"or {share} {comparison} (0.5 + 0.5 * {_BUDGET})",
        )
    )


def _queried_value(name: str, formatter: str) -> str:
    matchers = 'job=\\"%s\\",slo_class=\\"%s\\"'
    query = f'printf "{name}{{{matchers}}}" $labels.job $labels.slo_class | query'
    return (
        f"{{{{ with {query} }}}}{{{{ . | first | value | {formatter} }}}}{{{{ else }}}}?{{{{"
        " end }}"
    )
