"""Device time and cost by tenant, as counters that never go down.

*Theory of operation.* `control.accounting.usage` computes totals from the beginning each time. They
may shrink a little: overhead becomes a tenant's when its request ends, and predictions are scaled
to computed work. Prometheus would take that for a restart, so each counter keeps its maximum. It is
too high by at most the work in flight at that maximum. Cost grows with device time, at the price of
that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.control.accounting.cluster_totals import PoolCapacity
from baton.control.accounting.usage import NON_TENANTS, device_seconds
from baton.domain.demand import GpuUsage
from baton.telemetry.catalogue import COST, GPU_SECONDS, PAID_GPU_SECONDS
from baton.telemetry.families import Families

_HOUR_S = 3600.0


class UsageMeter:
    """See the module."""

    def __init__(self) -> None:
        # In the order of first use, so that the same tenants keep their names.
        self._used_s: dict[tuple[str, str], float] = {}
        self._paid_s: dict[str, float] = {}
        self._cost: dict[str, float] = {}

    def ingest(
        self,
        usage: Iterable[GpuUsage],
        pools: Mapping[str, PoolCapacity],
        price_per_hour: Mapping[str, float],
    ) -> None:
        """Update from totals since the beginning; `price_per_hour` is of a device, by pool.

        Callers also call it before prices change.
        """
        for (user, pool), device_s in device_seconds(usage, pools).items():
            before_s = self._used_s.get((user, pool), 0.0)
            now_s = self._used_s[user, pool] = max(before_s, device_s)
            if (price := price_per_hour.get(pool)) is not None:
                added_cost = (now_s - before_s) / _HOUR_S * price
                self._cost[user] = self._cost.get(user, 0.0) + added_cost
        for pool, capacity in pools.items():
            self._paid_s[pool] = max(self._paid_s.get(pool, 0.0), capacity.device_s)

    def add_to(self, families: Families) -> None:
        """Export the counters."""
        for (user, pool), device_s in self._used_s.items():
            if user not in NON_TENANTS:
                families.add(GPU_SECONDS, device_s, user, pool)
        for pool, device_s in self._paid_s.items():
            families.add(PAID_GPU_SECONDS, device_s, pool)
        # Idle time and overhead come first, so that they never count as `other`.
        for user in sorted(self._cost, key=lambda user: user not in NON_TENANTS):
            families.add(COST, self._cost[user], user)
