"""Totals since the start: every class over the window of its target, and usage by tenant.

*Theory of operation.* Coordinators report totals. The last report of each is kept, also of those
that are gone or have restarted, and everything together is their sum. Coordinators whose first
report comes in the first minute count from that report on, so that usage and cost cover the same
time. The growth of a class is added to the hour in which it was reported; a target over thirty days
reads that many hours. Replicas cost from request to end, idle or not.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.control.accounting.class_counts import ClassCounts, by_class
from baton.domain.demand import CoordinatorReport, GpuUsage, Tally
from baton.domain.slo import Slo
from baton.policy.scaling.observation import PoolObservation

_HOUR_S = 3600.0
_COUNT_FIELDS = Tally._fields[4:]
"""All but the key of a row."""
_ZERO = ClassCounts()
_STARTUP_WINDOW_S = 60.0
_MAX_COORDINATORS = 256
"""Whose last reports are kept apart; the oldest beyond that are added up for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapacity:
    """The cost of the replicas of one pool, in device-seconds, and their computing time."""

    device_s: float = 0.0
    busy_s: float = 0.0


class ClusterTotals:
    """Totals of all coordinators since the start."""

    def __init__(self) -> None:
        self._last_reports: OrderedDict[str, CoordinatorReport] = OrderedDict()
        self._base_reports: dict[str, CoordinatorReport] = {}
        self._started_at_s: float | None = None
        self._folded_tallies: dict[tuple[str, ...], Tally] = {}
        self._folded_gpu_s: dict[tuple[str, str], float] = {}
        self._hourly_counts: deque[tuple[float, dict[str, ClassCounts]]] = deque()
        self._max_window_s = _HOUR_S
        self._capacities: dict[str, PoolCapacity] = {}
        self._capacities_at_s: float | None = None

    def ingest(self, report: CoordinatorReport, now_s: float) -> None:
        """Take in a coordinator's report, the first or a newer report than its last."""
        name = report.coordinator_id
        if self._started_at_s is None:
            self._started_at_s = now_s
        previous = self._last_reports.pop(name, None)
        if previous is not None and _has_restarted(previous, report):
            self._fold(previous)
            previous = None
        elif previous is None and now_s - self._started_at_s <= _STARTUP_WINDOW_S:
            self._base_reports[name] = report
        self._last_reports[name] = report
        if previous is not None:
            self._add_to_hour(previous, report, now_s)
        while len(self._last_reports) > _MAX_COORDINATORS:
            self._fold(self._last_reports.popitem(last=False)[1])

    def record_capacity(
        self, pools: Iterable[PoolObservation], computed_s: Mapping[str, float], now_s: float
    ) -> None:
        """Add these replicas' time since the last look; `computed_s` is their computing time."""
        elapsed_s = (
            0.0 if self._capacities_at_s is None else max(0.0, now_s - self._capacities_at_s)
        )
        self._capacities_at_s = now_s
        for pool in pools:
            previous, devices = (
                self._capacities.get(pool.name, PoolCapacity()),
                pool.gpus_per_replica,
            )
            replicas = pool.ready_replicas + pool.starting + pool.draining
            self._capacities[pool.name] = PoolCapacity(
                device_s=previous.device_s + replicas * devices * elapsed_s,
                busy_s=previous.busy_s + computed_s.get(pool.name, 0.0) * devices,
            )

    # -------------------------------------------------------------- asked by operators

    def tallies(self) -> tuple[Tally, ...]:
        """Everything together, by class, tenant, model and pool."""
        rows = dict(self._folded_tallies)
        for report in self._last_reports.values():
            self._add_tallies(rows, report)
        return tuple(rows[key] for key in sorted(rows))

    def gpu_usage(self) -> tuple[GpuUsage, ...]:
        """Everything together, by tenant and pool."""
        rows = dict(self._folded_gpu_s)
        for report in self._last_reports.values():
            self._add_gpu_s(rows, report)
        return tuple(GpuUsage(*key, rows[key]) for key in sorted(rows))

    def pools(self) -> Mapping[str, PoolCapacity]:
        """The cost of replicas, by pool."""
        return dict(self._capacities)

    def counts_in_window(self, slo: Slo, now_s: float) -> ClassCounts:
        """A class over the window of its target, to the hour."""
        total = _ZERO
        for hour_started_at_s, classes in self._hourly_counts:
            if hour_started_at_s > now_s - max(slo.window_s, _HOUR_S):
                total += classes.get(slo.name, _ZERO)
        return total

    def set_max_window(self, window_s: float) -> None:
        """Keep hours for the longest window that a class has."""
        self._max_window_s = max(_HOUR_S, window_s)

    # -------------------------------------------------------------- bookkeeping

    def _add_to_hour(
        self, previous: CoordinatorReport, current: CoordinatorReport, now_s: float
    ) -> None:
        hour_s = math.floor(now_s / _HOUR_S) * _HOUR_S
        if not self._hourly_counts or self._hourly_counts[-1][0] != hour_s:
            self._hourly_counts.append((hour_s, {}))
            while self._hourly_counts[0][0] <= now_s - self._max_window_s - _HOUR_S:
                self._hourly_counts.popleft()
        classes, previous_counts = self._hourly_counts[-1][1], by_class(previous.tallies)
        for name, counts in by_class(current.tallies).items():
            classes[name] = classes.get(name, _ZERO) + (counts - previous_counts.get(name, _ZERO))

    def _fold(self, report: CoordinatorReport) -> None:
        """Its coordinator will report no more, or begins from zero."""
        self._add_tallies(self._folded_tallies, report)
        self._add_gpu_s(self._folded_gpu_s, report)
        self._base_reports.pop(report.coordinator_id, None)

    def _add_tallies(self, rows: dict[tuple[str, ...], Tally], report: CoordinatorReport) -> None:
        base = self._base_reports.get(report.coordinator_id)
        base_rows = {} if base is None else {row[:4]: row for row in base.tallies}
        for row in report.tallies:
            total, base_row = (
                rows.get(row[:4], Tally(*row[:4])),
                base_rows.get(row[:4], Tally(*row[:4])),
            )
            counts = {
                name: getattr(total, name) + getattr(row, name) - getattr(base_row, name)
                for name in _COUNT_FIELDS
            }
            rows[row[:4]] = total._replace(**counts)

    def _add_gpu_s(self, rows: dict[tuple[str, str], float], report: CoordinatorReport) -> None:
        base = self._base_reports.get(report.coordinator_id)
        base_gpu_s = {} if base is None else {row[:2]: row.gpu_s for row in base.gpu_usage}
        for row in report.gpu_usage:
            key = row[:2]
            rows[key] = rows.get(key, 0.0) + row.gpu_s - base_gpu_s.get(key, 0.0)


def _has_restarted(previous: CoordinatorReport, current: CoordinatorReport) -> bool:
    went_back = sum(row.evaluated for row in current.tallies) < sum(
        row.evaluated for row in previous.tallies
    )
    return current.at_s < previous.at_s or went_back
