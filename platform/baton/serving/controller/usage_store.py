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

from baton.control.accounting.cluster_totals import Held, Ledgers
from baton.domain.demand import Spent, Tally
from baton.runtime.ports import Clock
from baton.serving.controller.serve_fleet import KeyValues
from baton.serving.ray.packing import packed, unpacked
from baton.serving.scaling.ports import Looks
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_NOTE = "usage"
_STORE_S = 2.0
_EVERY_S = 30.0
_TALLY_KEY = 4
"""So many fields of a tally say of what it is."""
_Row = TypeVar("_Row", Tally, Spent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What was used, and what replicas have cost, over some time."""

    over_s: float = 0.0
    tallies: tuple[Tally, ...] = ()
    spent: tuple[Spent, ...] = ()
    pools: Mapping[str, Held] = field(default_factory=dict)

    def __add__(self, other: Used) -> Used:
        """Both together."""
        pools = {
            name: _both(self.pools.get(name, Held()), other.pools.get(name, Held()))
            for name in sorted(self.pools.keys() | other.pools.keys())
        }
        return Used(
            over_s=self.over_s + other.over_s,
            tallies=_summed((*self.tallies, *other.tallies), _TALLY_KEY),
            spent=_summed((*self.spent, *other.spent), len(Spent._fields) - 1),
            pools=pools,
        )


class UsageMemory:
    """See the module. A `ReportReader`, so that only the controller that acts writes."""

    def __init__(
        self, ledgers: Ledgers, store: KeyValues, *, clock: Clock, every_s: float = _EVERY_S
    ) -> None:
        self._ledgers = ledgers
        self._store = store
        self._clock = clock
        self._every_s = every_s
        self._began_at_s = clock.now_s()
        self._before: Used | None = None
        """What controllers before this one have noted; None until that was read."""
        self._noted_at_s = clock.now_s()

    def used(self) -> Used:
        """Since the deployment began, as far as is known."""
        ledgers = self._ledgers
        own = Used(
            over_s=self._clock.now_s() - self._began_at_s,
            tallies=ledgers.tallies(),
            spent=ledgers.spent(),
            pools=ledgers.pools(),
        )
        return own if self._before is None else self._before + own

    async def take(self, _looks: Looks) -> None:
        """Read the note once, and write another when it is time."""
        if self._before is None:
            async with asyncio.timeout(_STORE_S):
                data = await asyncio.to_thread(self._store.load, _NOTE)
            self._before = _read(data)
        if self._clock.now_s() - self._noted_at_s >= self._every_s:
            await self.note()

    async def note(self) -> None:
        """Keep what is known; nothing happens before the last note was read."""
        if self._before is None:
            return
        self._noted_at_s = self._clock.now_s()
        data = _written(self.used())
        async with asyncio.timeout(_STORE_S):
            await asyncio.to_thread(self._store.save, _NOTE, data)


def _both(one: Held, other: Held) -> Held:
    return Held(device_s=one.device_s + other.device_s, busy_s=one.busy_s + other.busy_s)


def _summed(rows: Iterable[_Row], key: int) -> tuple[_Row, ...]:
    found: dict[tuple[object, ...], _Row] = {}
    for row in rows:
        known = found.get(row[:key])
        found[row[:key]] = row if known is None else _added(known, row, key)
    return tuple(found[name] for name in sorted(found, key=str))


def _added(known: _Row, row: _Row, key: int) -> _Row:
    figures = zip(known[key:], row[key:], strict=True)
    more: list[float] = [cast("float", one) + cast("float", other) for one, other in figures]
    return type(row)._make((*row[:key], *more))


def _written(used: Used) -> bytes:
    pools = {name: [held.device_s, held.busy_s] for name, held in used.pools.items()}
    told = {"over_s": used.over_s, "tallies": used.tallies, "spent": used.spent, "pools": pools}
    return packed(told)


def _read(data: bytes | None) -> Used:
    """What a note says; nothing where there is none, or where nobody can read it."""
    if data is None:
        return Used()
    try:
        told = cast("dict[str, list[list[float]]]", unpacked(data))
        pools = cast("dict[str, list[float]]", told["pools"])
        return Used(
            over_s=float(cast("float", told["over_s"])),
            tallies=tuple(Tally._make(row) for row in told["tallies"]),
            spent=tuple(Spent._make(row) for row in told["spent"]),
            pools={name: Held(device_s=held[0], busy_s=held[1]) for name, held in pools.items()},
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
        # Nothing that is tried again would help.
        log_event(_LOGGER, logging.ERROR, "usage_lost", {"why": f"{type(error).__name__}: {error}"})
        return Used()
