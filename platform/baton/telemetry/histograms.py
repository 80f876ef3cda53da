"""Histograms that are cheap to observe, some of whose edges follow the configuration.

*Theory of operation.* An observation is one binary search and two additions, with a weight, so that
what many share is observed once. With other edges (`set_edges`) new series begin at zero under
another value of the label `edges`, and what was observed before stays as it was, in its own
series: no count ever falls, and no bucket is added up with those that it does not belong to. The
series of the last `MAX_EDGE_SETS` sets are told; an older set that comes again begins at zero.

Rows are bounded. Beyond `max_rows` a new row keeps the first of its labels (the class), and the
others become `other`. Beyond twice as many all of them do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from baton.policy.admission.slo_evaluation import ROUNDING_S
from baton.telemetry.catalogue import MAX_LABEL_VALUES, OTHER, Label, Metric
from baton.telemetry.edges import digest

MAX_EDGE_SETS: Final = 3
"""Sets of edges whose series one process tells: the present one and those before it."""
_INFINITY = "+Inf"


class _Row:
    """One set of labels."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0

    def copy(self) -> _Row:
        clone = _Row(0)
        clone.counts, clone.total = self.counts.copy(), self.total
        return clone


_Rows = dict[tuple[str, ...], _Row]


class Histogram:
    """One metric's; see the module."""

    def __init__(
        self, metric: Metric, edges: Iterable[float] = (), *, max_rows: int = MAX_LABEL_VALUES
    ) -> None:
        self._metric = metric
        self._has_digest = metric.labels[-1:] == (Label.EDGES,)
        self._labels = metric.labels[:-1] if self._has_digest else metric.labels
        self._max_rows = max_rows
        self._edges = metric.edges
        self._rows: _Rows = {}
        self._previous_rows: dict[tuple[float, ...], _Rows] = {}
        """What was observed with other edges, the latest last."""
        self.set_edges(edges)

    def set_edges(self, edges: Iterable[float]) -> bool:
        """Have an edge at each of these, besides the catalogue's; whether that changed anything."""
        new_edges = tuple(sorted({*self._metric.edges, *edges}))
        if new_edges == self._edges:
            return False
        if self._rows:
            self._previous_rows[self._edges] = self._rows
        self._edges, self._rows = new_edges, self._previous_rows.pop(new_edges, {})
        while len(self._previous_rows) >= MAX_EDGE_SETS:
            del self._previous_rows[next(iter(self._previous_rows))]
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
        clone = Histogram(self._metric, self._edges, max_rows=self._max_rows)
        clone._rows = _copy_rows(self._rows)
        clone._previous_rows = {
            edges: _copy_rows(rows) for edges, rows in self._previous_rows.items()
        }
        return clone

    def family(self) -> HistogramMetricFamily:
        """What was observed so far, as Prometheus' client wants it."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*map(str, metric.labels)])
        for edges, rows in (*self._previous_rows.items(), (self._edges, self._rows)):
            names = [*map(floatToGoString, edges), _INFINITY]
            digest_labels = (digest(edges),) if self._has_digest else ()
            for labels, row in rows.items():
                counts = accumulate(row.counts)
                buckets = list(zip(names, counts, strict=True))
                family.add_metric((*labels, *digest_labels), buckets, row.total)
        return family

    def _new_row(self, labels: tuple[str, ...]) -> _Row:
        if len(labels) != len(self._labels):
            expected = ", ".join(self._labels) or "none"
            raise ValueError(f"{self._metric.name}: got labels {labels}, expected {expected}")
        if len(self._rows) >= self._max_rows:
            has_room = len(labels) > 1 and len(self._rows) < 2 * self._max_rows
            kept_labels = labels[:1] if has_room else ()
            labels = (*kept_labels, *(OTHER,) * (len(labels) - len(kept_labels)))
        return self._rows.setdefault(labels, _Row(len(self._edges) + 1))


def _copy_rows(rows: _Rows) -> _Rows:
    return {labels: row.copy() for labels, row in rows.items()}
