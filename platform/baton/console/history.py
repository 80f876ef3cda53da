"""The points of the charts: the last 30 minutes, also without a viewer."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from baton.console.views import Json, service_view

HISTORY_S: Final = 1800.0
"""The time span of charts."""
MIN_SPACING_S: Final = 1.5
"""Points that follow sooner are left out; a tick is 2 s by default."""
_MAX_POINTS: Final = int(HISTORY_S / MIN_SPACING_S)
_MAX_SERIES: Final = 64
"""Classes, and pools, with a history."""
Point = dict[str, float | None]


class History:
    """Points of the last 30 minutes, at most 1,200; a new controller begins with none."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)

    @property
    def newest(self) -> Point | None:
        """The last point; None before the first."""
        return self._points[-1] if self._points else None

    def add(self, report: Json, at_s: float) -> None:
        """Keep the point of a report, unless the last one is too recent."""
        if self._points and at_s - _at_s(self._points[-1]) < MIN_SPACING_S:
            return
        self._points.append(make_point(report, at_s))
        while at_s - _at_s(self._points[0]) > HISTORY_S:
            self._points.popleft()

    def columns(self, now_s: float) -> dict[str, list[float | None]]:
        """One column for each series, of equal length; None for missing values."""
        points = [point for point in self._points if now_s - _at_s(point) <= HISTORY_S]
        names = dict.fromkeys(name for point in points for name in point)
        return {name: [point.get(name) for point in points] for name in names}


def make_point(report: Json, at_s: float) -> Point:
    """Rates, attainment by class and replicas by pool at one moment; names are `kind/name`."""
    demand: dict[str, Any] = report.get("demand") or {}
    service = service_view(report)
    point: Point = {
        "at_s": round(at_s, 3),
        "offered_per_s": demand.get("requests_per_s"),
        "goodput_per_s": _number(service["goodput_per_s"]) if report.get("classes") else None,
        "rejected_per_s": demand.get("rejected_per_s"),
        "in_flight": demand.get("in_flight"),
        "queued": demand.get("queued"),
    }
    for row in (report.get("classes") or ())[:_MAX_SERIES]:
        point[f"attainment/{row['class']}"] = row["attainment"]
    for row in (report.get("pools") or ())[:_MAX_SERIES]:
        point[f"desired/{row['pool']}"] = row["desired"]
        point[f"ready/{row['pool']}"] = row["ready"]
    return point


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _at_s(point: Point) -> float:
    return point["at_s"] or 0.0
