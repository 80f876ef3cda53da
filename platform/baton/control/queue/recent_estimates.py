"""Predicted needs of recent requests of each kind: whether one more would be admitted.

*Theory of operation.* Where a gate refuses before a request is read, the length of its prompt is
not known. So the lightest of the recent requests stands for it: if even that would be rejected now,
so would nearly all. An estimate is forgotten within a second. While a gate refuses, no new estimate
comes, so it lets a few requests through every second, and by these it is seen when there is room
again.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_MAX_AGE_S = 1.0
_MAX_ESTIMATES = 16
_MAX_CLASSES = 1024
"""Tenants times classes that are remembered; with more, the oldest goes."""


class Estimate(NamedTuple):
    """The predicted need of a request when it arrived, were it first in line."""

    at_s: float
    unqueued_ttft_s: float
    engine_queue_s: float
    work_s: float
    """Device-seconds."""


class SheddingClass(NamedTuple):
    """Requests of which one more would be refused."""

    tenant: str
    slo_class: str
    is_default: bool
    """Whether it is the class of those of its tenant who ask for none."""
    retry_after_s: float


class RecentEstimates:
    """The last requests of each tenant and class."""

    def __init__(self) -> None:
        self._by_class: dict[tuple[str, str], deque[Estimate]] = {}

    def note(self, tenant: str, slo_class: str, estimate: Estimate) -> None:
        """A request has arrived."""
        estimates = self._by_class.get((tenant, slo_class))
        if estimates is None:
            if len(self._by_class) >= _MAX_CLASSES:
                del self._by_class[next(iter(self._by_class))]
            estimates = self._by_class[tenant, slo_class] = deque(maxlen=_MAX_ESTIMATES)
        estimates.append(estimate)

    def recent_classes(self, now_s: float) -> list[tuple[str, str]]:
        """Tenants and classes of which something came of late."""
        since_s = now_s - _MAX_AGE_S
        return [name for name, kind in self._by_class.items() if kind and kind[-1].at_s >= since_s]

    def lightest(self, tenant: str, slo_class: str, now_s: float) -> Estimate | None:
        """The lightest recent estimate, as of now; None without a recent one."""
        estimates = self._by_class.get((tenant, slo_class))
        while estimates and estimates[0].at_s < now_s - _MAX_AGE_S:
            estimates.popleft()
        if not estimates:
            return None
        lightest = min(estimates, key=lambda estimate: estimate.unqueued_ttft_s)
        latest = estimates[-1]
        # An engine's queue is the same for all, and moves on.
        queue_s = max(0.0, latest.engine_queue_s - (now_s - latest.at_s))
        return lightest._replace(at_s=now_s, engine_queue_s=queue_s)
