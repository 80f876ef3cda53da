"""Expressions of PromQL over the catalogue's metrics, which cannot be built wrongly.

An expression knows the labels that its result has. So a metric that is not in the catalogue, a
label that a metric does not have, a rate of a gauge, a counter without a rate, a quantile of what
is no histogram, a sum by what is not there and a legend that names what is not there are errors
where the expression is written, not empty panels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client.utils import floatToGoString

from baton.telemetry.catalogue import BY_NAME, Component, Kind, Label, Metric

EVERYWHERE: Final = frozenset({"job", "instance", "component", "replica", "node"})
"""Labels that a scrape adds to each series, whatever process it comes from."""
LE: Final = "le"
ALERTS: Final = "ALERTS"
UP: Final = "up"
FROM_PROMETHEUS: Final = {
    UP: EVERYWHERE | {"pool"},
    ALERTS: EVERYWHERE | {"alertname", "alertstate", "severity", "pool", "slo_class"},
}
"""Series that Prometheus makes itself, and their labels."""
RATE_WINDOW: Final = "$__rate_interval"
"""Grafana puts in a window that spans at least four scrapes."""
BAR_WINDOW: Final = "$__interval"
"""The width of a bar: each event is counted in one of them."""
_MATCHERS = re.compile(r"^(=~|!~|!=|=)(.*)$", re.DOTALL)
_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Part(StrEnum):
    """What a histogram is scraped as."""

    BUCKET = "_bucket"
    SUM = "_sum"
    COUNT = "_count"


def labels_of(metric: Metric) -> frozenset[str]:
    """What series of a metric can be told apart by, but for buckets' edges."""
    # Replicas are of one pool; other processes name the pool that a number is about.
    own = {str(label) for label in metric.labels}
    return EVERYWHERE | own | ({"pool"} if metric.component is Component.REPLICA else set())


@dataclass(frozen=True, slots=True, kw_only=True)
class Expr:
    """An expression whose value is a vector."""

    text: str
    labels: frozenset[str]
    """Of its result."""
    atomic: bool = True
    """Whether it is read the same beside an operator, without parentheses."""

    def __truediv__(self, other: Expr | float) -> Expr:
        return _binary(self, "/", other)

    def __mul__(self, other: Expr | float) -> Expr:
        return _binary(self, "*", other)

    def __sub__(self, other: Expr | float) -> Expr:
        return _binary(self, "-", other)

    def __add__(self, other: Expr | float) -> Expr:
        return _binary(self, "+", other)

    def __gt__(self, other: float) -> Expr:
        return _binary(self, ">", other)

    def __rsub__(self, other: float) -> Expr:
        text = f"{_number(other)} - {_wrapped(self)}"
        return Expr(text=text, labels=self.labels, atomic=False)

    def or_zero(self) -> Expr:
        """One series, 0 where there is none. For what has no labels left.

        Raises:
            ValueError: it has labels, and zero has none.
        """
        if self.labels:
            raise ValueError(f"{self.text}: has labels {_names(self.labels)}, zero has none")
        return Expr(text=f"{_wrapped(self)} or vector(0)", labels=frozenset(), atomic=False)

    def per(self, other: Expr) -> Expr:
        """Each series divided by the one that `other` is.

        Raises:
            ValueError: `other` has labels, so it may be more than one.
        """
        if other.labels:
            raise ValueError(f"{other.text}: has labels {_names(other.labels)}, wanted none")
        text = f"{_wrapped(self)} / on () group_left () {_wrapped(other)}"
        return Expr(text=text, labels=self.labels, atomic=False)

    def times_each(self, other: Expr, *on: str) -> Expr:
        """Each series times the one of `other` that has the same values of `on`.

        Raises:
            ValueError: one of the sides does not have these labels, or `other` has more.
        """
        if other.labels != set(on) or not set(on) <= self.labels:
            raise ValueError(
                f"{self.text} * {other.text}: got labels {_names(self.labels)} and"
                f" {_names(other.labels)}, wanted {_names(on)} on both, no more on the right"
            )
        text = f"{_wrapped(self)} * on ({', '.join(on)}) group_left () {_wrapped(other)}"
        return Expr(text=text, labels=self.labels, atomic=False)


