"""Device time and money by tenant, as counters: they never go down while the process lives.

*Theory of operation.* `control.usage` reckons from the beginning each time, and its figures may go
back a little: what is overhead while a request runs becomes its tenant's when it ends, and
predictions are scaled down to what was computed. A counter that goes down would be taken for a new
process, and counted twice. So each keeps the highest that it has been. It is then too high by no
more than what was under way at its highest, and tenants together with what nobody used may exceed
what was paid by that much. Money is added up from what device time has grown by, at the price of
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
        # In the order of their first use: so it is always the same ones that are shown by name.
        self._used_s: dict[tuple[str, str], float] = {}
        self._paid_s: dict[str, float] = {}
        self._cost: dict[str, float] = {}

    def ingest(
        self,
        usage: Iterable[GpuUsage],
        pools: Mapping[str, PoolCapacity],
        price_per_hour: Mapping[str, float],
    ) -> None:
        """Take in what was used since the beginning; `price_per_hour` is of a device, by pool.

        To be called before prices change, too.
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
        """Say it."""
        for (user, pool), device_s in self._used_s.items():
            if user not in NON_TENANTS:
                families.add(GPU_SECONDS, device_s, user, pool)
        for pool, device_s in self._paid_s.items():
            families.add(PAID_GPU_SECONDS, device_s, pool)
        # First what nobody used: however many tenants there are, it is not one of the others.
        for user in sorted(self._cost, key=lambda user: user not in NON_TENANTS):
            families.add(COST, self._cost[user], user)
