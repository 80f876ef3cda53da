"""Numbers that are known when they are asked for, as Prometheus' client wants them.

A collector makes one `Families`, adds to it what it knows, and yields what it holds. The labels of
each number are those that the catalogue declares, in that order; a metric with more different sets
of values than `MOST_VALUES` has the rest added up in one set that says `other` everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import assert_never

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from baton.telemetry.catalogue import MOST_VALUES, OTHER, Kind, Metric


class Families:
    """Collects numbers for one scrape."""

    def __init__(self, *, most_values: int = MOST_VALUES) -> None:
        self._most_values = most_values
        self._values: dict[Metric, dict[tuple[str, ...], float]] = {}

    def add(self, metric: Metric, value: float | None, *labels: str) -> None:
        """Add to a metric; None and what is not finite are not numbers, and are left out.

        Raises:
            ValueError: these are not as many labels as the catalogue declares.
        """
        if len(labels) != len(metric.labels):
            wanted = ", ".join(metric.labels) or "none"
            raise ValueError(f"{metric.name}: got labels {labels}, wanted {wanted}")
        if value is None or not math.isfinite(value):
            return
        known = self._values.setdefault(metric, {})
        if labels not in known and len(known) >= self._most_values:
            labels = (OTHER,) * len(labels)
        known[labels] = known.get(labels, 0.0) + value

    def collect(self) -> Iterator[Family]:
        """One family for each metric that was added to."""
        for metric, values in self._values.items():
            family = _family(metric)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    names = [str(label) for label in metric.labels]
    match metric.kind:
        case Kind.COUNTER:
            name = metric.name.removesuffix("_total")
            return CounterMetricFamily(name, metric.help, labels=names)
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.help, labels=names)
        case Kind.HISTOGRAM:
            raise ValueError(f"{metric.name}: a histogram observes, it is not collected")
        case _:
            assert_never(metric.kind)
