"""The coordinator's table of replicas: joined, lost, draining, loaded, and our own work on each."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from baton.domain.fleet import (
    EligibleReplicas,
    FleetView,
    Health,
    Load,
    ReplicaFacts,
    ReplicaView,
    Role,
)
from baton.domain.value import evolve

_MAX_PEER_LOAD_FACTOR = 64.0
"""Beyond it the sums say more of reports that are late than of other coordinators."""
_NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class _SentLegs:
    """The legs sent to one life of a replica."""

    sent_count: int = 0
    """How many, in all; the replica counts them too."""
    unreported: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By leg: its number, and its tokens. In order; not in the last snapshot, as far as we know."""
    reported: int = 0
    """How many of the legs in the last snapshot lived when it came."""
    streams: set[str] = field(default_factory=set)
    """Legs that live and decode, or will."""
    unreported_adapters: dict[str, str] = field(default_factory=dict)
    """By unseen leg: the adapter that it needs, if any."""
    live_adapters: dict[str, str] = field(default_factory=dict)
    """The same of every leg that lives."""

    @property
    def adapter_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Adapters of unseen legs, and of all legs."""
        if not self.live_adapters:
            return _NONE, _NONE
        return frozenset(self.unreported_adapters.values()), frozenset(self.live_adapters.values())


class FleetTable:
    """Frozen views by replica id; a change replaces one view, so a snapshot costs nothing.

    A load snapshot is a little old when it arrives, and does not include legs sent meanwhile.
    Replicas therefore say how many of our legs each snapshot includes; later legs are *unseen* and
    counted on top of it.
    """

    def __init__(self) -> None:
        self._views: dict[str, ReplicaView] = {}
        self._sent: dict[str, _SentLegs] = {}
        self._last_queue_at_s: dict[str, float] = {}
        self._readonly_views = MappingProxyType(self._views)
        self._eligible: EligibleReplicas | None = None
        """The replicas that take new work; None: to be found out, after a change."""
        self._inflight_legs = 0
        self._reported_requests = 0
        self._own_reported_legs = 0

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._views

    def __len__(self) -> int:
        return len(self._views)

    @property
    def ids(self) -> AbstractSet[str]:
        """Every replica that is known."""
        return self._views.keys()

    def get(self, replica_id: str) -> ReplicaView | None:
        """The view of a replica; None when it is not in the fleet."""
        return self._views.get(replica_id)

    def view(self, at_s: float) -> FleetView:
        """The input of a decision made now."""
        if self._eligible is None:
            self._eligible = EligibleReplicas.of(self._views)
        return FleetView(
            at_s=at_s,
            replicas=self._readonly_views,
            cached_eligible=self._eligible,
            peer_load_factor=self.peer_load_factor,
        )

    @property
    def has_eligible_replica(self) -> bool:
        """Whether `view` has an eligible replica; its roster of all need not be made for that."""
        return not all(view.draining for view in self._views.values())

    @property
    def has_work(self) -> bool:
        """Whether a leg of ours runs anywhere."""
        return self._inflight_legs > 0

    @property
    def peer_load_factor(self) -> float:
        """How many legs the fleet gets for each of ours: all that are reported, by ours of them.

        Those that have ended since count in both.
        """
        return min(
            _MAX_PEER_LOAD_FACTOR,
            max(1.0, self._reported_requests / max(1, self._own_reported_legs)),
        )

    def last_queued_at_s(self, replica_id: str, now_s: float) -> float | None:
        """When a replica may last have had a queue; None when it is not known to have had one.

        Until a report says that the queue is gone it may be there, so that is when it was last
        seen; and now, without a report of it.
        """
        view = self._views.get(replica_id)
        has_queue = view is not None and view.load.queued_requests > 0
        return now_s if has_queue else self._last_queue_at_s.get(replica_id)

    def add(self, facts: ReplicaFacts, now_s: float) -> None:
        """Add a replica with nothing in flight on it."""
        self._replace_view(facts.replica_id, ReplicaView(facts=facts, load_received_at_s=now_s))
        self._sent[facts.replica_id] = _SentLegs()
        self._last_queue_at_s.pop(facts.replica_id, None)
        self._eligible = None

    def remove(self, replica_id: str) -> None:
        """Forget a replica; unknown ids are ignored."""
        if replica_id in self._views:
            self._replace_view(replica_id, None)
            self._own_reported_legs -= self._sent.pop(replica_id).reported
            self._last_queue_at_s.pop(replica_id, None)
            self._eligible = None

    def mark_draining(self, replica_id: str) -> None:
        """Mark a replica as taking no new work."""
        if view := self._views.get(replica_id):
            self._replace_view(replica_id, evolve(view, draining=True))
            self._eligible = None

    def set_health(self, replica_id: str, health: Health) -> None:
        """Note whether a replica is counted on; unknown ids are ignored."""
        view = self._views.get(replica_id)
        if view is not None and view.health is not health:
            self._replace_view(replica_id, evolve(view, health=health))
            self._eligible = None

    def change_role(self, replica_id: str, role: Role) -> ReplicaView | None:
        """Note what a replica is meant for now: its view; None when it is unknown."""
        if view := self._views.get(replica_id):
            self._replace_view(replica_id, evolve(view, facts=replace(view.facts, role=role)))
            self._eligible = None
        return self._views.get(replica_id)

    def on_load_report(
        self, replica_id: str, load: Load, now_s: float, *, received_legs: int | None = None
    ) -> None:
        """Keep a load snapshot, which knows of our first `received_legs` legs; None: of all."""
        if view := self._views.get(replica_id):
            if view.load.queued_requests > 0:
                self._last_queue_at_s[replica_id] = now_s
            sent = self._sent[replica_id]
            unreported = sent.unreported
            while unreported:
                leg_id = next(iter(unreported))
                if received_legs is not None and unreported[leg_id][0] > received_legs:
                    break
                del unreported[leg_id]
                sent.unreported_adapters.pop(leg_id, None)
            adapters = sent.adapter_names
            own_reported = view.inflight_legs - len(unreported)
            self._own_reported_legs += own_reported - sent.reported
            sent.reported = own_reported
            self._replace_view(
                replica_id,
                ReplicaView(
                    facts=view.facts,
                    load=load,
                    load_received_at_s=now_s,
                    draining=view.draining,
                    health=view.health,
                    inflight_legs=view.inflight_legs,
                    inflight_tokens=view.inflight_tokens,
                    inflight_streams=view.inflight_streams,
                    unreported_legs=len(unreported),
                    unreported_tokens=sum([tokens for _, tokens in unreported.values()])
                    if unreported
                    else 0,
                    unreported_adapters=adapters[0],
                    inflight_adapters=adapters[1],
                ),
            )

    def on_leg_sent(
        self,
        replica_id: str,
        leg_id: str,
        tokens: int,
        *,
        decodes: bool = True,
        adapter: str | None = None,
    ) -> None:
        """A leg was sent to a replica, which must compute these prompt tokens for it.

        It `decodes` unless it is over with the prompt.
        """
        if view := self._views.get(replica_id):
            sent = self._sent[replica_id]
            sent.sent_count += 1
            sent.unreported[leg_id] = (sent.sent_count, tokens)
            if decodes:
                sent.streams.add(leg_id)
            if adapter is not None:
                sent.unreported_adapters[leg_id] = sent.live_adapters[leg_id] = adapter
            added, adapters = (1, tokens, decodes), sent.adapter_names
            updated = _with_changes(view, added, (1, tokens), adapters, view.load)
            self._replace_view(replica_id, updated)

    def on_leg_ended(self, replica_id: str, leg_id: str, tokens: int) -> None:
        """A leg that was begun is over."""
        if view := self._views.get(replica_id):
            sent = self._sent[replica_id]
            was_unreported = sent.unreported.pop(leg_id, None) is not None
            decoded = leg_id in sent.streams
            sent.streams.discard(leg_id)
            sent.unreported_adapters.pop(leg_id, None)
            sent.live_adapters.pop(leg_id, None)
            inflight_change = (-1, -tokens, -decoded)
            unreported_change = (-was_unreported, -was_unreported * tokens)
            load = view.load
            if not was_unreported and load.running_requests:
                sent.reported -= 1
                self._own_reported_legs -= 1
                load = load._replace(running_requests=load.running_requests - 1)
            self._replace_view(
                replica_id,
                _with_changes(view, inflight_change, unreported_change, sent.adapter_names, load),
            )

    def on_leg_unsent(self, replica_id: str, leg_id: str) -> None:
        """A leg that was begun never left: the replica will not count it."""
        sent = self._sent.get(replica_id)
        if sent is None or leg_id not in sent.unreported:
            return
        unsent_number, _ = sent.unreported[leg_id]
        sent.sent_count -= 1
        sent.unreported = {
            other: (number - (number > unsent_number), tokens)
            for other, (number, tokens) in sent.unreported.items()
        }

    def _replace_view(self, replica_id: str, view: ReplicaView | None) -> None:
        """Replace a view, or take it out, and keep the sums over all of them."""
        old = self._views.pop(replica_id, None) if view is None else self._views.get(replica_id)
        if old is not None and view is not None and old.load is view.load:  # a leg begins or ends
            self._views[replica_id] = view
            self._inflight_legs += view.inflight_legs - old.inflight_legs
            return
        if old is not None:
            self._inflight_legs -= old.inflight_legs
            self._reported_requests -= old.load.total_requests
        if view is not None:
            self._views[replica_id] = view
            self._inflight_legs += view.inflight_legs
            self._reported_requests += view.load.total_requests

    def check_integrity(self) -> None:
        """Raise AssertionError when a view disagrees with the sent legs."""
        sums = (self._inflight_legs, self._reported_requests, self._own_reported_legs)
        views = self._views.values()
        counted = (
            sum(view.inflight_legs for view in views),
            sum(view.load.total_requests for view in views),
            sum(sent.reported for sent in self._sent.values()),
        )
        assert sums == counted, f"sums over the fleet are {sums}, counted {counted}"
        assert self._last_queue_at_s.keys() <= self._views.keys(), "queues of unknown replicas"
        eligible = self._eligible
        assert eligible is None or eligible == EligibleReplicas.of(self._views), (
            "the roster is not the views'"
        )
        for replica_id, view in self._views.items():
            sent = self._sent[replica_id]
            assert view == _with_unreported(view, sent), f"{replica_id}: unseen"
            streams = (view.inflight_streams, len(sent.streams))
            assert streams[0] == streams[1] <= view.inflight_legs, f"{replica_id}: {streams}"


def _with_changes(
    view: ReplicaView,
    inflight: tuple[int, int, int],
    unreported: tuple[int, int],
    adapters: tuple[frozenset[str], frozenset[str]],
    load: Load,
) -> ReplicaView:
    """A view with added legs, tokens and streams. `replace` takes four times as long."""
    return ReplicaView(
        facts=view.facts,
        load=load,
        load_received_at_s=view.load_received_at_s,
        draining=view.draining,
        health=view.health,
        inflight_legs=view.inflight_legs + inflight[0],
        inflight_tokens=view.inflight_tokens + inflight[1],
        inflight_streams=view.inflight_streams + inflight[2],
        unreported_legs=view.unreported_legs + unreported[0],
        unreported_tokens=view.unreported_tokens + unreported[1],
        unreported_adapters=adapters[0],
        inflight_adapters=adapters[1],
    )


def _with_unreported(view: ReplicaView, sent: _SentLegs) -> ReplicaView:
    assert sent.unreported_adapters.keys() <= sent.unreported.keys(), (
        "adapters of legs that were seen"
    )
    assert sent.unreported_adapters.items() <= sent.live_adapters.items(), (
        "adapters of legs that are over"
    )
    unreported_adapters, inflight_adapters = sent.adapter_names
    return evolve(
        view,
        unreported_legs=len(sent.unreported),
        unreported_tokens=sum(tokens for _, tokens in sent.unreported.values()),
        unreported_adapters=unreported_adapters,
        inflight_adapters=inflight_adapters,
    )
