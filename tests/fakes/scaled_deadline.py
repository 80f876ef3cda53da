"""Deadlines that a slow or busy machine does not break: they count by what it gets done."""

from __future__ import annotations

import time
from collections.abc import Callable

_TURNS = 600_000
_TURNS_S = 0.012
"""What they take at most on a core with nothing else to do, as measured where the limits hold."""


def loop_s() -> float:
    """How long a loop takes now that took `_TURNS_S` there."""
    start_s = time.perf_counter()
    for _ in range(_TURNS):
        pass
    return time.perf_counter() - start_s


def slowness(loop: Callable[[], float] = loop_s) -> float:
    """How many times as long as there things take here now; never less than 1."""
    return max(1.0, loop() / _TURNS_S)


class ScaledDeadline:
    """A limit of time; while a machine runs at a fraction of the speed, so does its clock."""

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        loop: Callable[[], float] = loop_s,
    ) -> None:
        self._left_s = limit_s
        self._clock = clock
        self._loop = loop
        self._at_s = clock()

    def passed(self) -> bool:
        """Whether the time is up; to be asked again and again while waiting."""
        times = slowness(self._loop)
        now_s = self._clock()
        self._left_s -= (now_s - self._at_s) / times
        self._at_s = now_s
        return self._left_s < 0
