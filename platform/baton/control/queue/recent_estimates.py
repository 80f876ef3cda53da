"""What requests of each kind were predicted to need of late: whether one more would be taken in.

*Theory of operation.* Where a gate refuses before a request is read, nobody knows how long its
prompt is. So the lightest of those that came of late stands for it: if even that one would be
turned away now, so would nearly all. What is remembered is forgotten within a second. While a gate
refuses, nothing comes to remember, so it lets a few through every second, and by these it is seen
when there is room again.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_KEPT_S = 1.0
_KEPT = 16
_KINDS = 1024
"""Tenants times classes that are remembered; more, and the one that came first goes."""


class Needed(NamedTuple):
    """What a request was predicted to need when it arrived, were it first in line."""

    at_s: float
    alone_s: float
    queue_s: float
    work: float
    """Device-seconds."""


class Shedding(NamedTuple):
    """Requests of which one more would be refused."""

    tenant: str
    slo_class: str
    own: bool
    """Whether it is the class of those of its tenant who ask for none."""
    retry_after_s: float


class Lately:
    """The last requests of each tenant and class."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], deque[Needed]] = {}

    def note(self, tenant: str, slo_class: str, needed: Needed) -> None:
        """A request has arrived."""
        kind = self._kinds.get((tenant, slo_class))
        if kind is None:
            if len(self._kinds) >= _KINDS:
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[tenant, slo_class] = deque(maxlen=_KEPT)
        kind.append(needed)

    def kinds(self, now_s: float) -> list[tuple[str, str]]:
        """Tenants and classes of which something came of late."""
        since_s = now_s - _KEPT_S
        return [name for name, kind in self._kinds.items() if kind and kind[-1].at_s >= since_s]

    def lightest(self, tenant: str, slo_class: str, now_s: float) -> Needed | None:
        """The one that needed least, as it would now; None when none came of late."""
        kind = self._kinds.get((tenant, slo_class))
        while kind and kind[0].at_s < now_s - _KEPT_S:
            kind.popleft()
        if not kind:
            return None
        least = min(kind, key=lambda one: one.alone_s)
        latest = kind[-1]
        # An engine's queue is the same for all, and moves on.
        queue_s = max(0.0, latest.queue_s - (now_s - latest.at_s))
        return least._replace(at_s=now_s, queue_s=queue_s)
