"""Requests that wait at the coordinator for their turn, and how long that will take.

*Theory of operation.* Those of a higher *band* always come first; inside a band tenants share by
weight, and inside a tenant whoever must begin soonest comes first (`policy.fair_queue`). A band is
a priority, and in it those who can still get what they are promised, before those who cannot.

How long a turn takes is predicted from the work ahead and from how fast work has left the queue
while somebody waited: device-seconds per second and replica, forgotten within seconds. What higher
bands bring meanwhile is taken off. Before anything was measured each replica is taken to do a
device-second per second. Where whoever is first waits for streams to end, work leaves by fits and
starts, and turns come later than predicted: predictions are then stretched until hardly anybody
waits in vain. Whatever they wait for, whoever waits in vain makes its band *doubted* for a while.

The store is bounded by its owner, which asks for a `victim` when it is full. Nothing here is lost:
whoever is added leaves by `let_in` or `withdraw`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.perf.fitting.decayed_sum import DecayedSum
from baton.policy.admission.fair_queue import FairQueue, Waiting

_MEMORY_S = 5.0
"""Loads change within tens of seconds; sums over fewer than a few seconds are noise."""
_PRIOR_S = 0.5
"""The time for which the guess counts: as soon as half a second was measured, that weighs as much.
"""
_LEAST_LEFT = 0.02
"""Of what the fleet does, what at least is taken to be left by higher bands: waits stay finite."""

_STRETCH = 1.1
"""Each one that waited in vain makes predictions so much longer ..."""
_RELAX = 0.9998
"""... and each one that had its turn, so much shorter: with ln 1.1 / -ln 0.9998 = 477 let in for
each that waited in vain, and as many refused as let in, 0.2 % of those that are refused wait."""
_TRUST = 0.002
"""Of the doubt that one who waited in vain brings, what each one takes away that had its turn."""
_MOST_STRETCH = 2.5
"""A line of two fifths of what there is time for is still long enough to keep the fleet busy."""


class Band(NamedTuple):
    """Who comes before whom; the greater first."""

    priority: int
    can_be_met: bool


class Turn(NamedTuple):
    """When somebody's turn comes."""

    place: Waiting
    """Where it stands in line."""
    after_s: float


