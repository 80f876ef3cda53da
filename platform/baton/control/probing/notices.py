"""News of pairs of replicas for operators: each change is reported once."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from baton.control.probing.schedule import Pair, PairSchedule

_MAX_NOTICES = 256


class PairNoticeKind(StrEnum):
    """The kind of a change."""

    QUARANTINED = "pair quarantined"
    RECOVERED = "pair recovered"
    SOURCE_UNREACHABLE = "source unreachable"
    """From every replica that might fetch from it: its listener is gone, even if it is healthy.
    """
    SOURCE_REACHABLE = "source reachable again"
    AGENT_FAILED = "agent failed"
    """A target pulls from no source, though its sources answer it and serve others."""
    AGENT_RECOVERED = "agent recovered"


class PairNotice(NamedTuple):
    """One change."""

    kind: PairNoticeKind
    source_id: str | None
    """None when it is about the target."""
    target_id: str | None
    """None when it is about the source."""
    reason: str
    at_s: float


class PairNotices:
    """Keeps the last 256 changes until they are taken."""

    def __init__(self, schedule: PairSchedule) -> None:
        self._schedule = schedule
        self._unreachable_ids: set[str] = set()
        self._pending: deque[PairNotice] = deque(maxlen=_MAX_NOTICES)

    def pop_all(self) -> tuple[PairNotice, ...]:
        """The changes since this was last called, oldest first."""
        if not self._pending:
            return ()  # it is asked after each event
        notices = tuple(self._pending)
        self._pending.clear()
        return notices

    def note_state(self, pair: Pair, reason: str, now_s: float, *, quarantined: bool) -> None:
        """The pair is or is not quarantined now."""
        if quarantined is pair.quarantine_reported:
            return
        pair.quarantine_reported = quarantined
        kind = PairNoticeKind.QUARANTINED if quarantined else PairNoticeKind.RECOVERED
        source_id, target_id = pair.source.replica_id, pair.target.replica_id
        self._pending.append(
            PairNotice(
                kind=kind,
                source_id=source_id,
                target_id=target_id,
                reason=reason if quarantined else "",
                at_s=now_s,
            )
        )

    def is_unreachable(self, source_id: str) -> bool:
        """Whether no replica reaches this source."""
        return source_id in self._unreachable_ids

    def note_answer(self, pair: Pair, reason: str, now_s: float, *, has_answered: bool) -> None:
        """The pair's target has, or has not, got an answer from its source."""
        pair.unreachable = not has_answered
        source_id = pair.source.replica_id
        if has_answered:
            if source_id in self._unreachable_ids:
                self._unreachable_ids.discard(source_id)
                kind = PairNoticeKind.SOURCE_REACHABLE
                self._pending.append(
                    PairNotice(
                        kind=kind, source_id=source_id, target_id=None, reason="", at_s=now_s
                    )
                )
            return
        if source_id in self._unreachable_ids:
            return
        pairs = list(self._schedule.pairs_from(source_id))
        if all(other.unreachable for other in pairs):
            self._unreachable_ids.add(source_id)
            reason = f"none of {len(pairs)} replicas reaches it; the last error: {reason}"
            kind = PairNoticeKind.SOURCE_UNREACHABLE
            self._pending.append(
                PairNotice(
                    kind=kind, source_id=source_id, target_id=None, reason=reason, at_s=now_s
                )
            )

    def note_agent(self, target_id: str, reason: str, now_s: float) -> None:
        """A target's agent is taken for broken now; no `why`: it is not any more."""
        kind = PairNoticeKind.AGENT_FAILED if reason else PairNoticeKind.AGENT_RECOVERED
        self._pending.append(
            PairNotice(kind=kind, source_id=None, target_id=target_id, reason=reason, at_s=now_s)
        )

    def remove_replica(self, replica_id: str) -> None:
        """A replica is gone; of its next life nothing has been reported yet."""
        self._unreachable_ids.discard(replica_id)