def series(metric: Metric, **matchers: str) -> Expr:
    """A gauge's series; `slo_class="=~$class"` and the like narrow them.

    All are of the deployments that are chosen (`$job`), unless a matcher says otherwise.

    Raises:
        ValueError: the metric or a label of it is not in the catalogue, or it is no gauge.
    """
    if metric.kind is not Kind.GAUGE:
        raise ValueError(f"{metric.name}: is a {metric.kind}, wanted a gauge; see `rate`")
    return _selected(metric, metric.name, matchers)


def counted(metric: Metric, **matchers: str) -> Expr:
    """A counter's series as they are: to list the values of their labels, not to be drawn.

    Raises:
        ValueError: see `series`; or it is no counter.
    """
    if metric.kind is not Kind.COUNTER:
        raise ValueError(f"{metric.name}: is a {metric.kind}, wanted a counter")
    return _selected(metric, metric.name, matchers)


def rate(metric: Metric, **matchers: str) -> Expr:
    """How much a counter grows in a second.

    Raises:
        ValueError: see `series`; or it is no counter.
    """
    return _grown("rate", metric, RATE_WINDOW, matchers)


def increase(metric: Metric, window: str = "$__range", **matchers: str) -> Expr:
    """How much a counter has grown over a window: by default over all that is shown.

    Raises:
        ValueError: see `series`; or it is no counter.
    """
    return _grown("increase", metric, window, matchers)


def part_rate(metric: Metric, part: Part, **matchers: str) -> Expr:
    """How much one part of a histogram grows in a second.

    Raises:
        ValueError: see `series`; or it is no histogram.
    """
    if metric.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{metric.name}: is a {metric.kind}, wanted a histogram")
    _declared(metric)
    labels = labels_of(metric) | ({LE} if part is Part.BUCKET else frozenset())
    inner = _narrowed(metric.name + part, labels, matchers)
    return Expr(text=f"rate({inner.text}[{RATE_WINDOW}])", labels=labels)


def quantile(fraction: float, metric: Metric, *by: str, **matchers: str) -> Expr:
    """A quantile of a histogram's observations.

    Where edges follow the configuration there is one for each set of edges that was observed with:
    buckets of different sets added up would yield no quantile of anything.

    Raises:
        ValueError: see `series`; or it is no histogram, or no fraction.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"{metric.name}: got quantile {fraction}, wanted between 0 and 1")
    by = (*by, Label.EDGES) if Label.EDGES in metric.labels else by
    buckets = total(part_rate(metric, Part.BUCKET, **matchers), LE, *by)
    text = f"histogram_quantile({_number(fraction)}, {buckets.text})"
    return Expr(text=text, labels=frozenset(by))


def heat(metric: Metric, **matchers: str) -> Expr:
    """How much each bucket of a histogram grows in a second, for all that is chosen together.

    Where edges follow the configuration, buckets are those between edges that every process has.

    Raises:
        ValueError: see `series`; or it is no histogram.
    """
    if Label.EDGES in metric.labels:
        edges = [*map(floatToGoString, metric.edges), "+Inf"]
        matchers = {**matchers, LE: f"=~{'|'.join(map(re.escape, edges))}"}
    return total(part_rate(metric, Part.BUCKET, **matchers), LE)


def mean(metric: Metric, *by: str, **matchers: str) -> Expr:
    """The mean of a histogram's observations."""
    sums = total(part_rate(metric, Part.SUM, **matchers), *by)
    return sums / total(part_rate(metric, Part.COUNT, **matchers), *by)


def total(of: Expr, *by: str) -> Expr:
    """The sum over everything but some labels."""
    return _aggregated("sum", of, by)


