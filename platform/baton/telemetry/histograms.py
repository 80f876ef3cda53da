"""Histograms that are cheap to observe, some of whose edges follow the configuration.

*Theory of operation.* An observation is one binary search and two additions, with a weight, so that
what many share is observed once. Besides the catalogue's, there is an edge at every objective that
is configured: how many kept it can be read off exactly. Another set of edges means to begin anew,
which Prometheus takes for a process that has restarted; the same edges change nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from baton.policy.judging import ROUNDING_S
from baton.telemetry.catalogue import MOST_VALUES, OTHER, Metric

_BEYOND = "+Inf"


class _Row:
    """One set of labels."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0

    def copy(self) -> _Row:
        made = _Row(0)
        made.counts, made.total = self.counts.copy(), self.total
        return made


class Histogram:
    """One metric's; see the module."""

    def __init__(
        self, metric: Metric, objectives: Iterable[float] = (), *, most_rows: int = MOST_VALUES
    ) -> None:
        self._metric = metric
        self._most_rows = most_rows
        self._edges: tuple[float, ...] = ()
        self._rows: dict[tuple[str, ...], _Row] = {}
        self.fit(objectives)

    def fit(self, objectives: Iterable[float]) -> bool:
        """Have an edge at each of these; whether that meant to forget what was observed."""
        edges = tuple(sorted({*self._metric.edges, *objectives}))
        if edges == self._edges:
            return False
        self._edges = edges
        self._rows.clear()
        return True

    def observe(self, value: float, *labels: str, weight: int = 1) -> None:
        """Count a value `weight` times; one at an edge, but for rounding, is within it."""
        row = self._rows.get(labels)
        if row is None:
            row = self._new_row(labels)
        row.counts[bisect_left(self._edges, value - ROUNDING_S)] += weight
        row.total += value * weight

    def copy(self) -> Histogram:
        """What was observed so far; nothing changes it."""
        made = Histogram(self._metric, self._edges, most_rows=self._most_rows)
        made._rows = {labels: row.copy() for labels, row in self._rows.items()}
        return made

    def family(self) -> HistogramMetricFamily:
        """What was observed so far, as Prometheus' client wants it."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*map(str, metric.labels)])
        names = [*map(floatToGoString, self._edges), _BEYOND]
        for labels, row in self._rows.items():
            counts = accumulate(row.counts)
            family.add_metric(labels, list(zip(names, counts, strict=True)), row.total)
        return family

    def _new_row(self, labels: tuple[str, ...]) -> _Row:
        if len(labels) != len(self._metric.labels):
            wanted = ", ".join(self._metric.labels) or "none"
            raise ValueError(f"{self._metric.name}: got labels {labels}, wanted {wanted}")
        if len(self._rows) >= self._most_rows:
            labels = (OTHER,) * len(labels)
        return self._rows.setdefault(labels, _Row(len(self._edges) + 1))
