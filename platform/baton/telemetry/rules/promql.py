"""Expressions of PromQL that can name no metric and no label that there is not."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from baton.telemetry.catalogue import Component, Kind, Label, Metric


class Scraped(StrEnum):
    """Labels that a scrape adds to everything that it finds at a target."""

    JOB = "job"
    """One deployment of baton: rules keep those of several apart by it."""
    COMPONENT = "component"
    POOL = "pool"
    REPLICA = "replica"


_SCRAPED: Final = frozenset(str(label) for label in Scraped)
_COMPONENTS: Final = "|".join(Component)


def series(metric: Metric, span: str = "", **where: str | tuple[str, ...]) -> str:
    """A metric's series, in full or over a span (`5m`), that have these values of labels.

    Several values of one label are alternatives.

    Raises:
        ValueError: the metric has no such label, or is a histogram.
    """
    if metric.kind is Kind.HISTOGRAM:
        raise ValueError(f"{metric.name}: a histogram has no series of its own, use `buckets`")
    return _selector(metric, metric.name, span, where)


def buckets(metric: Metric, span: str, **where: str | tuple[str, ...]) -> str:
    """A histogram's buckets, as `series`.

    Raises:
        ValueError: the metric has no such label, or is no histogram.
    """
    return _selector(metric, _of_histogram(metric, "bucket"), span, where)


def observations(metric: Metric, span: str, **where: str | tuple[str, ...]) -> str:
    """How often a histogram has observed, as `series`.

    Raises:
        ValueError: the metric has no such label, or is no histogram.
    """
    return _selector(metric, _of_histogram(metric, "count"), span, where)


def up(component: Component | None = None) -> str:
    """Whether targets answer Prometheus; of all components, or of one."""
    wanted = f'="{component}"' if component else f'=~"{_COMPONENTS}"'
    return f"up{{{Scraped.COMPONENT}{wanted}}}"


def grouped(how: str, inner: str, *labels: Label | Scraped) -> str:
    """`how` (`sum`, `max`, `count`) for each deployment, and in it for each of these labels."""
    return f"{how} by ({_listed(*labels)}) ({inner})"


def on(*labels: Label | Scraped) -> str:
    """The matching of a binary operator: one to one, of one deployment."""
    return f"on ({_listed(*labels)})"


def lines(*parts: str) -> str:
    """An expression of several lines."""
    return "\n".join(parts)


def indented(text: str) -> str:
    """An expression within brackets of its own."""
    body = "\n".join(f"  {line}" for line in text.splitlines())
    return f"(\n{body}\n)"


def _listed(*labels: Label | Scraped) -> str:
    return ", ".join(str(label) for label in (Scraped.JOB, *labels))


def _of_histogram(metric: Metric, part: str) -> str:
    if metric.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{metric.name}: got a {metric.kind}, wanted a histogram")
    return f"{metric.name}_{part}"


def _selector(metric: Metric, name: str, span: str, where: dict[str, str | tuple[str, ...]]) -> str:
    known = {str(label) for label in metric.labels} | _SCRAPED
    if unknown := sorted(where.keys() - known):
        raise ValueError(f"{metric.name} has no label {unknown}, wanted {sorted(known)}")
    matchers = ",".join(
        f'{label}="{value}"' if isinstance(value, str) else f'{label}=~"{"|".join(value)}"'
        for label, value in where.items()
    )
    braces = f"{{{matchers}}}" if matchers else ""
    return f"{name}{braces}{f'[{span}]' if span else ''}"
