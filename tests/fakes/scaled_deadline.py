"""Deadlines that a slow or busy machine does not break: they count by what it gets done."""

from __future__ import annotations

import time
from collections.abc import Callable

_ITERATIONS = 600_000
_ITERATIONS_S = 0.012
"""What they take at most on a core with nothing else to do, as measured where the limits hold."""


def loop_s() -> float:
    """How long a loop takes now that took `_ITERATIONS_S` there."""
    start_s = time.perf_counter()
    for _ in range(_ITERATIONS):
        pass
    return time.perf_counter() - start_s


def slowdown(loop: Callable[[], float] = loop_s) -> float:
    """How many times as long as there things take here now; never less than 1."""
    return max(1.0, loop() / _ITERATIONS_S)


class ScaledDeadline:
    """A limit of time; while a machine runs at a fraction of the speed, so does its clock."""

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        loop: Callable[[], float] = loop_s,
    ) -> None:
        self._remaining_s = limit_s
        self._clock = clock
        self._loop = loop
        self._checked_at_s = clock()

    def is_expired(self) -> bool:
        """Whether the time is up; to be asked again and again while waiting."""
        factor = slowdown(self._loop)
        now_s = self._clock()
        self._remaining_s -= (now_s - self._checked_at_s) / factor
        self._checked_at_s = now_s
        return self._remaining_s < 0
