"""What operators should hear about pairs of replicas: each change is said once."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from baton.control.probing.schedule import Pair, PairSchedule

_KEPT = 256


class PairNoticeKind(StrEnum):
    """What has changed."""

    QUARANTINED = "pair quarantined"
    RECOVERED = "pair recovered"
    SOURCE_UNREACHABLE = "source unreachable"
    """From every replica that might fetch from it: its listener is gone, whatever its health says.
    """
    SOURCE_REACHABLE = "source reachable again"
    AGENT_BROKEN = "agent broken"
    """A target pulls from nobody, though its sources answer it and serve others."""
    AGENT_WELL = "agent well again"


class PairNotice(NamedTuple):
    """One change."""

    kind: PairNoticeKind
    source_id: str | None
    """None when it is about the target."""
    target_id: str | None
    """None when it is about the source."""
    why: str
    at_s: float


class PairNotices:
    """Keeps the last 256 changes until they are taken."""

    def __init__(self, schedule: PairSchedule) -> None:
        self._schedule = schedule
        self._unreachable: set[str] = set()
        self._kept: deque[PairNotice] = deque(maxlen=_KEPT)

    def take(self) -> tuple[PairNotice, ...]:
        """What has changed since this was last called, oldest first."""
        if not self._kept:
            return ()  # it is asked after each event
        notices = tuple(self._kept)
        self._kept.clear()
        return notices

    def note_state(self, pair: Pair, why: str, now_s: float, *, quarantined: bool) -> None:
        """The pair is or is not quarantined now."""
        if quarantined is pair.quarantine_said:
            return
        pair.quarantine_said = quarantined
        kind = PairNoticeKind.QUARANTINED if quarantined else PairNoticeKind.RECOVERED
        source_id, target_id = pair.source.replica_id, pair.target.replica_id
        self._kept.append(PairNotice(kind, source_id, target_id, why if quarantined else "", now_s))

    def is_unreachable(self, source_id: str) -> bool:
        """Whether nobody reaches this source."""
        return source_id in self._unreachable

    def note_answer(self, pair: Pair, why: str, now_s: float, *, reached: bool) -> None:
        """The pair's target has, or has not, got an answer from its source."""
        pair.unreachable = not reached
        source_id = pair.source.replica_id
        if reached:
            if source_id in self._unreachable:
                self._unreachable.discard(source_id)
                kind = PairNoticeKind.SOURCE_REACHABLE
                self._kept.append(PairNotice(kind, source_id, None, "", now_s))
            return
        if source_id in self._unreachable:
            return
        pairs = list(self._schedule.from_source(source_id))
        if all(other.unreachable for other in pairs):
            self._unreachable.add(source_id)
            why = f"none of {len(pairs)} replicas reaches it; the last said: {why}"
            kind = PairNoticeKind.SOURCE_UNREACHABLE
            self._kept.append(PairNotice(kind, source_id, None, why, now_s))

    def note_agent(self, target_id: str, why: str, now_s: float) -> None:
        """A target's agent is taken for broken now; no `why`: it is not any more."""
        kind = PairNoticeKind.AGENT_BROKEN if why else PairNoticeKind.AGENT_WELL
        self._kept.append(PairNotice(kind, None, target_id, why, now_s))

    def leave(self, replica_id: str) -> None:
        """A replica is gone; of its next life nothing has been said yet."""
        self._unreachable.discard(replica_id)
