"""The topics that a viewer can watch, and their sources."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from baton.console.feed import Feed
from baton.console.views import (
    Json,
    fleet_view,
    overview_view,
    request_row,
    service_view,
    tick_runs,
)
from baton.domain.commands import RecordSelection

MAX_REQUESTS: Final = 40
MAX_TICKS: Final = 120
MAX_LINKS: Final = 4096
"""Pairs in a frame: a map of 64 by 64."""
_MAX_POINTS: Final = 600
_MAX_AGE_S: Final = 600.0
"""The time span of charts; at a poll a second, `_MAX_POINTS` cover it."""
_MAX_SERIES: Final = 64
"""Classes, and pools, with a history."""
_Column = list[float | None]


class Topic(StrEnum):
    """The data of a section of the page; names of server-sent events."""

    OVERVIEW = "overview"
    """Watched by every viewer, for the header."""
    FLEET = "fleet"
    LINKS = "links"
    LATEST = "latest"
    MISSED = "missed"
    SLOWEST = "slowest"
    TICKS = "ticks"


Views = Mapping[Topic, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One call of the feed, and its topics."""

    name: str
    """Named to viewers when it fails."""
    topics: frozenset[Topic]
    read: Callable[[frozenset[Topic]], Awaitable[Views]]


def make_sources(feed: Feed, history: History, clock: Callable[[], float]) -> tuple[Source, ...]:
    """Every source; the overview also goes into the history."""

    async def overview(watched: frozenset[Topic]) -> Views:
        report = await feed.overview()
        point = history.add(report, clock())
        views: dict[Topic, object] = {
            Topic.OVERVIEW: {"point": point, "overview": overview_view(report)}
        }
        if Topic.FLEET in watched:
            views[Topic.FLEET] = fleet_view(report)
        return views

    async def links(_watched: frozenset[Topic]) -> Views:
        rows = await feed.links()
        return {Topic.LINKS: {"pairs": len(rows), "links": rows[:MAX_LINKS]}}

    async def ticks(_watched: frozenset[Topic]) -> Views:
        return {Topic.TICKS: {"runs": tick_runs(await feed.ticks(MAX_TICKS))}}

    def requests(topic: Topic, order: RecordSelection) -> Source:
        async def read(_watched: frozenset[Topic]) -> Views:
            reports = await feed.requests(MAX_REQUESTS, order)
            return {topic: {"requests": [request_row(report) for report in reports]}}

        return Source(name="requests", topics=frozenset({topic}), read=read)

    return (
        Source(name="overview", topics=frozenset({Topic.OVERVIEW, Topic.FLEET}), read=overview),
        Source(name="links", topics=frozenset({Topic.LINKS}), read=links),
        requests(Topic.LATEST, RecordSelection.LATEST),
        requests(Topic.MISSED, RecordSelection.MISSED),
        requests(Topic.SLOWEST, RecordSelection.SLOWEST),
        Source(name="ticks", topics=frozenset({Topic.TICKS}), read=ticks),
    )


class History:
    """Points of the last polls, for the charts of new viewers."""

    def __init__(self, max_points: int = _MAX_POINTS) -> None:
        self._points: deque[dict[str, float | None]] = deque(maxlen=max_points)

    def add(self, report: Json, at_s: float) -> dict[str, float | None]:
        """Keep and return the point of a report."""
        point = make_point(report, at_s)
        self._points.append(point)
        return point

    def columns(self, now_s: float) -> dict[str, _Column]:
        """One column for each series, of equal length; None for missing values."""
        points = [point for point in self._points if _age_s(point, now_s) <= _MAX_AGE_S]
        names = dict.fromkeys(name for point in points for name in point)
        return {name: [point.get(name) for point in points] for name in names}


def make_point(report: Json, at_s: float) -> dict[str, float | None]:
    """Rates, attainment by class and replicas by pool at one moment; names are `kind/name`."""
    demand: dict[str, Any] = report.get("demand") or {}
    service = service_view(report)
    point: dict[str, float | None] = {
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


def _age_s(point: dict[str, float | None], now_s: float) -> float:
    return now_s - (point["at_s"] or 0.0)
