"""What was used in a deployment, kept in the cluster's store: it outlives the controller.

Theory of operation. A controller's ledgers begin with it. What they add up to is noted every half
a minute, together with what controllers before it have noted; a new one reads that note, and tells
both together. So a controller that is stopped loses what is used until the next one hears its first
reports, and one that is killed half a minute more. Both what tenants used and what replicas cost
are lost for that time, so that they still add up. Metrics are the controller's own, without what
was noted: Prometheus itself adds up across controllers.

What may fail: the store. A note that could not be read is asked for again with every turn, and none
is written until it was, so that nothing is overwritten. One that nobody can read is given up.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from baton.control.accounting.cluster_totals import ClusterTotals, PoolCapacity
from baton.domain.demand import GpuUsage, Tally
from baton.runtime.ports import Clock
from baton.serving.controller.serve_fleet import KeyValueStore
from baton.serving.ray.packing import pack, unpack
from baton.serving.scaling.ports import TickInputs
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_STORE_KEY = "usage"
_STORE_TIMEOUT_S = 2.0
_SAVE_INTERVAL_S = 30.0
_TALLY_KEY_FIELDS = 4
"""So many fields of a tally say of what it is."""
_Row = TypeVar("_Row", Tally, GpuUsage)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """What was used, and what replicas have cost, over some time."""

    duration_s: float = 0.0
    tallies: tuple[Tally, ...] = ()
    spent: tuple[GpuUsage, ...] = ()
    pools: Mapping[str, PoolCapacity] = field(default_factory=dict)

    def __add__(self, other: UsageTotals) -> UsageTotals:
        """Both together."""
        pools = {
            name: _add_capacity(
                self.pools.get(name, PoolCapacity()), other.pools.get(name, PoolCapacity())
            )
            for name in sorted(self.pools.keys() | other.pools.keys())
        }
        return UsageTotals(
            duration_s=self.duration_s + other.duration_s,
            tallies=_sum_rows((*self.tallies, *other.tallies), _TALLY_KEY_FIELDS),
            spent=_sum_rows((*self.spent, *other.spent), len(GpuUsage._fields) - 1),
            pools=pools,
        )


class UsageStore:
    """See the module. A `TickListener`, so that only the controller that acts writes."""

    def __init__(
        self,
        totals: ClusterTotals,
        store: KeyValueStore,
        *,
        clock: Clock,
        interval_s: float = _SAVE_INTERVAL_S,
    ) -> None:
        self._totals = totals
        self._store = store
        self._clock = clock
        self._interval_s = interval_s
        self._started_at_s = clock.now_s()
        self._earlier: UsageTotals | None = None
        """What controllers before this one have noted; None until that was read."""
        self._saved_at_s = clock.now_s()

    def usage(self) -> UsageTotals:
        """Since the deployment began, as far as is known."""
        totals = self._totals
        own = UsageTotals(
            duration_s=self._clock.now_s() - self._started_at_s,
            tallies=totals.tallies(),
            spent=totals.gpu_usage(),
            pools=totals.pools(),
        )
        return own if self._earlier is None else self._earlier + own

    async def on_tick(self, _inputs: TickInputs) -> None:
        """Read the note once, and write another when it is time."""
        if self._earlier is None:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                data = await asyncio.to_thread(self._store.load, _STORE_KEY)
            self._earlier = _decode(data)
        if self._clock.now_s() - self._saved_at_s >= self._interval_s:
            await self.save()

    async def save(self) -> None:
        """Keep what is known; nothing happens before the last note was read."""
        if self._earlier is None:
            return
        self._saved_at_s = self._clock.now_s()
        data = _encode(self.usage())
        async with asyncio.timeout(_STORE_TIMEOUT_S):
            await asyncio.to_thread(self._store.save, _STORE_KEY, data)


def _add_capacity(left: PoolCapacity, right: PoolCapacity) -> PoolCapacity:
    return PoolCapacity(device_s=left.device_s + right.device_s, busy_s=left.busy_s + right.busy_s)


def _sum_rows(rows: Iterable[_Row], key: int) -> tuple[_Row, ...]:
    sums: dict[tuple[object, ...], _Row] = {}
    for row in rows:
        known = sums.get(row[:key])
        sums[row[:key]] = row if known is None else _add_rows(known, row, key)
    return tuple(sums[name] for name in sorted(sums, key=str))


def _add_rows(known: _Row, row: _Row, key: int) -> _Row:
    pairs = zip(known[key:], row[key:], strict=True)
    sums: list[float] = [
        cast("float", each_key) + cast("float", other) for each_key, other in pairs
    ]
    return type(row)._make((*row[:key], *sums))


def _encode(totals: UsageTotals) -> bytes:
    pools = {name: [held.device_s, held.busy_s] for name, held in totals.pools.items()}
    entry = {
        "over_s": totals.duration_s,
        "tallies": totals.tallies,
        "spent": totals.spent,
        "pools": pools,
    }
    return pack(entry)


def _decode(data: bytes | None) -> UsageTotals:
    """What a note says; nothing where there is none, or where nobody can read it."""
    if data is None:
        return UsageTotals()
    try:
        entry = cast("dict[str, list[list[float]]]", unpack(data))
        pools = cast("dict[str, list[float]]", entry["pools"])
        return UsageTotals(
            duration_s=float(cast("float", entry["over_s"])),
            tallies=tuple(Tally._make(row) for row in entry["tallies"]),
            spent=tuple(GpuUsage._make(row) for row in entry["spent"]),
            pools={
                name: PoolCapacity(device_s=held[0], busy_s=held[1]) for name, held in pools.items()
            },
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
        # Nothing that is tried again would help.
        log_event(_LOGGER, logging.ERROR, "usage_lost", {"why": f"{type(error).__name__}: {error}"})
        return UsageTotals()
