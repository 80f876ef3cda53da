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

_REMEMBERED = 8


class ColdStarts:
    """One pool's."""

    def __init__(self) -> None:
        self._asked_at_s: deque[float] = deque()
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._before: tuple[int, int, int] | None = None

    def look(self, *, starting: int, up: int, working: int, now_s: float) -> None:
        """So many are there now, `working` being those that take work of those that are `up`.

        Who starts at the first look was asked for nobody knows when.
        """
        if self._before is not None:
            were_starting, were_up, were_working = self._before
            came_up = min(were_starting, max(0, up - were_up))
            self._ask(starting - were_starting + came_up, now_s)
            could_join = max(0, len(self._asked_at_s) - starting)
            for _ in range(min(max(0, working - were_working), could_join)):
                self._took_s.append(max(0.0, now_s - self._asked_at_s.popleft()))
            while len(self._asked_at_s) > starting + max(0, up - working):
                self._asked_at_s.pop()
        self._before = (starting, up, working)

    @property
    def measured_s(self) -> float | None:
        """What to expect of the next one; None before any was seen from its beginning."""
        return median(self._took_s) if self._took_s else None

    def starting_for_s(self, now_s: float) -> float | None:
        """How long ago the first of those that start was asked for; None: none was seen to be."""
        return now_s - self._asked_at_s[0] if self._asked_at_s else None

    def _ask(self, replicas: int, now_s: float) -> None:
        for _ in range(replicas):
            self._asked_at_s.append(now_s)
        for _ in range(min(-replicas, len(self._asked_at_s))):
            self._asked_at_s.pop()
