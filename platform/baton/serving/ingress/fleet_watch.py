"""Keeps the fleet link in step with the membership that Ray reports.

A replica that leaves the membership has been told to stop, but may still be finishing streams: its
link is kept, and no new work is sent there, until the link itself breaks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from baton.domain.events import Event, ReplicaDraining, ReplicaJoined, ReplicaLost
from baton.domain.fleet import LossReason
from baton.serving.ray.membership import Member
from baton.serving.shared.metadata import LINK_ADDRESS, REPLICA_ID
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_MAX_WAIT_S = 10.0
"""A pool that has no replica for so long, while others serve, is missing: requests do without."""


class Links(Protocol):
    """The part of the link client that membership drives."""

    def connect(self, replica_id: str, address: str) -> None:
        """Keep a session with a replica."""
        ...

    def disconnect(self, replica_id: str) -> None:
        """Forget a replica."""
        ...


class FleetWatch:
    """Connects members, drains leavers, forgets the dead."""

    def __init__(self, links: Links, on_event: Callable[[Event], None]) -> None:
        self._links = links
        self._on_event = on_event
        self._members: frozenset[str] = frozenset()
        self._joined: set[str] = set()
        self._draining: set[str] = set()

    def on_members(self, members: frozenset[Member]) -> None:
        """Take in a new view of the membership."""
        addresses = {
            str(member.metadata[REPLICA_ID]): str(member.metadata[LINK_ADDRESS])
            for member in members
            if LINK_ADDRESS in member.metadata
        }
        removed = self._members - addresses.keys()
        self._members = frozenset(addresses)
        for replica_id in sorted(self._draining & addresses.keys()):
            # It was taken to drain, for good; nothing but a new session begins anew.
            self._links.disconnect(replica_id)
        self._draining -= self._members
        for replica_id, address in addresses.items():
            self._links.connect(replica_id, address)
        for replica_id in sorted(removed):
            if replica_id in self._joined:
                self._draining.add(replica_id)
                _log("replica_draining", {"replica_id": replica_id})
                self._on_event(ReplicaDraining(replica_id=replica_id))
            else:
                # A killed replica: its link broke before Ray noticed.
                self._links.disconnect(replica_id)

    def on_link_event(self, event: Event) -> None:
        """Pass an event of the link on; a leaver whose link breaks is forgotten."""
        try:
            self._on_event(event)
        finally:  # whatever came of it, who is joined is known here alone
            self._track_membership(event)

    def _track_membership(self, event: Event) -> None:
        if isinstance(event, ReplicaJoined):
            facts = event.facts
            _log("replica_joined", {"replica_id": facts.replica_id, "role": str(facts.role)})
            self._joined.add(facts.replica_id)
        elif isinstance(event, ReplicaLost):
            expected = event.reason is LossReason.LEFT or event.replica_id in self._draining
            level = logging.INFO if expected else logging.WARNING
            fields = {"replica_id": event.replica_id, "reason": str(event.reason)}
            _log("replica_lost", fields, level)
            self._joined.discard(event.replica_id)
            if event.replica_id in self._draining:
                self._draining.discard(event.replica_id)
                self._links.disconnect(event.replica_id)


def _log(event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
    log_event(_LOGGER, level, event, fields)


class FleetReadiness:
    """Holds readiness back until every pool that always has replicas has one that has joined.

    An ingress that knows one pool only would run both phases there, whatever the configuration
    says. Once ready it stays so: what goes missing later is what placement is for.
    """

    def __init__(self, pools: Iterable[str], *, wait_s: float = _MAX_WAIT_S) -> None:
        self._required_pools = frozenset(pools)
        self._ready = False
        self._wait_s = wait_s
        self._serving_since_s: float | None = None

    def reconfigure(self, pools: Iterable[str]) -> None:
        """Other pools always have replicas now."""
        self._required_pools = frozenset(pools)

    def is_ready(self, joined_pools: Iterable[str], now_s: float) -> bool:
        """Whether to take requests, where replicas of these pools have joined and can serve."""
        if self._ready:
            return True
        serving_pools = frozenset(joined_pools)
        if serving_pools and self._serving_since_s is None:
            self._serving_since_s = now_s
        waited_s = 0.0 if self._serving_since_s is None else now_s - self._serving_since_s
        self._ready = serving_pools >= self._required_pools or waited_s >= self._wait_s
        return self._ready
