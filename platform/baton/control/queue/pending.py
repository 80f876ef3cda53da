"""Requests that wait: for a replica, or for their turn.

*Theory of operation.* `unplaced` has those that no replica can take, in order of arrival; all are
tried when a replica joins. `admission.wait_queue` has those that replicas could take, but shall not
yet. Only its first is tried, when capacity may have come free: after a leg ended, a load report, a
replica that joined, or a pause. A try costs a placement, so after a failed one the next comes
`_MIN_RETRY_INTERVAL_S` later at the earliest. Both together are bounded.
"""

from __future__ import annotations

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.queue.admission_controller import AdmissionController
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.domain.demand import ColdStart
from baton.domain.errors import QueueFull
from baton.policy.admission.decision import AdmissionReason, Enqueue

_MIN_RETRY_INTERVAL_S = 0.005
"""Two hundred tries per second at most: at 0.2 ms for one, 4 % of the time."""
_POLL_INTERVAL_S = 0.05
"""The time in which unreported free resources are noticed."""
_MISSING = object()
_MIN_RETRY_AFTER_S = 1.0
"""HTTP's Retry-After is in whole seconds."""
_OVERDUE_FRACTION = 0.1
"""Of a cold start: so soon one is expected that should be over. Of 60 s these are 6 s."""
_BLOCKED_ON_DECODE = frozenset(
    {AdmissionReason.TPOT_UNATTAINABLE, AdmissionReason.INTERFERENCE, AdmissionReason.PULL_QUEUE}
)
"""Requests that are queued for these reasons wait for decode replicas, not for prompts."""


class ColdStartWait:
    """How long requests wait for the first replica.

    A fleet at zero gets a replica because a request waits for one. That request has to wait for a
    cold start, which takes far longer than any queue. The controller reports how long starts take,
    and when one is under way, how long it takes yet (`ColdStartReported`). Until then, a start is
    taken to begin when the first request waits. All of these are predictions: a start that is
    expected within a part of the usual time.
    """

    def __init__(self, max_wait_s: float | None) -> None:
        self.max_wait_s = max_wait_s
        """The limit of a request's wait; None: no replica starts because of it."""
        self._cold_start = ColdStart()
        self._reported_at_s: float | None = None
        self._requested_at_s: float | None = None
        self.was_up = False
        """Whether there was a replica, or the fleet rests without one."""

    def on_cold_start(self, start: ColdStart, now_s: float) -> None:
        """Take in the known facts of starts. A measurement is not replaced by a guess."""
        if self._cold_start.is_measured and not start.is_measured:
            start = start._replace(duration_s=self._cold_start.duration_s, is_measured=True)
        self._cold_start, self._reported_at_s = start, now_s
        self.was_up = self.was_up or (start.can_start and start.remaining_s is None)

    def on_request_queued(self, now_s: float) -> None:
        """A request begins to wait, which has a replica started."""
        if self._requested_at_s is None:
            self._requested_at_s = now_s

    def on_replica_ready(self) -> None:
        """A replica is there."""
        self.was_up, self._requested_at_s = True, None
        self._cold_start = self._cold_start._replace(remaining_s=None)

    @property
    def triggers_start(self) -> bool:
        """Whether a request that waits has a replica started."""
        return self.max_wait_s is not None and self._cold_start.can_start

    @property
    def expects_replica(self) -> bool:
        """Whether a replica is on its way, or will be when a request waits for it."""
        return self.triggers_start or self._cold_start.remaining_s is not None

    def remaining_s(self, now_s: float) -> float:
        """How long until the first replica is expected."""
        duration_s, remaining_s = self._cold_start.duration_s, self._cold_start.remaining_s
        if remaining_s is not None and self._reported_at_s is not None:
            remaining_s -= now_s - self._reported_at_s
        elif self._requested_at_s is not None:
            remaining_s = duration_s - (now_s - self._requested_at_s)
        else:
            remaining_s = duration_s
        return max(remaining_s, _OVERDUE_FRACTION * duration_s)

    def queue_timeout_s(self, now_s: float) -> float:
        """How long a request that comes now waits for it; 0 where that would be too long."""
        if self.max_wait_s is None or not self.triggers_start:
            return 0.0
        is_known = self._cold_start.is_measured or self._cold_start.remaining_s is not None
        return 0.0 if is_known and self.remaining_s(now_s) > self.max_wait_s else self.max_wait_s


