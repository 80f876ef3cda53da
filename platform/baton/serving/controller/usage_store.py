"""Usage of a deployment in the cluster's store, which outlives the controller.

Theory of operation. A controller's accounts begin at its start. Every half a minute it saves their
sum with the totals of earlier controllers; a new controller reads it. A stopped controller loses
the usage until the next one's first reports, a killed controller up to half a minute more. Usage
and cost are lost for the same time, so they still add up. Metrics exclude earlier controllers,
because Prometheus adds those.

A failed read is retried each tick; until it succeeds nothing is written, so nothing is overwritten.
Invalid data is dropped.
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
"""The leading fields, which identify a tally."""
_Row = TypeVar("_Row", Tally, GpuUsage)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Usage and replica cost over some time."""

    duration_s: float = 0.0
    tallies: tuple[Tally, ...] = ()
    spent: tuple[GpuUsage, ...] = ()
    pools: Mapping[str, PoolCapacity] = field(default_factory=dict)

    def __add__(self, other: UsageTotals) -> UsageTotals:
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
    """See the module. As a `TickListener` only the acting controller writes."""

    def __init__(self, totals: ClusterTotals, store: KeyValueStore, *, clock: Clock) -> None:
        self._totals = totals
        self._store = store
        self._clock = clock
        self._started_at_s = clock.now_s()
        self._earlier: UsageTotals | None = None
        """Totals of earlier controllers; None until read."""
        self._saved_at_s = clock.now_s()

    def usage(self) -> UsageTotals:
        """Since the deployment began, as far as known."""
        totals = self._totals
        own = UsageTotals(
            duration_s=self._clock.now_s() - self._started_at_s,
            tallies=totals.tallies(),
            spent=totals.gpu_usage(),
            pools=totals.pools(),
        )
        return own if self._earlier is None else self._earlier + own

    async def on_tick(self, _inputs: TickInputs) -> None:
        """Read the saved totals once, and save when due."""
        if self._earlier is None:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                data = await asyncio.to_thread(self._store.load, _STORE_KEY)
            self._earlier = _decode(data)
        if self._clock.now_s() - self._saved_at_s >= _SAVE_INTERVAL_S:
            await self.save()

    async def save(self) -> None:
        """Save the totals, unless those of earlier controllers are unread."""
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
    sums: list[float] = [cast("float", left) + cast("float", right) for left, right in pairs]
    return type(row)._make((*row[:key], *sums))


def _encode(totals: UsageTotals) -> bytes:
    pools = {name: [pool.device_s, pool.busy_s] for name, pool in totals.pools.items()}
    entry = {
        "over_s": totals.duration_s,
        "tallies": totals.tallies,
        "spent": totals.spent,
        "pools": pools,
    }
    return pack(entry)


def _decode(data: bytes | None) -> UsageTotals:
    """The saved totals; empty without any, or if they are invalid."""
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
                name: PoolCapacity(device_s=device_s, busy_s=busy_s)
                for name, (device_s, busy_s, *_) in pools.items()
            },
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
        # A retry would not help.
        log_event(
            _LOGGER, logging.ERROR, "usage_lost", {"reason": f"{type(error).__name__}: {error}"}
        )
        return UsageTotals()
