"""The coordinator's table of replicas: joined, lost, draining, loaded, and our own work on each."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.domain.fleet import FleetView, Load, ReplicaFacts, ReplicaView


class FleetTable:
    """Frozen views by replica id; a change replaces one view, so a snapshot costs nothing."""

    def __init__(self) -> None:
        self._views: dict[str, ReplicaView] = {}
        self._readonly = MappingProxyType(self._views)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._views

    def __len__(self) -> int:
        return len(self._views)

    def get(self, replica_id: str) -> ReplicaView | None:
        """The view of a replica; None when it is not in the fleet."""
        return self._views.get(replica_id)

    def view(self, at_s: float) -> FleetView:
        """What a decision made now sees."""
        return FleetView(at_s=at_s, replicas=self._readonly)

    def join(self, facts: ReplicaFacts, now_s: float) -> None:
        """Add a replica with nothing in flight on it."""
        self._views[facts.replica_id] = ReplicaView(facts=facts, load_at_s=now_s)

    def lose(self, replica_id: str) -> None:
        """Forget a replica; unknown ids are ignored."""
        self._views.pop(replica_id, None)

    def drain(self, replica_id: str) -> None:
        """Mark a replica as taking no new work."""
        if view := self._views.get(replica_id):
            self._views[replica_id] = replace(view, draining=True)

    def report(self, replica_id: str, load: Load, now_s: float) -> None:
        """Keep a load snapshot."""
        if view := self._views.get(replica_id):
            self._views[replica_id] = replace(view, load=load, load_at_s=now_s)

    def charge(self, replica_id: str, *, legs: int, tokens: int) -> None:
        """Add to (or, with negative numbers, take from) our own work in flight on a replica."""
        if view := self._views.get(replica_id):
            self._views[replica_id] = replace(
                view,
                inflight_legs=view.inflight_legs + legs,
                inflight_tokens=view.inflight_tokens + tokens,
            )
