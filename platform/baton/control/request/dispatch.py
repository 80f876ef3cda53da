"""Requests that are not under way: they wait for a replica or for their turn, or are turned away.

What happens to them once they are let in is in `lifecycle`; who is let in, in `admission`.
"""

from __future__ import annotations

from typing import Protocol

from baton.control.fleet.fleet_table import FleetTable
from baton.control.queue.cold_start_wait import ColdStartWait
from baton.control.queue.pending import PendingRequests
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.domain.demand import ColdStart
from baton.domain.errors import (
    BatonError,
    EngineFailed,
    Evicted,
    NoCapacity,
    QueueFull,
    Rejected,
    SloUnattainable,
)
from baton.domain.request import Phase
from baton.policy.admission.decision import AdmissionReason, Enqueue, Shed

_BLOCKED_ON_DECODE = frozenset({AdmissionReason.TPOT_UNATTAINABLE, AdmissionReason.INTERFERENCE})
"""Whoever is held for these waits for streams to end."""


class DispatchContext(Protocol):
    """What is done with requests that wait no more."""

    limits: CoordinatorLimits
    requests: dict[str, RequestState]

    def place(self, state: RequestState, now_s: float) -> None:
        """Begin a route, or wait again."""
        ...

    def set_deadline(self, state: RequestState, at_s: float) -> None:
        """Set the deadline of the phase that the entry is in."""
        ...

    def fail(self, state: RequestState, error: BatonError, now_s: float) -> None:
        """End a request in FAILED."""
        ...

    def end(
        self,
        state: RequestState,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> None:
        """Take the last edge."""
        ...


class Dispatcher:
    """Who waits at the coordinator, and when somebody waits no longer."""

    def __init__(
        self, lifecycle: DispatchContext, *, fleet: FleetTable, pending: PendingRequests
    ) -> None:
        self._lifecycle = lifecycle
        self._fleet = fleet
        self.pending = pending
        self.cold_start_wait = ColdStartWait(lifecycle.limits.cold_start_wait_s)

    def queue_for_replica(self, state: RequestState, now_s: float, *, why: str) -> None:
        """Wait for a replica: briefly before the first token, for long once a stream is open."""
        if state.phase is Phase.QUEUED:
            return
        streaming = bool(state.generated)
        if not streaming and not self._make_room(state, now_s):
            error = self.queue_full_error(state.request_id, f"the queue is full ({why})", now_s)
            self._end_rejected(state, error, now_s)
            return
        state.transition_to(Phase.QUEUED)
        self.pending.unplaced[state.request_id] = None
        if streaming:
            self._lifecycle.set_deadline(state, now_s + self._lifecycle.limits.resume_wait_s)
            return
        if state.placed_at_s is None:
            state.waiting_since_s = now_s
            self.cold_start_wait.on_request_queued(now_s)
        self._lifecycle.set_deadline(state, now_s + self._queue_timeout_s(now_s))

    def _queue_timeout_s(self, now_s: float) -> float:
        """How long a new request waits for a replica: for a cold start, where there is none."""
        timeout_s = self._lifecycle.limits.queue_wait_s
        return (
            timeout_s
            if self.has_eligible_replica
            else max(timeout_s, self.cold_start_wait.queue_timeout_s(now_s))
        )

    @property
    def has_eligible_replica(self) -> bool:
        """Whether any replica takes new work."""
        eligible = self._fleet.view(0.0).eligible
        return bool(eligible.prefill or eligible.decode)

    def on_cold_start(self, start: ColdStart, now_s: float) -> None:
        """Requests that wait for a replica wait as long as what is known now makes them."""
        self.cold_start_wait.on_cold_start(start, now_s)
        if self.has_eligible_replica:
            return
        timeout_s = self._queue_timeout_s(now_s)
        for request_id in self.pending.unplaced:
            state = self._lifecycle.requests[request_id]
            if state.waiting_since_s is not None:
                self._lifecycle.set_deadline(state, max(now_s, state.waiting_since_s + timeout_s))

    def retry_unplaced(self, now_s: float) -> None:
        """Try to place everyone who waits, in order of arrival."""
        self.pending.unplaced_retry_at_s = None
        if self.has_eligible_replica:
            self.cold_start_wait.on_replica_ready()
        for request_id in tuple(self.pending.unplaced):
            self._lifecycle.place(self._lifecycle.requests[request_id], now_s)

    def serve_waiting(self, now_s: float) -> None:
        """Let in whoever is first in line, one after the other, as long as it can be."""
        while (request_id := self.pending.pop_due_head(now_s)) is not None:
            self._lifecycle.place(self._lifecycle.requests[request_id], now_s)
            if self.pending.pop_due_head(now_s) == request_id:
                self.pending.placement_failed(now_s)

    def queue_for_admission(self, state: RequestState, decision: Enqueue, now_s: float) -> None:
        """Have it wait for its turn."""
        if state.request_id in self.pending.admission.wait_queue:
            self.pending.admission.wait_queue.head_blocked_on_decode = (
                decision.reason in _BLOCKED_ON_DECODE
            )
            self.pending.placement_failed(now_s, retry_in_s=decision.reevaluate_after_s)
            return
        if not self._make_room(state, now_s):
            why = f"{len(self.pending)} requests wait already"
            self._end_rejected(state, self.queue_full_error(state.request_id, why, now_s), now_s)
            return
        if state.phase is not Phase.QUEUED:
            state.transition_to(Phase.QUEUED)
        self.pending.enqueue(state, now_s)
        self._lifecycle.set_deadline(state, now_s + decision.slack_s)

    def reject(self, state: RequestState, decision: Shed, now_s: float) -> None:
        """It would be late: say so before anything was computed for it."""
        why = (
            f"its first token is predicted {decision.ttft_s:.2f} s after it arrived,"
            f" which for class {state.slo.name!r} must be at most {decision.ttft_limit_s:.2f} s"
        )
        self.pending.admission.wait_queue.record_timeout(state.request_id)
        retry_s = max(1.0, decision.retry_after_s)
        error_type = SloUnattainable if state.phase is Phase.ARRIVED else Evicted
        self._end_rejected(state, error_type(state.request_id, retry_s, why), now_s)

    def on_queue_timeout(self, state: RequestState, now_s: float) -> None:
        """It has waited for as long as it can."""
        if state.generated:
            why = f"no replica came to resume it within {self._lifecycle.limits.resume_wait_s:g} s"
            self._lifecycle.fail(state, EngineFailed(state.request_id, why), now_s)
            return
        waited_s = self._lifecycle.limits.queue_wait_s
        if state.waiting_since_s is not None:
            waited_s = now_s - state.waiting_since_s
        why = f"no replica took it within {waited_s:.3g} s"
        if state.request_id in self.pending.admission.wait_queue:
            self.pending.admission.wait_queue.record_timeout(state.request_id)
            why = "its turn did not come in time for its first token"
        error_type = Evicted if len(self._fleet) else NoCapacity
        self._end_rejected(
            state, error_type(state.request_id, self.retry_after_s(now_s), why), now_s
        )

    def queue_full_error(self, request_id: str, why: str, now_s: float) -> QueueFull:
        """The refusal of a request for which there is no room to wait."""
        return QueueFull(request_id, self.retry_after_s(now_s), why)

    def retry_after_s(self, now_s: float) -> float:
        """When a client may come back for whom there is no room to wait.

        Where all wait for a replica to come: when that is expected, or else the longest that one
        waits for it.
        """
        retry_s = self.pending.retry_after_s(default_s=self._lifecycle.limits.queue_wait_s)
        if self.has_eligible_replica or not self.cold_start_wait.expects_replica:
            return retry_s
        return max(retry_s, self.cold_start_wait.remaining_s(now_s))

    def _make_room(self, state: RequestState, now_s: float) -> bool:
        """Whether one more may wait; for one of a higher band the newest of the lowest goes."""
        if (
            len(self.pending) < self._lifecycle.limits.max_queued
            or state.request_id in self.pending
        ):
            return True
        victim = self.pending.admission.victim(state)
        if victim is None:
            return False
        why = "the queue is full, and others come before it"
        error = Evicted(victim, self.retry_after_s(now_s), why)
        self._end_rejected(self._lifecycle.requests[victim], error, now_s)
        return True

    def _end_rejected(self, state: RequestState, error: Rejected, now_s: float) -> None:
        """End a request that got nothing."""
        outcome = Phase.SHED if state.phase is Phase.ARRIVED else Phase.EVICTED
        self._lifecycle.end(state, outcome, now_s, reason=error.why, error=error)
