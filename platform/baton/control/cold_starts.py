"""How long replicas take from being asked for to taking work, measured from counts alone.

*Theory of operation.* Each look says how many replicas of a pool are starting and how many take
work. One more that starts has just been asked for; one more that works has begun to, and is the
one that was asked for first. A start that is given up was the last. Counts are looked at every few
seconds, so a measurement errs by as much; of the last few, the median counts, for one start on a
slow disk says little of the next.
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
        self._before: tuple[int, int] | None = None

    def look(self, *, starting: int, working: int, now_s: float) -> None:
        """So many are there now. Who starts at the first look was asked for nobody knows when."""
        if self._before is not None:
            more_starting, more_working = starting - self._before[0], working - self._before[1]
            ready = max(0, more_working)
            self._ask(more_starting + ready, now_s)
            for _ in range(min(ready, len(self._asked_at_s))):
                self._took_s.append(max(0.0, now_s - self._asked_at_s.popleft()))
            while len(self._asked_at_s) > starting:
                self._asked_at_s.pop()
        self._before = (starting, working)

    @property
    def measured_s(self) -> float | None:
        """What to expect of the next one; None before any was seen from its beginning."""
        return median(self._took_s) if self._took_s else None

    def _ask(self, replicas: int, now_s: float) -> None:
        for _ in range(replicas):
            self._asked_at_s.append(now_s)
        for _ in range(min(-replicas, len(self._asked_at_s))):
            self._asked_at_s.pop()
