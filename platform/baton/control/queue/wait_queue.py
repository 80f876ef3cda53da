"""Requests that wait at the coordinator for their turn, and how long that will take.

*Theory of operation.* Those of a higher *band* always come first; inside a band tenants share by
weight, and inside a tenant the most urgent request comes first (`policy.fair_queue`). A band is a
priority, and in it requests that can still meet their objectives, before those that cannot.

How long a turn takes is predicted from the work ahead and from the queue's recent rate of work:
device-seconds per second and replica, forgotten within seconds. Later work of higher bands is taken
off. Before any measurement each replica is taken to do a device-second per second. Where the first
request waits for streams to end, work leaves by fits and starts, and turns come later than
predicted. Predictions are then stretched until hardly any request waits too long. For any cause, a
request that waits too long makes its band *unreliable* for a while.

The store is bounded by its owner, which asks for a `victim` when it is full. Nothing here is lost:
every added request leaves by `admit` or `remove`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.control.state.admission_terms import PriorityBand
from baton.perf.fitting.decayed_sum import DecayedSum
from baton.policy.admission.fair_queue import FairQueue, QueuedRequest

_RATE_WINDOW_S = 5.0
"""Loads change within tens of seconds; sums over fewer than a few seconds are noise."""
_PRIOR_WEIGHT_S = 0.5
"""The time for which the guess counts: as soon as half a second was measured, that weighs as much.
"""
_MIN_RATE_FRACTION = 0.02
"""Of the fleet's rate, the least share that higher bands leave: waits stay finite."""

_INFLATION_STEP = 1.1
"""Each request that waited too long makes predictions this much longer ..."""
_INFLATION_DECAY = 0.9998
"""... and each turn in time, this much shorter. With ln 1.1 / -ln 0.9998 = 477 admitted for each
that waited too long, and as many rejected as admitted, 0.2 % of the rejected wait."""
_MISPREDICTION_DECAY = 0.002
"""The part of an unreliability that each turn in time takes away."""
_MAX_WAIT_INFLATION = 2.5
"""A line of two fifths of the available time is still long enough to keep the fleet busy."""


class QueuePosition(NamedTuple):
    """The time of a request's turn."""

    request: QueuedRequest
    """Where it stands in line."""
    wait_s: float


