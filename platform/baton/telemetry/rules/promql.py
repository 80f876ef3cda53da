"""PromQL expressions over known metrics and labels only."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from baton.telemetry.catalogue import Component, Kind, Label, Metric


class ScrapeLabel(StrEnum):
    """Labels that a scrape adds to every series of a target."""

    JOB = "job"
    """A deployment of baton: rules never mix several."""
    COMPONENT = "component"
    POOL = "pool"
    REPLICA = "replica"


_SCRAPE_LABELS: Final = frozenset(str(label) for label in ScrapeLabel)
_COMPONENTS: Final = "|".join(Component)


def series(metric: Metric, span: str = "", **matchers: str | tuple[str, ...]) -> str:
    """A metric's series, or ranges of them over `span` (`5m`), with these values of labels.

    Several values of a label are alternatives. ValueError for an unknown label or a histogram.
    """
    if metric.kind is Kind.HISTOGRAM:
        raise ValueError(f"{metric.name}: a histogram has no series of its own, use `buckets`")
    return _selector(metric, metric.name, span, matchers)


def buckets(metric: Metric, span: str, **matchers: str | tuple[str, ...]) -> str:
    """A histogram's buckets, as `series`."""
    return _selector(metric, _histogram_series(metric, "bucket"), span, matchers)


def observations(metric: Metric, span: str, **matchers: str | tuple[str, ...]) -> str:
    """A histogram's count of observations, as `series`."""
    return _selector(metric, _histogram_series(metric, "count"), span, matchers)


def is_up(component: Component | None = None) -> str:
    """Whether targets answer Prometheus; of one component or all."""
    matcher = f'="{component}"' if component else f'=~"{_COMPONENTS}"'
    return f"up{{{ScrapeLabel.COMPONENT}{matcher}}}"


def aggregate(function: str, inner: str, *labels: Label | ScrapeLabel) -> str:
    """`function` (`sum`, `max`, `count`) by deployment and these labels."""
    return f"{function} by ({_label_list(*labels)}) ({inner})"


def on(*labels: Label | ScrapeLabel) -> str:
    """One-to-one matching within a deployment, for a binary operator."""
    return f"on ({_label_list(*labels)})"


def join_lines(*parts: str) -> str:
    """An expression of several lines."""
    return "\n".join(parts)


def parenthesize(text: str) -> str:
    """An expression in parentheses, indented."""
    body = "\n".join(f"  {line}" for line in text.splitlines())
    return f"(\n{body}\n)"


def _label_list(*labels: Label | ScrapeLabel) -> str:
    return ", ".join(str(label) for label in (ScrapeLabel.JOB, *labels))


def _histogram_series(metric: Metric, part: str) -> str:
    if metric.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{metric.name}: got a {metric.kind}, expected a histogram")
    return f"{metric.name}_{part}"


def _selector(
    metric: Metric, name: str, span: str, matchers: dict[str, str | tuple[str, ...]]
) -> str:
    known = {str(label) for label in metric.labels} | _SCRAPE_LABELS
    if unknown := sorted(matchers.keys() - known):
        raise ValueError(f"{metric.name} has no label {unknown}, expected {sorted(known)}")
    matcher_list = ",".join(
        f'{label}="{value}"' if isinstance(value, str) else f'{label}=~"{"|".join(value)}"'
        for label, value in matchers.items()
    )
    braces = f"{{{matcher_list}}}" if matcher_list else ""
    return f"{name}{braces}{f'[{span}]' if span else ''}"
