"""Replicas by layout, among which one is drawn as quickly when there are thousands."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from baton.domain.fleet import ReplicaFacts


class ReplicaSampler:
    """Those that may be one end of a pair; the last takes the place of one that leaves."""

    def __init__(self) -> None:
        self._by_layout: dict[str, list[ReplicaFacts]] = {}
        self._positions: dict[str, int] = {}

    def add(self, facts: ReplicaFacts) -> None:
        """Add a replica, which is not among them."""
        same_layout = self._by_layout.setdefault(facts.layout, [])
        self._positions[facts.replica_id] = len(same_layout)
        same_layout.append(facts)

    def remove(self, facts: ReplicaFacts) -> None:
        """Take a replica out, if it is among them."""
        position = self._positions.pop(facts.replica_id, None)
        if position is None:
            return
        same_layout = self._by_layout[facts.layout]
        last = same_layout.pop()
        if position < len(same_layout):
            same_layout[position] = last
            self._positions[last.replica_id] = position
        if not same_layout:
            del self._by_layout[facts.layout]

    def sample(self, layout: str, limit: int, rng: Random) -> list[ReplicaFacts]:
        """All of a layout; of more than `limit`, so many by lot."""
        same_layout = self._by_layout.get(layout, [])
        return rng.sample(same_layout, limit) if len(same_layout) > limit else list(same_layout)

    def from_random_start(self, layout: str, limit: int, rng: Random) -> Iterator[ReplicaFacts]:
        """All of a layout, `limit` of them at most, from a place by lot."""
        same_layout = self._by_layout.get(layout, [])
        begin = rng.randrange(len(same_layout)) if same_layout else 0
        for step in range(min(limit, len(same_layout))):
            yield same_layout[(begin + step) % len(same_layout)]
