"""What was since the beginning: every class over the window of its own target, and who used what.

*Theory of operation.* Coordinators report totals. The last report of each is kept, so everything
together is a sum over coordinators, also over those that are gone or have begun again. Those that
are heard of in the first minute may be older than these ledgers: they count from their first report
on, so that what was used and what replicas cost are of one time. For classes,
what has come in since a coordinator's last report is added to the hour that it came in; a target
over thirty days looks at as many hours. Replicas cost from being asked for to being gone, whatever
they do: that time is added up from look to look.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.control.accounting.class_counts import ClassCounts, by_class
from baton.domain.demand import CoordinatorReport, Spent, Tally
from baton.domain.slo import Slo
from baton.policy.scaling.observation import PoolObservation

_HOUR_S = 3600.0
_FIGURES = Tally._fields[4:]
"""All but what a row is of."""
_NONE = ClassCounts()
_FIRST_S = 60.0
_MOST_COORDINATORS = 256
"""Whose last reports are kept apart; the oldest beyond that are added up for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the replicas of one pool have cost, in device-seconds, and how long they computed."""

    device_s: float = 0.0
    busy_s: float = 0.0


class Ledgers:
    """See the module."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, CoordinatorReport] = OrderedDict()
        self._bases: dict[str, CoordinatorReport] = {}
        self._began_at_s: float | None = None
        self._past: dict[tuple[str, ...], Tally] = {}
        self._past_spent: dict[tuple[str, str], float] = {}
        self._hours: deque[tuple[float, dict[str, ClassCounts]]] = deque()
        self._longest_s = _HOUR_S
        self._held: dict[str, Held] = {}
        self._held_at_s: float | None = None

    def take(self, report: CoordinatorReport, now_s: float) -> None:
        """Take in a coordinator's report, the first or one that is newer than its last."""
        name = report.coordinator_id
        if self._began_at_s is None:
            self._began_at_s = now_s
        before = self._last.pop(name, None)
        if before is not None and _is_another_life(before, report):
            self._fold(before)
            before = None
        elif before is None and now_s - self._began_at_s <= _FIRST_S:
            self._bases[name] = report
        self._last[name] = report
        if before is not None:
            self._add_to_hour(before, report, now_s)
        while len(self._last) > _MOST_COORDINATORS:
            self._fold(self._last.popitem(last=False)[1])

    def held(
        self, pools: Iterable[PoolObservation], computed_s: Mapping[str, float], now_s: float
    ) -> None:
        """So many replicas there were since the last look; `computed_s` is what they computed."""
        gone_s = 0.0 if self._held_at_s is None else max(0.0, now_s - self._held_at_s)
        self._held_at_s = now_s
        for pool in pools:
            known, devices = self._held.get(pool.name, Held()), pool.gpus_per_replica
            there = pool.ready + pool.starting + pool.draining
            self._held[pool.name] = Held(
                device_s=known.device_s + there * devices * gone_s,
                busy_s=known.busy_s + computed_s.get(pool.name, 0.0) * devices,
            )

    # -------------------------------------------------------------- asked by operators

    def tallies(self) -> tuple[Tally, ...]:
        """Everything together, by class, tenant, model and pool."""
        rows = dict(self._past)
        for report in self._last.values():
            self._add_tallies(rows, report)
        return tuple(rows[key] for key in sorted(rows))

    def spent(self) -> tuple[Spent, ...]:
        """Everything together, by tenant and pool."""
        rows = dict(self._past_spent)
        for report in self._last.values():
            self._add_spent(rows, report)
        return tuple(Spent(*key, rows[key]) for key in sorted(rows))

    def pools(self) -> Mapping[str, Held]:
        """What replicas have cost, by pool."""
        return dict(self._held)

    def attained(self, slo: Slo, now_s: float) -> ClassCounts:
        """A class over the window of its target, to the hour."""
        total = _NONE
        for begun_s, classes in self._hours:
            if begun_s > now_s - max(slo.window_s, _HOUR_S):
                total += classes.get(slo.name, _NONE)
        return total

    def remember_for(self, window_s: float) -> None:
        """Keep hours for the longest window that a class has."""
        self._longest_s = max(_HOUR_S, window_s)

    # -------------------------------------------------------------- bookkeeping

    def _add_to_hour(self, before: CoordinatorReport, now: CoordinatorReport, now_s: float) -> None:
        hour_s = math.floor(now_s / _HOUR_S) * _HOUR_S
        if not self._hours or self._hours[-1][0] != hour_s:
            self._hours.append((hour_s, {}))
            while self._hours[0][0] <= now_s - self._longest_s - _HOUR_S:
                self._hours.popleft()
        classes, had = self._hours[-1][1], by_class(before.tallies)
        for name, counts in by_class(now.tallies).items():
            classes[name] = classes.get(name, _NONE) + (counts - had.get(name, _NONE))

    def _fold(self, report: CoordinatorReport) -> None:
        """Its coordinator will report no more, or begins from zero."""
        self._add_tallies(self._past, report)
        self._add_spent(self._past_spent, report)
        self._bases.pop(report.coordinator_id, None)

    def _add_tallies(self, rows: dict[tuple[str, ...], Tally], report: CoordinatorReport) -> None:
        base = self._bases.get(report.coordinator_id)
        had = {} if base is None else {row[:4]: row for row in base.tallies}
        for row in report.tallies:
            known, before = rows.get(row[:4], Tally(*row[:4])), had.get(row[:4], Tally(*row[:4]))
            more = {
                name: getattr(known, name) + getattr(row, name) - getattr(before, name)
                for name in _FIGURES
            }
            rows[row[:4]] = known._replace(**more)

    def _add_spent(self, rows: dict[tuple[str, str], float], report: CoordinatorReport) -> None:
        base = self._bases.get(report.coordinator_id)
        had = {} if base is None else {row[:2]: row.gpu_s for row in base.spent}
        for row in report.spent:
            key = row[:2]
            rows[key] = rows.get(key, 0.0) + row.gpu_s - had.get(key, 0.0)


def _is_another_life(before: CoordinatorReport, now: CoordinatorReport) -> bool:
    went_back = sum(row.judged for row in now.tallies) < sum(row.judged for row in before.tallies)
    return now.at_s < before.at_s or went_back
