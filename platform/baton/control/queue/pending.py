"""Requests that are not under way: those that wait for a replica, and those that wait their turn.

*Theory of operation.* In `queue` are those that no replica can take, in order of arrival; all of
them are tried when somebody joins. In `admission.wait_queue` are those that replicas could take,
but shall not yet; only the first of them is tried, when capacity may have come free: a leg ended, a
load was reported, somebody joined, or so much time has passed as the last try said. Together they
are bounded. A try costs a placement, so after one that let nobody in the next comes
`_MIN_RETRY_INTERVAL_S` later at the earliest, however much happens.
"""

from __future__ import annotations

from baton.control.queue.admission_controller import AdmissionController
from baton.control.state.request_state import RequestState

_MIN_RETRY_INTERVAL_S = 0.005
"""Two hundred tries per second at most: at 0.2 ms for one, 4 % of the time."""
_POLL_INTERVAL_S = 0.05
"""What comes free without being told comes to light so soon."""
_MISSING = object()
_MIN_RETRY_AFTER_S = 1.0
"""HTTP's Retry-After is in whole seconds."""


class PendingRequests:
    """Who waits, and when to try again."""

    def __init__(self, admission: AdmissionController) -> None:
        self.admission = admission
        self.unplaced: dict[str, None] = {}
        """Those that wait for a replica."""
        self.unplaced_retry_at_s: float | None = None
        """When all of those are tried again; None: when a replica joins."""
        self.head_retry_at_s: float | None = None
        """When the first of those that wait their turn is tried; None: when something happens."""
        self._last_failed_at_s = float("-inf")

    def __len__(self) -> int:
        return len(self.unplaced) + len(self.admission.wait_queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.unplaced or request_id in self.admission.wait_queue

    def ids(self) -> list[str]:
        """Everyone who waits."""
        return [*self.unplaced, *self.admission.wait_queue]

    def on_admitted(self, state: RequestState, now_s: float) -> None:
        """Somebody is about to be placed."""
        self._remove_unplaced(state, now_s)
        self.admission.admit(state, now_s)
        self._cancel_retry_if_empty()

    def enqueue(self, state: RequestState, now_s: float) -> None:
        """Somebody waits for its turn, and may be the first in line."""
        self._remove_unplaced(state, now_s)
        self.admission.enqueue(state, now_s)
        self.on_capacity(now_s)

    def remove(self, state: RequestState, now_s: float) -> None:
        """Somebody has ended, whether it waited or not."""
        self._remove_unplaced(state, now_s)
        self.admission.remove(state, now_s)
        self._cancel_retry_if_empty()

    def next_retry_at_s(self) -> float | None:
        """When somebody is to be tried again at the latest."""
        if self.head_retry_at_s is None or self.unplaced_retry_at_s is None:
            return (
                self.unplaced_retry_at_s if self.head_retry_at_s is None else self.head_retry_at_s
            )
        return min(self.head_retry_at_s, self.unplaced_retry_at_s)

    def on_capacity(self, now_s: float) -> None:
        """Somebody may have a place now: the first is tried at once, or after the pause."""
        at_s = max(now_s, self._last_failed_at_s + _MIN_RETRY_INTERVAL_S)
        if self.head_retry_at_s is None or at_s < self.head_retry_at_s:
            self.head_retry_at_s = at_s

    def retry_now(self) -> None:
        """Rules are others now: whoever waits is tried with the next event."""
        if self.admission.wait_queue:
            self.head_retry_at_s = float("-inf")

    def pop_due_head(self, now_s: float) -> str | None:
        """Who is to be tried now; None when nobody is."""
        if self.head_retry_at_s is None or now_s < self.head_retry_at_s:
            return None
        head = self.admission.wait_queue.head()
        self.head_retry_at_s = None if head is None else now_s
        return head

    def placement_failed(self, now_s: float, *, retry_in_s: float = 0.0) -> None:
        """The first could not be let in; it may be after so long, or when something comes free."""
        self._last_failed_at_s = now_s
        self.head_retry_at_s = now_s + min(
            max(retry_in_s or _POLL_INTERVAL_S, _MIN_RETRY_INTERVAL_S), _POLL_INTERVAL_S
        )

    def retry_after_s(self, *, default_s: float) -> float:
        """When a client may come back for whom there is no room: once those who wait had turns."""
        return max(_MIN_RETRY_AFTER_S, self.admission.drain_s() or default_s)

    def _remove_unplaced(self, state: RequestState, now_s: float) -> None:
        if self.unplaced.pop(state.request_id, _MISSING) is None:
            state.end_replica_wait(now_s)

    def _cancel_retry_if_empty(self) -> None:
        """With nobody left to try no time is due: a body would wake up for it for ever."""
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
            "somebody is not tried, or nobody is"
        )