class Holding:
    """Whoever waits for its turn."""

    def __init__(self) -> None:
        self._bands: dict[Band, FairQueue] = {}
        self._where: dict[str, Band] = {}
        self._left = DecayedSum(_MEMORY_S)
        """Work that left for the fleet, per replica, while somebody waited ..."""
        self._waited = DecayedSum(_MEMORY_S)
        """... and for how long somebody did: both on a clock that stands still while nobody waits.
        """
        self._came: dict[Band, DecayedSum] = {}
        """Work that was let in or held, by band."""
        self._stretch: dict[Band, float] = {}
        """How much longer than predicted turns are taken to last; 1 where nothing is said."""
        self._doubt: dict[Band, float] = {}
        """How much predictions for those who wait are doubted, from 0, which is not said, to 1."""
        self.for_streams = False
        """Whether who is first was last seen to wait for streams to end, not for prompts."""
        self._clock_s = 0.0
        self._at_s = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._where

    def __bool__(self) -> bool:
        return bool(self._where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    # -------------------------------------------------------------- who waits

    def add(self, band: Band, one: Waiting, now_s: float) -> None:
        """Somebody waits from now on."""
        self._tick(now_s)
        if band not in self._bands:
            self._bands[band] = FairQueue()
            self._bands = dict(sorted(self._bands.items(), reverse=True))
        self._bands[band].push(one)
        self._where[one.request_id] = band
        self._note_come(band, one.work, now_s)

    def head(self) -> str | None:
        """Who is first of all; None when nobody waits."""
        for line in self._bands.values():
            if (one := line.head()) is not None:
                return one.request_id
        return None

    def let_in(self, band: Band, one: Waiting, *, replicas: int, now_s: float) -> None:
        """Somebody goes to the fleet, whether it had to wait or not."""
        self._tick(now_s)
        if self._where:
            self._left.add(one.work / max(1, replicas), self._clock_s)
        found = self._where.pop(one.request_id, None)
        if found is not None:
            self._bands[found].serve(one.request_id)
            if found in self._stretch:
                self._stretch[found] = max(1.0, self._stretch[found] * _RELAX)
            if found in self._doubt:
                self._doubt[found] = max(0.0, self._doubt[found] - _TRUST)
            return
        self._note_come(band, one.work, now_s)
        if band in self._bands:
            self._bands[band].serve_at_once(one)

    def in_vain(self, request_id: str) -> None:
        """Somebody waits whose turn will not come in time, though that was predicted."""
        band = self._where.get(request_id)
        if band is None:
            return
        self._doubt[band] = 1.0
        if self.for_streams:
            longer = self._stretch.get(band, 1.0) * _STRETCH
            self._stretch[band] = min(_MOST_STRETCH, longer)

    def withdraw(self, request_id: str, now_s: float) -> None:
        """Somebody waits no more, and does not go to the fleet; unknown ones are ignored."""
        band = self._where.get(request_id)
        if band is not None:
            self._tick(now_s)
            del self._where[request_id]
            self._bands[band].remove(request_id)

    def victim(self, band: Band) -> str | None:
        """Who makes room for one of this band: the newest of the lowest; None if none is lower."""
        for lowest in reversed(self._bands):
            newest = self._bands[lowest].newest()
            if newest is not None:
                return newest if lowest < band else None
        return None

    def below(self, band: Band) -> int:
        """How many wait of lower bands than this."""
        return sum(len(line) for other, line in self._bands.items() if other < band)

    # -------------------------------------------------------------- how long it takes

    def turn(self, band: Band, one: Waiting, *, replicas: int, now_s: float) -> Turn | None:
        """The turn that somebody who comes now would have; None: it would be first."""
        lines = [line for other, line in self._bands.items() if len(line) and other >= band]
        if not lines:
            return None
        rate = self._rate(band, replicas=replicas, now_s=now_s)
        ahead = sum([line.work for line in lines])
        own = self._bands.get(band)
        if own is not None and len(own):
            one = own.fitted(one, now_s=now_s, rate=rate)
            ahead -= own.work
            ahead += own.work_ahead(one.flow, weight=one.weight, begin_by_s=one.begin_by_s)
        return Turn(one, ahead / rate * self._stretch.get(band, 1.0))

    def doubt(self, band: Band) -> float:
        """How much predictions for those of a band who wait are doubted, from 0 to 1."""
        return self._doubt.get(band, 0.0)

    def drained_s(self, *, replicas: int) -> float:
        """How long until all who wait now have had their turns."""
        work = self.work
        return work / self._rate(None, replicas=replicas, now_s=self._at_s) if work else 0.0

    @property
    def work(self) -> float:
        """Device-seconds of all who wait."""
        return sum(line.work for line in self._bands.values())

    def _rate(self, band: Band | None, *, replicas: int, now_s: float) -> float:
        """Device-seconds per second for a band and those below it; None: for all of them."""
        self._tick(now_s)
        left, waited_s = self._left.value(self._clock_s), self._waited.value(self._clock_s)
        rate = max(1, replicas) * (_PRIOR_S + left) / (_PRIOR_S + waited_s)
        if band is None:
            return rate
        above = sum([came.rate(now_s) for other, came in self._came.items() if other > band])
        return max(rate - above, _LEAST_LEFT * rate)

    def _note_come(self, band: Band, work: float, now_s: float) -> None:
        if band not in self._came:
            self._came[band] = DecayedSum(_MEMORY_S)
        self._came[band].add(work, now_s)

    def _tick(self, now_s: float) -> None:
        gone_s = now_s - self._at_s
        self._at_s = now_s
        if self._where and gone_s > 0:
            self._clock_s += gone_s
            self._waited.add(gone_s, self._clock_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when bands and those who wait disagree."""
        assert sum(len(line) for line in self._bands.values()) == len(self._where), "miscounted"
        for line in self._bands.values():
            line.check_integrity()