class PendingRequests:
    """The requests that wait, when to try them again, and how long they may wait."""

    def __init__(
        self, limits: CoordinatorLimits, *, fleet: FleetTable, fleet_model: FleetModel
    ) -> None:
        self.admission = AdmissionController(
            fleet=fleet,
            fleet_model=fleet_model,
            first_token_timeout_s=limits.first_token_timeout_s,
            max_pulls=limits.max_pulls,
        )
        self._limits = limits
        self._fleet = fleet
        self._cold_start = ColdStartWait(limits.cold_start_timeout_s)
        self.unplaced: dict[str, None] = {}
        """Those that wait for a replica."""
        self.unplaced_retry_at_s: float | None = None
        """When all of those are tried again; None: when a replica joins."""
        self.head_retry_at_s: float | None = None
        """When the first of those that wait their turn is tried; None: when something happens."""
        self._last_failed_at_s = float("-inf")

    def reconfigure(self, limits: CoordinatorLimits) -> None:
        """Use other limits; requests that wait keep their deadlines."""
        self._limits = limits
        self.admission.first_token_timeout_s = limits.first_token_timeout_s
        self._cold_start.max_wait_s = limits.cold_start_timeout_s

    def __len__(self) -> int:
        return len(self.unplaced) + len(self.admission.wait_queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.unplaced or request_id in self.admission.wait_queue

    def ids(self) -> list[str]:
        """All requests that wait."""
        return [*self.unplaced, *self.admission.wait_queue]

    def has_room(self, request_id: str) -> bool:
        """Whether a request may wait, or does already."""
        return len(self) < self._limits.max_queued_requests or request_id in self

    @property
    def has_eligible_replica(self) -> bool:
        """Whether any replica takes new work."""
        return self._fleet.has_eligible_replica

    def can_serve(self) -> bool:
        """Whether a replica takes work, or is started because a request waits for it.

        A fleet that starts for the first time cannot, until its first replica is there.
        """
        return self.has_eligible_replica or (
            self._cold_start.triggers_start and self._cold_start.was_up
        )

    # -------------------------------------------------------------- waiting for a replica

    def add_unplaced(self, state: RequestState, now_s: float) -> None:
        """A request waits for a replica; the first wait of a request triggers a cold start."""
        self.unplaced[state.request_id] = None
        if state.placed_at_s is None:
            state.waiting_since_s = now_s
            self._cold_start.on_request_queued(now_s)

    def on_cold_start(self, start: ColdStart, now_s: float) -> None:
        """The controller says what it knows of cold starts."""
        self._cold_start.on_cold_start(start, now_s)

    def on_retry_unplaced(self) -> None:
        """All requests that wait for a replica are about to be tried."""
        self.unplaced_retry_at_s = None
        if self.has_eligible_replica:
            self._cold_start.on_replica_ready()

    def queue_timeout_s(self, now_s: float) -> float:
        """How long a new request waits for a replica: for a cold start, where there is none."""
        timeout_s = self._limits.queue_timeout_s
        return (
            timeout_s
            if self.has_eligible_replica
            else max(timeout_s, self._cold_start.queue_timeout_s(now_s))
        )

    def queue_full_error(self, request_id: str, reason: str, now_s: float) -> QueueFull:
        """The rejection of a request for which there is no room to wait."""
        return QueueFull(request_id, self.retry_after_s(now_s), reason)

    def retry_after_s(self, now_s: float) -> float:
        """When a client may come back: once those that wait have had their turns.

        Where all wait for a replica: when that is expected, or the longest wait for one.
        """
        retry_s = max(_MIN_RETRY_AFTER_S, self.admission.drain_s() or self._limits.queue_timeout_s)
        if self.has_eligible_replica or not self._cold_start.expects_replica:
            return retry_s
        return max(retry_s, self._cold_start.remaining_s(now_s))

    # -------------------------------------------------------------- waiting for a turn

    def on_admitted(self, state: RequestState, now_s: float) -> None:
        """Note that a request is about to be placed."""
        self._remove_unplaced(state, now_s)
        self.admission.admit(state, now_s)
        self._cancel_retry_if_empty()

    def enqueue(self, state: RequestState, now_s: float) -> None:
        """Note that a request waits for its turn, and may be the first in line."""
        self._remove_unplaced(state, now_s)
        self.admission.enqueue(state, now_s)
        self.on_capacity(now_s)

    def remove(self, state: RequestState, now_s: float) -> None:
        """Note that a request has ended, whether it waited or not."""
        self._remove_unplaced(state, now_s)
        self.admission.remove(state, now_s)
        self._cancel_retry_if_empty()

    def next_retry_at_s(self) -> float | None:
        """When a request is to be tried again at the latest."""
        if self.head_retry_at_s is None or self.unplaced_retry_at_s is None:
            return (
                self.unplaced_retry_at_s if self.head_retry_at_s is None else self.head_retry_at_s
            )
        return min(self.head_retry_at_s, self.unplaced_retry_at_s)

    def on_capacity(self, now_s: float) -> None:
        """Try the first waiting request, at once or after the pause: it may have a place."""
        at_s = max(now_s, self._last_failed_at_s + _MIN_RETRY_INTERVAL_S)
        if self.head_retry_at_s is None or at_s < self.head_retry_at_s:
            self.head_retry_at_s = at_s

    def retry_now(self) -> None:
        """Rules are others now: waiting requests are tried with the next event."""
        if self.admission.wait_queue:
            self.head_retry_at_s = float("-inf")

    def pop_due_head(self, now_s: float) -> str | None:
        """The request to be tried now; None without one."""
        if self.head_retry_at_s is None or now_s < self.head_retry_at_s:
            return None
        head = self.admission.wait_queue.head()
        self.head_retry_at_s = None if head is None else now_s
        return head

    def not_admitted(self, decision: Enqueue, now_s: float) -> None:
        """The head was tried, and waits on."""
        self.admission.wait_queue.head_blocked_on_decode = decision.reason in _BLOCKED_ON_DECODE
        self.placement_failed(now_s, retry_in_s=decision.reevaluate_after_s)

    def placement_failed(self, now_s: float, *, retry_in_s: float = 0.0) -> None:
        """The head was not placed; it is tried after so long, or when capacity comes free."""
        self._last_failed_at_s = now_s
        self.head_retry_at_s = now_s + min(
            max(retry_in_s or _POLL_INTERVAL_S, _MIN_RETRY_INTERVAL_S), _POLL_INTERVAL_S
        )

    def _remove_unplaced(self, state: RequestState, now_s: float) -> None:
        if self.unplaced.pop(state.request_id, _MISSING) is None:
            state.end_replica_wait(now_s)

    def _cancel_retry_if_empty(self) -> None:
        """Without waiting requests no time is due: the driver would wake up for it forever."""
        if not self.admission.wait_queue:
            self.head_retry_at_s = None

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        self.admission.check_integrity()
        both = [
            request_id for request_id in self.unplaced if request_id in self.admission.wait_queue
        ]
        assert not both, f"{both} wait for a replica and for their turn"
        is_scheduled = self.head_retry_at_s is not None
        assert is_scheduled == bool(self.admission.wait_queue), (
            "the retry timer and the wait queue differ"
        )
