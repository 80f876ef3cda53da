"""How long replicas take from being asked for to taking work, measured from counts alone.

*Theory of operation.* Each look says how many replicas of a pool are starting, how many have come
up, and how many of those take work. One more that starts has just been asked for; one more that
takes work is the one that was asked for first, among those that have come up. A start that is
given up was the last. A replica that nobody saw start measures nothing, and one that was out of
sight for a while and comes back is no start. Counts are looked at every few seconds, so a
measurement errs by as much; of the last few the median counts, for one start on a slow disk says
little of the next.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_MAX_SAMPLES = 8


class ColdStartTimer:
    """One pool's."""

    def __init__(self) -> None:
        self._requested_at_s: deque[float] = deque()
        self._durations_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._last_counts: tuple[int, int, int] | None = None

    def observe(self, *, starting: int, running: int, serving: int, now_s: float) -> None:
        """So many are there now, `serving` being those that take work of those that are `running`.

        Who starts at the first look was asked for nobody knows when.
        """
        if self._last_counts is not None:
            were_starting, were_running, were_serving = self._last_counts
            came_up = min(were_starting, max(0, running - were_running))
            self._adjust_requested(starting - were_starting + came_up, now_s)
            could_join = max(0, len(self._requested_at_s) - starting)
            for _ in range(min(max(0, serving - were_serving), could_join)):
                self._durations_s.append(max(0.0, now_s - self._requested_at_s.popleft()))
            while len(self._requested_at_s) > starting + max(0, running - serving):
                self._requested_at_s.pop()
        self._last_counts = (starting, running, serving)

    @property
    def measured_s(self) -> float | None:
        """What to expect of the next one; None before any was seen from its beginning."""
        return median(self._durations_s) if self._durations_s else None

    def starting_for_s(self, now_s: float) -> float | None:
        """How long ago the first of those that start was asked for; None: none was seen to be."""
        return now_s - self._requested_at_s[0] if self._requested_at_s else None

    def _adjust_requested(self, replicas: int, now_s: float) -> None:
        for _ in range(replicas):
            self._requested_at_s.append(now_s)
        for _ in range(min(-replicas, len(self._requested_at_s))):
            self._requested_at_s.pop()
