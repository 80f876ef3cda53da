"""Metrics that are read during a scrape, as families of Prometheus' client.

A label with more than `MAX_LABEL_VALUES` values has the rest added up as `other`. The first values
keep their names: callers add counters in a stable order, so that no series goes down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import assert_never

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from baton.telemetry.catalogue import MAX_LABEL_VALUES, OTHER, Kind, Metric


class Families:
    """Collects values for one scrape."""

    def __init__(self, *, max_values: int = MAX_LABEL_VALUES) -> None:
        self._max_values = max_values
        self._samples: dict[Metric, dict[tuple[str, ...], float]] = {}
        self._label_values: dict[Metric, tuple[set[str], ...]] = {}

    def add(self, metric: Metric, value: float | None, *labels: str) -> None:
        """Add to a metric; None and values that are not finite are left out.

        Raises:
            ValueError: the labels are not as many as the catalogue declares.
        """
        if len(labels) != len(metric.labels):
            expected = ", ".join(metric.labels) or "none"
            raise ValueError(f"{metric.name}: got labels {labels}, expected {expected}")
        if value is None or not math.isfinite(value):
            return
        samples = self._samples.setdefault(metric, {})
        if labels not in samples:
            labels = self._bound_labels(metric, labels)
        samples[labels] = samples.get(labels, 0.0) + value

    def _bound_labels(self, metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
        known_values = self._label_values.get(metric)
        if known_values is None:
            known_values = self._label_values[metric] = tuple(set() for _ in labels)
        return tuple(
            self._bound_value(label, values)
            for label, values in zip(labels, known_values, strict=True)
        )

    def _bound_value(self, label: str, values: set[str]) -> str:
        if label not in values:
            if len(values) >= self._max_values:
                return OTHER
            values.add(label)
        return label

    def collect(self) -> Iterator[Family]:
        """One family for each name of each metric with a value."""
        for metric, values in self._samples.items():
            for name in metric.names:
                family = _family(metric, name)
                for labels, value in values.items():
                    family.add_metric(labels, value)
                yield family


def _family(metric: Metric, name: str) -> CounterMetricFamily | GaugeMetricFamily:
    text = metric.help if name == metric.name else f"Deprecated, use {metric.name}."
    labels = [str(label) for label in metric.labels]
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(name, text, labels=labels)
        case Kind.HISTOGRAM:
            raise ValueError(f"{metric.name}: a histogram observes, it is not collected")
        case _:
            assert_never(metric.kind)
