"""Whether an ingress knows the fleet well enough for its first request."""

from __future__ import annotations

from collections.abc import Iterable

MAX_WAIT_S = 10.0
"""A pool that has no replica for so long, while others serve, is missing: requests do without."""


class FleetReadiness:
    """Holds readiness back until every pool that always has replicas has one that has joined.

    An ingress that knows one pool only would run both phases there, whatever the configuration
    says. Once ready it stays so: what goes missing later is what placement is for.
    """

    def __init__(self, pools: Iterable[str], *, wait_s: float = MAX_WAIT_S) -> None:
        self._required_pools = frozenset(pools)
        self._ready = False
        self._wait_s = wait_s
        self._serving_since_s: float | None = None

    def reconfigure(self, pools: Iterable[str]) -> None:
        """Other pools always have replicas now."""
        self._required_pools = frozenset(pools)

    def is_ready(self, joined_pools: Iterable[str], now_s: float) -> bool:
        """Whether to take requests, where replicas of these pools have joined and can serve."""
        if self._ready:
            return True
        serving_pools = frozenset(joined_pools)
        if serving_pools and self._serving_since_s is None:
            self._serving_since_s = now_s
        waited_s = 0.0 if self._serving_since_s is None else now_s - self._serving_since_s
        self._ready = serving_pools >= self._required_pools or waited_s >= self._wait_s
        return self._ready
