"""The coordinator's table of replicas: joined, lost, draining, loaded, and our own work on each."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from baton.domain.fleet import (
    FleetView,
    Load,
    ReplicaFacts,
    ReplicaView,
    Role,
    Roster,
    Standing,
)
from baton.domain.value import evolve

_MOST_CROWD = 64.0
"""Beyond it the sums say more of reports that are late than of other coordinators."""
_NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Sent:
    """What we have sent to one life of a replica."""

    legs: int = 0
    """How many, in all; the replica counts them too."""
    unseen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By leg: its number, and its tokens. In order; not in the last snapshot, as far as we know."""
    streams: set[str] = field(default_factory=set)
    """Legs that live and decode, or will."""
    adapters: dict[str, str] = field(default_factory=dict)
    """By unseen leg: the adapter that it needs, if any."""
    needed: dict[str, str] = field(default_factory=dict)
    """The same of every leg that lives."""

    @property
    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Adapters of unseen legs, and of all legs."""
        if not self.needed:
            return _NONE, _NONE
        return frozenset(self.adapters.values()), frozenset(self.needed.values())


class FleetTable:
    """Frozen views by replica id; a change replaces one view, so a snapshot costs nothing.

    A load snapshot is a little old when it arrives, and does not know of what was sent meanwhile.
    Replicas therefore say how many of our legs each snapshot knows of; later ones are *unseen* and
    counted on top of it.
    """

    def __init__(self) -> None:
        self._views: dict[str, ReplicaView] = {}
        self._sent: dict[str, _Sent] = {}
        self._queued_at_s: dict[str, float] = {}
        self._readonly = MappingProxyType(self._views)
        self._roster: Roster | None = None
        """Who takes new work; None: to be found out, for somebody has come, gone or changed."""
        self._inflight_legs = 0
        self._reported_legs = 0
        self._seen_legs = 0

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
        """What a decision made now sees."""
        if self._roster is None:
            self._roster = Roster.of(self._views)
        return FleetView(
            at_s=at_s, replicas=self._readonly, known_roster=self._roster, crowd=self.crowd
        )

    @property
    def has_work(self) -> bool:
        """Whether a leg of ours runs anywhere."""
        return self._inflight_legs > 0

    @property
    def crowd(self) -> float:
        """How many legs the fleet gets for each of ours: all that are reported, by ours of them."""
        return min(_MOST_CROWD, max(1.0, self._reported_legs / max(1, self._seen_legs)))

    def queue_seen_at_s(self, replica_id: str, now_s: float) -> float | None:
        """When a replica may last have had a queue; None when it is not known to have had one.

        Until a report says that the queue is gone it may be there, so that is when it was last
        seen; and now, while no report has said so.
        """
        view = self._views.get(replica_id)
        waits = view is not None and view.load.queued_requests > 0
        return now_s if waits else self._queued_at_s.get(replica_id)

    def join(self, facts: ReplicaFacts, now_s: float) -> None:
        """Add a replica with nothing in flight on it."""
        self._put(facts.replica_id, ReplicaView(facts=facts, load_at_s=now_s))
        self._sent[facts.replica_id] = _Sent()
        self._queued_at_s.pop(facts.replica_id, None)
        self._roster = None

    def lose(self, replica_id: str) -> None:
        """Forget a replica; unknown ids are ignored."""
        if replica_id in self._views:
            self._put(replica_id, None)
            del self._sent[replica_id]
            self._queued_at_s.pop(replica_id, None)
            self._roster = None

    def drain(self, replica_id: str) -> None:
        """Mark a replica as taking no new work."""
        if view := self._views.get(replica_id):
            self._put(replica_id, evolve(view, draining=True))
            self._roster = None

    def stand(self, replica_id: str, standing: Standing) -> None:
        """Note whether a replica is counted on; unknown ids are ignored."""
        view = self._views.get(replica_id)
        if view is not None and view.standing is not standing:
            self._put(replica_id, evolve(view, standing=standing))
            self._roster = None

    def change_role(self, replica_id: str, role: Role) -> ReplicaView | None:
        """Note what a replica is meant for now: its view; None when it is unknown."""
        if view := self._views.get(replica_id):
            self._put(replica_id, evolve(view, facts=replace(view.facts, role=role)))
            self._roster = None
        return self._views.get(replica_id)

    def report(
        self, replica_id: str, load: Load, now_s: float, *, received_legs: int | None = None
    ) -> None:
        """Keep a load snapshot, which knows of our first `received_legs` legs; None: of all."""
        if view := self._views.get(replica_id):
            if view.load.queued_requests > 0:
                self._queued_at_s[replica_id] = now_s
            sent = self._sent[replica_id]
            unseen = sent.unseen
            while unseen:
                leg_id = next(iter(unseen))
                if received_legs is not None and unseen[leg_id][0] > received_legs:
                    break
                del unseen[leg_id]
                sent.adapters.pop(leg_id, None)
            adapters = sent.names
            self._put(
                replica_id,
                ReplicaView(
                    facts=view.facts,
                    load=load,
                    load_at_s=now_s,
                    draining=view.draining,
                    standing=view.standing,
                    inflight_legs=view.inflight_legs,
                    inflight_tokens=view.inflight_tokens,
                    inflight_streams=view.inflight_streams,
                    unseen_legs=len(unseen),
                    unseen_tokens=sum([tokens for _, tokens in unseen.values()]) if unseen else 0,
                    unseen_adapters=adapters[0],
                    inflight_adapters=adapters[1],
                ),
            )

    def begin(
        self,
        replica_id: str,
        leg_id: str,
        tokens: int,
        *,
        decodes: bool = True,
        adapter: str | None = None,
    ) -> None:
        """A leg was sent to a replica, which must compute so many prompt tokens for it.

        It `decodes` unless it is over with the prompt.
        """
        if view := self._views.get(replica_id):
            sent = self._sent[replica_id]
            sent.legs += 1
            sent.unseen[leg_id] = (sent.legs, tokens)
            if decodes:
                sent.streams.add(leg_id)
            if adapter is not None:
                sent.adapters[leg_id] = sent.needed[leg_id] = adapter
            more = _with_more(view, (1, tokens, decodes), (1, tokens), sent.names)
            self._put(replica_id, more)

    def end(self, replica_id: str, leg_id: str, tokens: int) -> None:
        """A leg that was begun is over."""
        if view := self._views.get(replica_id):
            sent = self._sent[replica_id]
            was_unseen = sent.unseen.pop(leg_id, None) is not None
            decoded = leg_id in sent.streams
            sent.streams.discard(leg_id)
            sent.adapters.pop(leg_id, None)
            sent.needed.pop(leg_id, None)
            fewer = (-1, -tokens, -decoded)
            unseen = (-was_unseen, -was_unseen * tokens)
            self._put(replica_id, _with_more(view, fewer, unseen, sent.names))

    def unsent(self, replica_id: str, leg_id: str) -> None:
        """A leg that was begun never left: the replica will not count it."""
        sent = self._sent.get(replica_id)
        if sent is None or leg_id not in sent.unseen:
            return
        gone, _ = sent.unseen[leg_id]
        sent.legs -= 1
        sent.unseen = {
            other: (number - (number > gone), tokens)
            for other, (number, tokens) in sent.unseen.items()
        }

    def _put(self, replica_id: str, view: ReplicaView | None) -> None:
        """Replace a view, or take it out, and keep the sums over all of them."""
        old = self._views.pop(replica_id, None) if view is None else self._views.get(replica_id)
        if old is not None:
            self._inflight_legs -= old.inflight_legs
            self._reported_legs -= old.load.requests
            self._seen_legs -= old.inflight_legs - old.unseen_legs
        if view is not None:
            self._views[replica_id] = view
            self._inflight_legs += view.inflight_legs
            self._reported_legs += view.load.requests
            self._seen_legs += view.inflight_legs - view.unseen_legs

    def check_integrity(self) -> None:
        """Raise AssertionError when a view disagrees with what was sent."""
        sums = (self._inflight_legs, self._reported_legs, self._seen_legs)
        views = self._views.values()
        counted = (
            sum(view.inflight_legs for view in views),
            sum(view.load.requests for view in views),
            sum(view.inflight_legs - view.unseen_legs for view in views),
        )
        assert sums == counted, f"sums over the fleet are {sums}, counted {counted}"
        assert self._queued_at_s.keys() <= self._views.keys(), "queues of unknown replicas"
        known = self._roster
        assert known is None or known == Roster.of(self._views), "the roster is not the views'"
        for replica_id, view in self._views.items():
            sent = self._sent[replica_id]
            assert view == _with_unseen(view, sent), f"{replica_id}: unseen"
            streams = (view.inflight_streams, len(sent.streams))
            assert streams[0] == streams[1] <= view.inflight_legs, f"{replica_id}: {streams}"


def _with_more(
    view: ReplicaView,
    inflight: tuple[int, int, int],
    unseen: tuple[int, int],
    adapters: tuple[frozenset[str], frozenset[str]],
) -> ReplicaView:
    """A view with so many more legs, tokens and streams. `replace` takes four times as long."""
    return ReplicaView(
        facts=view.facts,
        load=view.load,
        load_at_s=view.load_at_s,
        draining=view.draining,
        standing=view.standing,
        inflight_legs=view.inflight_legs + inflight[0],
        inflight_tokens=view.inflight_tokens + inflight[1],
        inflight_streams=view.inflight_streams + inflight[2],
        unseen_legs=view.unseen_legs + unseen[0],
        unseen_tokens=view.unseen_tokens + unseen[1],
        unseen_adapters=adapters[0],
        inflight_adapters=adapters[1],
    )


def _with_unseen(view: ReplicaView, sent: _Sent) -> ReplicaView:
    assert sent.adapters.keys() <= sent.unseen.keys(), "adapters of legs that were seen"
    assert sent.adapters.items() <= sent.needed.items(), "adapters of legs that are over"
    unseen_adapters, inflight_adapters = sent.names
    return evolve(
        view,
        unseen_legs=len(sent.unseen),
        unseen_tokens=sum(tokens for _, tokens in sent.unseen.values()),
        unseen_adapters=unseen_adapters,
        inflight_adapters=inflight_adapters,
    )
