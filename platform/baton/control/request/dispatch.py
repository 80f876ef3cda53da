"""Requests that are not under way: they wait for a replica or for their turn, or are turned away.

What happens to them once they are let in is in `journey`; who is let in, in `admittance`.
"""

from __future__ import annotations

from typing import Protocol

from baton.control.fleet.fleet_table import FleetTable
from baton.control.queue.cold_start_wait import ColdWait
from baton.control.queue.pending import Waiters
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import Entry
from baton.domain.demand import ColdStart
from baton.domain.errors import (
    BatonError,
    EngineFailed,
    Evicted,
    NoCapacity,
    QueueFull,
    Rejected,
    TooLate,
)
from baton.domain.request import Phase
from baton.policy.admission.decision import Hold, Reason, Shed

_FOR_STREAMS = frozenset({Reason.PACE, Reason.BREAKS})
"""Whoever is held for these waits for streams to end."""


class Journeying(Protocol):
    """What is done with requests that wait no more."""

    limits: CoordinatorLimits
    entries: dict[str, Entry]

    def place(self, entry: Entry, now_s: float) -> None:
        """Begin a route, or wait again."""
        ...

    def wait_until(self, entry: Entry, at_s: float) -> None:
        """Set the deadline of the phase that the entry is in."""
        ...

    def fail(self, entry: Entry, error: BatonError, now_s: float) -> None:
        """End a request in FAILED."""
        ...

    def end(
        self,
        entry: Entry,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> None:
        """Take the last edge."""
        ...


class Turns:
    """Who waits at the coordinator, and when somebody waits no longer."""

    def __init__(self, journeys: Journeying, *, fleet: FleetTable, waiters: Waiters) -> None:
        self._journeys = journeys
        self._fleet = fleet
        self.waiters = waiters
        self.cold = ColdWait(journeys.limits.cold_start_wait_s)

    def enqueue(self, entry: Entry, now_s: float, *, why: str) -> None:
        """Wait for a replica: briefly before the first token, for long once a stream is open."""
        if entry.phase is Phase.QUEUED:
            return
        streaming = bool(entry.generated)
        if not streaming and not self._make_room(entry, now_s):
            error = self.queue_full(entry.request_id, f"the queue is full ({why})", now_s)
            self._refuse(entry, error, now_s)
            return
        entry.move(Phase.QUEUED)
        self.waiters.queue[entry.request_id] = None
        if streaming:
            self._journeys.wait_until(entry, now_s + self._journeys.limits.resume_wait_s)
            return
        if entry.placed_at_s is None:
            entry.waits_since_s = now_s
            self.cold.asked(now_s)
        self._journeys.wait_until(entry, now_s + self._queue_wait_s(now_s))

    def _queue_wait_s(self, now_s: float) -> float:
        """How long a new request waits for a replica: for a cold start, where there is none."""
        wait_s = self._journeys.limits.queue_wait_s
        return wait_s if self.has_replica else max(wait_s, self.cold.waits_s(now_s))

    @property
    def has_replica(self) -> bool:
        """Whether any replica takes new work."""
        roster = self._fleet.view(0.0).roster
        return bool(roster.prefill or roster.decode)

    def cold_start_told(self, start: ColdStart, now_s: float) -> None:
        """Requests that wait for a replica wait as long as what is known now makes them."""
        self.cold.told(start, now_s)
        if self.has_replica:
            return
        wait_s = self._queue_wait_s(now_s)
        for request_id in self.waiters.queue:
            entry = self._journeys.entries[request_id]
            if entry.waits_since_s is not None:
                self._journeys.wait_until(entry, max(now_s, entry.waits_since_s + wait_s))

    def serve_queue(self, now_s: float) -> None:
        """Try to place everyone who waits, in order of arrival."""
        self.waiters.retry_at_s = None
        if self.has_replica:
            self.cold.came()
        for request_id in tuple(self.waiters.queue):
            self._journeys.place(self._journeys.entries[request_id], now_s)

    def serve_held(self, now_s: float) -> None:
        """Let in whoever is first in line, one after the other, as long as it can be."""
        while (request_id := self.waiters.first_due(now_s)) is not None:
            self._journeys.place(self._journeys.entries[request_id], now_s)
            if self.waiters.first_due(now_s) == request_id:
                self.waiters.tried(now_s)

    def hold(self, entry: Entry, verdict: Hold, now_s: float) -> None:
        """Have it wait for its turn."""
        if entry.request_id in self.waiters.admittance.holding:
            self.waiters.admittance.holding.for_streams = verdict.reason in _FOR_STREAMS
            self.waiters.tried(now_s, again_in_s=verdict.again_in_s)
            return
        if not self._make_room(entry, now_s):
            why = f"{len(self.waiters)} requests wait already"
            self._refuse(entry, self.queue_full(entry.request_id, why, now_s), now_s)
            return
        if entry.phase is not Phase.QUEUED:
            entry.move(Phase.QUEUED)
        self.waiters.hold(entry, now_s)
        self._journeys.wait_until(entry, now_s + verdict.slack_s)

    def turn_away(self, entry: Entry, verdict: Shed, now_s: float) -> None:
        """It would be late: say so before anything was computed for it."""
        why = (
            f"its first token is predicted {verdict.ttft_s:.2f} s after it arrived,"
            f" which for class {entry.slo.name!r} must be at most {verdict.limit_s:.2f} s"
        )
        self.waiters.admittance.holding.in_vain(entry.request_id)
        retry_s = max(1.0, verdict.retry_after_s)
        kind = TooLate if entry.phase is Phase.ARRIVED else Evicted
        self._refuse(entry, kind(entry.request_id, retry_s, why), now_s)

    def leave_queue(self, entry: Entry, now_s: float) -> None:
        """It has waited for as long as it can."""
        if entry.generated:
            why = f"no replica came to resume it within {self._journeys.limits.resume_wait_s:g} s"
            self._journeys.fail(entry, EngineFailed(entry.request_id, why), now_s)
            return
        waited_s = self._journeys.limits.queue_wait_s
        if entry.waits_since_s is not None:
            waited_s = now_s - entry.waits_since_s
        why = f"no replica took it within {waited_s:.3g} s"
        if entry.request_id in self.waiters.admittance.holding:
            self.waiters.admittance.holding.in_vain(entry.request_id)
            why = "its turn did not come in time for its first token"
        kind = Evicted if len(self._fleet) else NoCapacity
        self._refuse(entry, kind(entry.request_id, self.retry_after_s(now_s), why), now_s)

    def queue_full(self, request_id: str, why: str, now_s: float) -> QueueFull:
        """The refusal of a request for which there is no room to wait."""
        return QueueFull(request_id, self.retry_after_s(now_s), why)

    def retry_after_s(self, now_s: float) -> float:
        """When a client may come back for whom there is no room to wait.

        Where all wait for a replica to come: when that is expected, or else the longest that one
        waits for it.
        """
        wait_s = self.waiters.retry_after_s(otherwise_s=self._journeys.limits.queue_wait_s)
        if self.has_replica or not self.cold.expects:
            return wait_s
        return max(wait_s, self.cold.left_s(now_s))

    def _make_room(self, entry: Entry, now_s: float) -> bool:
        """Whether one more may wait; for one of a higher band the newest of the lowest goes."""
        if len(self.waiters) < self._journeys.limits.max_queued or entry.request_id in self.waiters:
            return True
        victim = self.waiters.admittance.victim(entry)
        if victim is None:
            return False
        why = "the queue is full, and others come before it"
        error = Evicted(victim, self.retry_after_s(now_s), why)
        self._refuse(self._journeys.entries[victim], error, now_s)
        return True

    def _refuse(self, entry: Entry, error: Rejected, now_s: float) -> None:
        """End a request that got nothing."""
        outcome = Phase.SHED if entry.phase is Phase.ARRIVED else Phase.EVICTED
        self._journeys.end(entry, outcome, now_s, reason=error.why, error=error)