def largest(of: Expr, *by: str) -> Expr:
    """The maximum over everything but some labels."""
    return _aggregated("max", of, by)


def smallest(of: Expr, *by: str) -> Expr:
    """The minimum over everything but some labels."""
    return _aggregated("min", of, by)


def average(of: Expr, *by: str) -> Expr:
    """The mean over everything but some labels."""
    return _aggregated("avg", of, by)


def targets_up(*by: str) -> Expr:
    """How many targets answer when they are scraped."""
    return total(_external(UP), *by)


def firing() -> Expr:
    """Alerts of baton's rules that fire, by name and severity."""
    fires = _external(ALERTS, alertname="=~Baton.*", alertstate="firing")
    return total(fires, "alertname", "severity")


def legend_labels(legend: str) -> frozenset[str]:
    """The labels that a legend takes from its series."""
    return frozenset(_LEGEND_LABEL.findall(legend))


def _declared(metric: Metric) -> None:
    if BY_NAME.get(metric.name) != metric:
        raise ValueError(f"{metric.name}: is not in the catalogue; declare it there")


def _selected(metric: Metric, name: str, matchers: dict[str, str]) -> Expr:
    _declared(metric)
    return _narrowed(name, labels_of(metric), matchers)


def _external(name: str, **matchers: str) -> Expr:
    return _narrowed(name, FROM_PROMETHEUS[name], matchers)


def _narrowed(name: str, labels: frozenset[str], matchers: dict[str, str]) -> Expr:
    if unknown := matchers.keys() - labels:
        raise ValueError(
            f"{name}: has no label {_names(unknown)}; it has {_names(labels)}",
        )
    # Alerts of rules that add up over targets have no job.
    wanted = matchers if name == ALERTS else {"job": "=~$job", **matchers}
    inside = ", ".join(f"{label}{_matcher(value)}" for label, value in wanted.items())
    return Expr(text=f"{name}{{{inside}}}", labels=labels)


def _matcher(value: str) -> str:
    """`=~$class` as PromQL writes it; without an operator, equal."""
    found = _MATCHERS.match(value)
    operator, text = (found[1], found[2]) if found else ("=", value)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'{operator}"{escaped}"'


def _grown(function: str, metric: Metric, window: str, matchers: dict[str, str]) -> Expr:
    if metric.kind is not Kind.COUNTER:
        raise ValueError(f"{metric.name}: is a {metric.kind}, wanted a counter")
    inner = _selected(metric, metric.name, matchers)
    return Expr(text=f"{function}({inner.text}[{window}])", labels=inner.labels)


def _aggregated(function: str, of: Expr, by: tuple[str, ...]) -> Expr:
    if missing := set(by) - of.labels:
        raise ValueError(
            f"{of.text}: cannot be told apart by {_names(missing)}, only by {_names(of.labels)}"
        )
    clause = f" by ({', '.join(by)}) " if by else ""
    return Expr(text=f"{function}{clause}({of.text})", labels=frozenset(by))


def _binary(left: Expr, operator: str, right: Expr | float) -> Expr:
    if not isinstance(right, Expr):
        text = f"{_wrapped(left)} {operator} {_number(right)}"
    elif right.labels != left.labels:
        raise ValueError(
            f"{left.text} {operator} {right.text}: labels {_names(left.labels)} do not match"
            f" {_names(right.labels)}; add both up by the same ones"
        )
    else:
        text = f"{_wrapped(left)} {operator} {_wrapped(right)}"
    return Expr(text=text, labels=left.labels, atomic=False)


def _wrapped(expr: Expr) -> str:
    return expr.text if expr.atomic else f"({expr.text})"


def _number(value: float) -> str:
    return f"{value:g}"


def _names(labels: frozenset[str] | set[str] | tuple[str, ...]) -> str:
    return ", ".join(sorted(map(str, labels))) or "none"
