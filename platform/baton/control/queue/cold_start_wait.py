"""How long a request waits for a replica where the fleet has none, and when one is expected.

*Theory of operation.* A fleet at zero gets a replica because a request waits for one. That request
has to wait for a cold start, which takes far longer than any queue. The controller reports how long
starts take, and when one is under way, how long it takes yet (`ColdStartReported`). Until then, a
start is taken to begin when the first request waits. All of these are predictions: a start that is
overdue is expected within a part of what starts take.
"""

from __future__ import annotations

from baton.domain.demand import ColdStart

_OVERDUE_FRACTION = 0.1
"""Of a cold start: so soon one is expected that should be over. Of 60 s these are 6 s."""


class ColdStartWait:
    """One coordinator's waits for the first replica."""

    def __init__(self, max_wait_s: float | None) -> None:
        self.max_wait_s = max_wait_s
        """How long a request waits at most; None: nobody starts a replica because of it."""
        self._cold_start = ColdStart()
        self._reported_at_s: float | None = None
        self._requested_at_s: float | None = None
        self.was_up = False
        """Whether there was a replica, or the fleet rests without one."""

    def on_cold_start(self, start: ColdStart, now_s: float) -> None:
        """Take in what is known of starts. What was measured once is not replaced by a guess."""
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
        """How long a request that comes now waits for it; 0 where that would be in vain."""
        if self.max_wait_s is None or not self.triggers_start:
            return 0.0
        is_known = self._cold_start.is_measured or self._cold_start.remaining_s is not None
        return 0.0 if is_known and self.remaining_s(now_s) > self.max_wait_s else self.max_wait_s
