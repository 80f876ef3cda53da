"""Histograms that are cheap to observe, and whose edges follow the configuration.

An observation is a binary search and two additions, with a weight. A histogram has the catalogue's
edges, and one at each objective and timeout that bounds its values. So the share within either is
exact, and no quantile ends below a timeout.

Objectives and timeouts change while a deployment runs, and ingresses may use different generations.
Buckets of different edges, added up by `le`, would give wrong quantiles. So each set of edges has
its own series: the label `edges` is a digest of the set. Older series stay as they are, so no count
falls. Series of the last `MAX_EDGE_SETS` sets are exported; an older set that returns begins at
zero.

Rows are bounded: beyond `max_rows`, a new row keeps its first label (the class) and the others
become `other`. Beyond twice as many, all become `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Final, assert_never

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from baton.control.state.limits import CoordinatorLimits
from baton.domain.slo import Slo
from baton.policy.admission.slo_evaluation import ROUNDING_S
from baton.telemetry.catalogue import (
    CATALOGUE,
    MAX_LABEL_VALUES,
    OTHER,
    Deadline,
    Kind,
    Label,
    Metric,
    Objective,
)

MAX_EDGE_SETS: Final = 3
"""Sets of edges whose series one process exports: the current and former sets."""
_INFINITY = "+Inf"
_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedEdges:
    """A difference of one histogram's edges between two configurations."""

    metric: Metric
    added_s: tuple[float, ...]
    removed_s: tuple[float, ...]

    def __str__(self) -> str:
        new = [f"+{edge_s:g} s" for edge_s in self.added_s]
        old = [f"-{edge_s:g} s" for edge_s in self.removed_s]
        return f"{self.metric.name}: {', '.join((*new, *old))}"


class _Row:
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
    """The histogram of one metric; see the module."""

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
        """Rows of former edges, the latest last."""
        self.set_edges(edges)

    def set_edges(self, edges: Iterable[float]) -> bool:
        """Use these edges and the catalogue's; returns whether that changes anything."""
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
        """Count a value `weight` times. A value at an edge, within rounding, is below it."""
        row = self._rows.get(labels)
        if row is None:
            row = self._new_row(labels)
        row.counts[bisect_left(self._edges, value - ROUNDING_S)] += weight
        row.total += value * weight

    def copy(self) -> Histogram:
        """A snapshot."""
        clone = Histogram(self._metric, self._edges, max_rows=self._max_rows)
        clone._rows = _copy_rows(self._rows)
        clone._previous_rows = {
            edges: _copy_rows(rows) for edges, rows in self._previous_rows.items()
        }
        return clone

    def family(self) -> HistogramMetricFamily:
        """The series for Prometheus' client."""
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


def _edges_of(
    metric: Metric, classes: Iterable[Slo], limits: CoordinatorLimits
) -> tuple[float, ...]:
    objective = metric.objective
    objectives = () if objective is None else [_objective_s(objective, slo) for slo in classes]
    timeouts_s = _deadlines_s(limits)
    deadlines = [timeouts_s[deadline] for deadline in metric.deadlines]
    configured = {edge_s for edge_s in (*objectives, *deadlines) if edge_s is not None}
    return tuple(sorted({*metric.edges, *configured}))


def all_edges(
    classes: Iterable[Slo], limits: CoordinatorLimits
) -> Mapping[Metric, tuple[float, ...]]:
    """The edges of each histogram of the catalogue."""
    classes = tuple(classes)
    histograms = (metric for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM)
    return {metric: _edges_of(metric, classes, limits) for metric in histograms}


def changed_edges(
    old: Mapping[Metric, tuple[float, ...]], new: Mapping[Metric, tuple[float, ...]]
) -> tuple[ChangedEdges, ...]:
    """Each histogram whose edges differ, in the catalogue's order."""
    return tuple(
        ChangedEdges(
            metric=metric,
            added_s=tuple(sorted({*new[metric]} - {*old[metric]})),
            removed_s=tuple(sorted({*old[metric]} - {*new[metric]})),
        )
        for metric in new
        if new[metric] != old[metric]
    )


def digest(edges: Iterable[float]) -> str:
    """The value of the label `edges`; equal in every process for equal edges."""
    text = ",".join(map(floatToGoString, edges))
    return sha256(text.encode()).hexdigest()[:_DIGITS]


def _objective_s(objective: Objective, slo: Slo) -> float | None:
    match objective:
        case Objective.TTFT:
            return slo.ttft_s
        case Objective.TPOT:
            return slo.tpot_s
        case Objective.ITL:
            return slo.itl_p99_s
        case Objective.GOODPUT:
            raise ValueError("goodput: has no seconds, expected an objective for a latency")
        case _:
            assert_never(objective)


def _deadlines_s(limits: CoordinatorLimits) -> Mapping[Deadline, float]:
    return {
        Deadline.QUEUE_WAIT: limits.queue_timeout_s,
        Deadline.FIRST_TOKEN: limits.first_token_timeout_s,
        Deadline.STALL: limits.stall_timeout_s,
        Deadline.RESUME: limits.resume_timeout_s,
        Deadline.TOTAL: limits.total_timeout_s,
        Deadline.TRANSFER: limits.transfer_deadline_s,
        Deadline.LEASE: limits.lease_s,
    }
