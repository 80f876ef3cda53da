"""The topics that a viewer can watch, and their sources."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton.console.feed import Feed
from baton.console.views import fleet_view, overview_view, request_row, tick_runs
from baton.domain.commands import RecordSelection

MAX_REQUESTS: Final = 40
MAX_TICKS: Final = 120
MAX_LINKS: Final = 4096
"""Pairs in a frame: a map of 64 by 64."""


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


def make_sources(feed: Feed) -> tuple[Source, ...]:
    """Every source; the overview carries the newest point of the charts."""

    async def overview(watched: frozenset[Topic]) -> Views:
        report = await feed.overview()
        views: dict[Topic, object] = {
            Topic.OVERVIEW: {"point": feed.points.newest, "overview": overview_view(report)}
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
