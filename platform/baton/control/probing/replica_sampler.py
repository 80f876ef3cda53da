"""Replicas by layout, among which one is drawn as quickly when there are thousands."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from baton.domain.fleet import ReplicaFacts


class Candidates:
    """Those that may be one end of a pair; the last takes the place of one that leaves."""

    def __init__(self) -> None:
        self._by_layout: dict[str, list[ReplicaFacts]] = {}
        self._places: dict[str, int] = {}

    def join(self, facts: ReplicaFacts) -> None:
        """Add a replica, which is not among them."""
        alike = self._by_layout.setdefault(facts.layout, [])
        self._places[facts.replica_id] = len(alike)
        alike.append(facts)

    def leave(self, facts: ReplicaFacts) -> None:
        """Take a replica out, if it is among them."""
        place = self._places.pop(facts.replica_id, None)
        if place is None:
            return
        alike = self._by_layout[facts.layout]
        last = alike.pop()
        if place < len(alike):
            alike[place] = last
            self._places[last.replica_id] = place
        if not alike:
            del self._by_layout[facts.layout]

    def some(self, layout: str, most: int, rng: Random) -> list[ReplicaFacts]:
        """All of a layout; of more than `most`, so many by lot."""
        alike = self._by_layout.get(layout, [])
        return rng.sample(alike, most) if len(alike) > most else list(alike)

    def onwards(self, layout: str, most: int, rng: Random) -> Iterator[ReplicaFacts]:
        """All of a layout, `most` of them at most, from a place by lot."""
        alike = self._by_layout.get(layout, [])
        begin = rng.randrange(len(alike)) if alike else 0
        for step in range(min(most, len(alike))):
            yield alike[(begin + step) % len(alike)]
