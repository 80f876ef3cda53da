"""Histograms that are cheap to observe, some of whose edges follow the configuration.

*Theory of operation.* An observation is one binary search and two additions, with a weight, so that
what many share is observed once. With other edges (`fit`) new series begin at zero under another
value of the label `edges`, and what was observed before stays as it was, in its own series: no
count ever falls, and no bucket is added up with those that it does not belong to. The series of the
last `MOST_EDGE_SETS` sets are told; an older set that comes again begins at zero.

Rows are bounded. Beyond `most_rows` a new row keeps the first of its labels (the class), and the
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
from baton.telemetry.catalogue import MOST_VALUES, OTHER, Label, Metric
from baton.telemetry.edges import digest

MOST_EDGE_SETS: Final = 3
"""Sets of edges whose series one process tells: the present one and those before it."""
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


_Rows = dict[tuple[str, ...], _Row]


class Histogram:
    """One metric's; see the module."""

    def __init__(
        self, metric: Metric, edges: Iterable[float] = (), *, most_rows: int = MOST_VALUES
    ) -> None:
        self._metric = metric
        self._has_digest = metric.labels[-1:] == (Label.EDGES,)
        self._labels = metric.labels[:-1] if self._has_digest else metric.labels
        self._most_rows = most_rows
        self._edges = metric.edges
        self._rows: _Rows = {}
        self._former: dict[tuple[float, ...], _Rows] = {}
        """What was observed with other edges, the latest last."""
        self.fit(edges)

    def fit(self, edges: Iterable[float]) -> bool:
        """Have an edge at each of these, besides the catalogue's; whether that changed anything."""
        wanted = tuple(sorted({*self._metric.edges, *edges}))
        if wanted == self._edges:
            return False
        if self._rows:
            self._former[self._edges] = self._rows
        self._edges, self._rows = wanted, self._former.pop(wanted, {})
        while len(self._former) >= MOST_EDGE_SETS:
            del self._former[next(iter(self._former))]
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
        made._rows = _copied(self._rows)
        made._former = {edges: _copied(rows) for edges, rows in self._former.items()}
        return made

    def family(self) -> HistogramMetricFamily:
        """What was observed so far, as Prometheus' client wants it."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*map(str, metric.labels)])
        for edges, rows in (*self._former.items(), (self._edges, self._rows)):
            names = [*map(floatToGoString, edges), _BEYOND]
            own = (digest(edges),) if self._has_digest else ()
            for labels, row in rows.items():
                counts = accumulate(row.counts)
                buckets = list(zip(names, counts, strict=True))
                family.add_metric((*labels, *own), buckets, row.total)
        return family

    def _new_row(self, labels: tuple[str, ...]) -> _Row:
        if len(labels) != len(self._labels):
            wanted = ", ".join(self._labels) or "none"
            raise ValueError(f"{self._metric.name}: got labels {labels}, wanted {wanted}")
        if len(self._rows) >= self._most_rows:
            has_room = len(labels) > 1 and len(self._rows) < 2 * self._most_rows
            kept = labels[:1] if has_room else ()
            labels = (*kept, *(OTHER,) * (len(labels) - len(kept)))
        return self._rows.setdefault(labels, _Row(len(self._edges) + 1))


def _copied(rows: _Rows) -> _Rows:
    return {labels: row.copy() for labels, row in rows.items()}
