"""Recent values: their greatest, and how fast they rise."""

from __future__ import annotations

from collections import deque
from statistics import linear_regression

_MIN_POINTS = 3
"""Two alone would say that any wavering is a trend."""


class SlidingMax:
    """The maximum over a sliding window of time, in constant time a value on average.

    Only values that may yet be the maximum are kept: each later and smaller than the last. A value
    that comes within a thousandth of the window after a greater value is not kept. So no more than
    a thousand ever are, and each may count for that much less long.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque()

    def push(self, at_s: float, value: float) -> float:
        """Take in a value; the maximum of those at most a window old, this one among them."""
        values = self._values
        if values and at_s < values[-1][0]:
            values.clear()  # the clock went back: the age of earlier values is unknown
        while values and values[-1][1] <= value:
            values.pop()
        if not values or at_s - values[-1][0] >= self._window_s / 1000:
            values.append((at_s, value))
        while values[0][0] < at_s - self._window_s:
            values.popleft()
        return values[0][1]


class SlidingSlope:
    """How fast a value rises or falls: the line of least squares through a sliding window of time.

    Until values span the window there is none, for two that are close tell little. Of values that
    come more often than a hundred times a window, some are left out.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque()

    def push(self, at_s: float, value: float) -> float:
        """Take in a value; by how much values rise a second, 0 while that is not known."""
        values = self._values
        if values and at_s < values[-1][0]:
            values.clear()  # the clock went back
        if not values or at_s - values[-1][0] >= self._window_s / 100:
            values.append((at_s, value))
        oldest_s = at_s - self._window_s
        while len(values) > 1 and values[1][0] <= oldest_s:
            values.popleft()
        if len(values) < _MIN_POINTS or values[0][0] > oldest_s:
            return 0.0
        return linear_regression(*zip(*values, strict=True)).slope
