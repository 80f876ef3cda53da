"""The sessions of a replica with its coordinators, and which of them waits for which leg."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.runtime.link.frames import ReplicaBeat
from baton.runtime.link.liveness import HeartbeatMonitor


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One coordinator's session, from its `Open` until it ends."""

    peer: bytes
    coordinator_id: str
    session_id: str
    heartbeat_monitor: HeartbeatMonitor
    next_seq: int = 1
    received_legs: int = 0
    needs_snapshot: bool = False
    """It waits for a snapshot of the prefix cache, and gets no updates before."""
    last_sent_beat: ReplicaBeat | None = None
    beats_since_sent: int = 0
    """Heartbeats since `last_sent_beat`, with the next."""
    links_version: int = 0
    """Version of the pulls in its last report."""
    legs: set[str] = field(default_factory=set)
    aborting: set[str] = field(default_factory=set)
    """Legs whose abort the coordinator requested, still unanswered."""

    def on_beat_sent(self, beat: ReplicaBeat, now_s: float) -> None:
        """Note a sent heartbeat: an idle replica's coordinator expects and sends fewer."""
        self.last_sent_beat, self.beats_since_sent = beat, 0
        if beat.load.total_requests:
            self.heartbeat_monitor.set_busy(now_s)
        else:
            self.heartbeat_monitor.set_idle()


class LegOwners:
    """The owner of each leg, and the requesters of each abort."""

    def __init__(self) -> None:
        self.by_leg: dict[str, Session] = {}
        """Read-only: read for each output of each step."""
        self._abort_requesters: dict[str, Session] = {}

    def assign(self, session: Session, leg_id: str) -> bool:
        """Give a leg to a session; False when it has an owner."""
        if leg_id in self.by_leg:
            return False
        self.by_leg[leg_id] = session
        session.legs.add(leg_id)
        return True

    def unassign(self, leg_id: str) -> Session | None:
        """Take a leg from its owner and return the owner; None without an owner."""
        session = self.by_leg.pop(leg_id, None)
        if session is not None:
            session.legs.discard(leg_id)
        return session

    def request_abort(
        self, session: Session, leg_ids: Iterable[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Add a requester of aborts; returns the legs to abort and those that are gone."""
        ids = tuple(dict.fromkeys(leg_ids))
        legs, aborting = session.legs, session.aborting
        ended_ids = tuple(i for i in ids if i not in legs and i not in aborting)
        new_ids = tuple(i for i in ids if i in legs and i not in aborting)
        aborting.update(new_ids)
        self._abort_requesters.update(dict.fromkeys(new_ids, session))
        return new_ids, ended_ids

    def on_aborted(self, leg_ids: Iterable[str]) -> dict[Session, list[str]]:
        """Forget legs that no longer run; returns each requester and its legs."""
        ids_by_session: dict[Session, list[str]] = {}
        for leg_id in leg_ids:
            self.unassign(leg_id)
            session = self._abort_requesters.pop(leg_id, None)
            if session is not None:
                session.aborting.discard(leg_id)
                ids_by_session.setdefault(session, []).append(leg_id)
        return ids_by_session

    def remove_session(self, session: Session) -> None:
        """Forget a session; `session.legs` keeps its legs."""
        for leg_id in session.legs:
            del self.by_leg[leg_id]
        for leg_id in session.aborting:
            del self._abort_requesters[leg_id]

    def clear(self) -> None:
        """Forget all sessions."""
        self.by_leg.clear()
        self._abort_requesters.clear()
