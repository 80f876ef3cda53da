"""Whether an ingress knows the fleet well enough for its first request."""

from __future__ import annotations

from collections.abc import Iterable

WAIT_S = 10.0
"""A pool that has no replica for so long, while others serve, is missing: requests do without."""


class FirstView:
    """Holds readiness back until every pool that always has replicas has one that has joined.

    An ingress that knows one pool only would run both phases there, whatever the configuration
    says. Once ready it stays so: what goes missing later is what placement is for.
    """

    def __init__(self, pools: Iterable[str], *, wait_s: float = WAIT_S) -> None:
        self._pools = frozenset(pools)
        self._complete = False
        self._wait_s = wait_s
        self._serves_since_s: float | None = None

    def reconfigure(self, pools: Iterable[str]) -> None:
        """Other pools always have replicas now."""
        self._pools = frozenset(pools)

    def is_complete(self, joined: Iterable[str], now_s: float) -> bool:
        """Whether to take requests, where replicas of these pools have joined and can serve."""
        if self._complete:
            return True
        pools = frozenset(joined)
        if pools and self._serves_since_s is None:
            self._serves_since_s = now_s
        waited_s = 0.0 if self._serves_since_s is None else now_s - self._serves_since_s
        self._complete = pools >= self._pools or waited_s >= self._wait_s
        return self._complete