class WaitQueue:
    """The requests that wait for their turns."""

    def __init__(self) -> None:
        self._bands: dict[PriorityBand, FairQueue] = {}
        self._band_of: dict[str, PriorityBand] = {}
        self._served_work = DecayedSum(_RATE_WINDOW_S)
        """Work that left for the fleet, per replica, while requests waited ..."""
        self._busy_time = DecayedSum(_RATE_WINDOW_S)
        """... and for how long they did: both on a clock that stops while the queue is empty.
        """
        self._arrived_work: dict[PriorityBand, DecayedSum] = {}
        """Work that was let in or held, by band."""
        self._wait_inflation: dict[PriorityBand, float] = {}
        """How much longer than predicted turns are taken to last; 1 where nothing is said."""
        self._misprediction_rates: dict[PriorityBand, float] = {}
        """How unreliable predictions for waiting requests are, from 0, which is not stored, to
        1."""
        self.head_blocked_on_decode = False
        """Whether who is first was last seen to wait for streams to end, not for prompts."""
        self._busy_clock_s = 0.0
        self._updated_at_s = 0.0

    def __len__(self) -> int:
        return len(self._band_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._band_of

    def __bool__(self) -> bool:
        return bool(self._band_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._band_of)

    # -------------------------------------------------------------- who waits

    def add(self, band: PriorityBand, request: QueuedRequest, now_s: float) -> None:
        """Add a request to the queue."""
        self._advance_clock(now_s)
        if band not in self._bands:
            self._bands[band] = FairQueue()
            self._bands = dict(sorted(self._bands.items(), reverse=True))
        self._bands[band].push(request)
        self._band_of[request.request_id] = band
        self._note_arrival(band, request.work_s, now_s)

    def head(self) -> str | None:
        """The first request of all; None when the queue is empty."""
        for queue in self._bands.values():
            if (request := queue.head()) is not None:
                return request.request_id
        return None

    def admit(
        self, band: PriorityBand, request: QueuedRequest, *, replicas: int, now_s: float
    ) -> None:
        """Note that a request goes to the fleet, whether it had to wait or not."""
        self._advance_clock(now_s)
        if self._band_of:
            self._served_work.add(request.work_s / max(1, replicas), self._busy_clock_s)
        queued_band = self._band_of.pop(request.request_id, None)
        if queued_band is not None:
            self._bands[queued_band].serve(request.request_id)
            if queued_band in self._wait_inflation:
                self._wait_inflation[queued_band] = max(
                    1.0, self._wait_inflation[queued_band] * _INFLATION_DECAY
                )
            if queued_band in self._misprediction_rates:
                self._misprediction_rates[queued_band] = max(
                    0.0, self._misprediction_rates[queued_band] - _MISPREDICTION_DECAY
                )
            return
        self._note_arrival(band, request.work_s, now_s)
        if band in self._bands:
            self._bands[band].serve_immediately(request)

    def record_timeout(self, request_id: str) -> None:
        """Note that a waiting request's turn will not come in time, though that was predicted."""
        band = self._band_of.get(request_id)
        if band is None:
            return
        self._misprediction_rates[band] = 1.0
        if self.head_blocked_on_decode:
            inflation = self._wait_inflation.get(band, 1.0) * _INFLATION_STEP
            self._wait_inflation[band] = min(_MAX_WAIT_INFLATION, inflation)

    def remove(self, request_id: str, now_s: float) -> None:
        """Take out a request that does not go to the fleet; unknown requests are ignored."""
        band = self._band_of.get(request_id)
        if band is not None:
            self._advance_clock(now_s)
            del self._band_of[request_id]
            self._bands[band].remove(request_id)

    def victim(self, band: PriorityBand) -> str | None:
        """The newest request of the lowest band below this band; None if none is lower."""
        for lowest_band in reversed(self._bands):
            newest = self._bands[lowest_band].newest_id()
            if newest is not None:
                return newest if lowest_band < band else None
        return None

    def count_below(self, band: PriorityBand) -> int:
        """How many wait of lower bands than this."""
        return sum(len(line) for other, line in self._bands.items() if other < band)

    # -------------------------------------------------------------- how long it takes

    def position(
        self, band: PriorityBand, request: QueuedRequest, *, replicas: int, now_s: float
    ) -> QueuePosition | None:
        """The turn of a request that comes now; None: it would be first."""
        queues = [line for other, line in self._bands.items() if len(line) and other >= band]
        if not queues:
            return None
        rate = self._service_rate(band, replicas=replicas, now_s=now_s)
        work_ahead = sum([line.queued_work_s for line in queues])
        own_queue = self._bands.get(band)
        if own_queue is not None and len(own_queue):
            request = own_queue.assign_position(request, now_s=now_s, rate=rate)
            work_ahead -= own_queue.queued_work_s
            work_ahead += own_queue.work_ahead_s(
                request.flow, weight=request.weight, begin_by_s=request.start_deadline_s
            )
        return QueuePosition(request, work_ahead / rate * self._wait_inflation.get(band, 1.0))

    def misprediction_rate(self, band: PriorityBand) -> float:
        """How unreliable predictions for waiting requests of a band are, from 0 to 1."""
        return self._misprediction_rates.get(band, 0.0)

    def drain_s(self, *, replicas: int) -> float:
        """How long until all who wait now have had their turns."""
        work = self.queued_work_s
        return (
            work / self._service_rate(None, replicas=replicas, now_s=self._updated_at_s)
            if work
            else 0.0
        )

    @property
    def queued_work_s(self) -> float:
        """Device-seconds of all who wait."""
        return sum(line.queued_work_s for line in self._bands.values())

    def _service_rate(self, band: PriorityBand | None, *, replicas: int, now_s: float) -> float:
        """Device-seconds per second for a band and those below it; None: for all of them."""
        self._advance_clock(now_s)
        served_work, busy_s = (
            self._served_work.value(self._busy_clock_s),
            self._busy_time.value(self._busy_clock_s),
        )
        rate = max(1, replicas) * (_PRIOR_WEIGHT_S + served_work) / (_PRIOR_WEIGHT_S + busy_s)
        if band is None:
            return rate
        higher_band_rate = sum(
            [came.rate(now_s) for other, came in self._arrived_work.items() if other > band]
        )
        return max(rate - higher_band_rate, _MIN_RATE_FRACTION * rate)

    def _note_arrival(self, band: PriorityBand, work: float, now_s: float) -> None:
        if band not in self._arrived_work:
            self._arrived_work[band] = DecayedSum(_RATE_WINDOW_S)
        self._arrived_work[band].add(work, now_s)

    def _advance_clock(self, now_s: float) -> None:
        elapsed_s = now_s - self._updated_at_s
        self._updated_at_s = now_s
        if self._band_of and elapsed_s > 0:
            self._busy_clock_s += elapsed_s
            self._busy_time.add(elapsed_s, self._busy_clock_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when bands and those who wait disagree."""
        assert sum(len(line) for line in self._bands.values()) == len(self._band_of), "miscounted"
        for line in self._bands.values():
            line.check_integrity()
