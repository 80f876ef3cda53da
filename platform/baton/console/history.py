"""The last minutes of the charts' data, in columns, one place for each poll."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from baton.console.views import Json, service_view

MAX_POINTS: Final = 600
MAX_AGE_S: Final = 600.0
"""How far back charts go; at a poll a second, as many seconds as there are places."""
MAX_SERIES: Final = 64
"""Classes and pools with a kept history; later series are drawn when others have gone."""

Column = list[float | None]


class History:
    """Points of the last polls, with which a new viewer's charts begin."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._points: deque[dict[str, float | None]] = deque(maxlen=max_points)

    def add(self, report: Json, at_s: float) -> dict[str, float | None]:
        """Keep one point of a report, and return it."""
        point = make_point(report, at_s)
        self._points.append(point)
        return point

    def columns(self, now_s: float) -> dict[str, Column]:
        """One column a series, all of the same length; None where there was nothing."""
        points = [point for point in self._points if _age_s(point, now_s) <= MAX_AGE_S]
        names = dict.fromkeys(name for point in points for name in point)
        return {name: [point.get(name) for point in points] for name in names}


def make_point(report: Json, at_s: float) -> dict[str, float | None]:
    """One moment: rates, attainment by class, replicas by pool; names are `kind/name`."""
    demand: dict[str, Any] = report.get("demand") or {}
    service = service_view(report)
    point: dict[str, float | None] = {
        "at_s": round(at_s, 3),
        "offered_per_s": demand.get("requests_per_s"),
        "goodput_per_s": _number(service["goodput_per_s"]) if report.get("classes") else None,
        "refused_per_s": demand.get("refused_per_s"),
        "in_flight": demand.get("in_flight"),
        "queued": demand.get("queued"),
    }
    for row in (report.get("classes") or ())[:MAX_SERIES]:
        point[f"attainment/{row['class']}"] = row["attainment"]
    for row in (report.get("pools") or ())[:MAX_SERIES]:
        point[f"desired/{row['pool']}"] = row["desired"]
        point[f"ready/{row['pool']}"] = row["ready"]
    return point


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _age_s(point: dict[str, float | None], now_s: float) -> float:
    return now_s - (point["at_s"] or 0.0)
