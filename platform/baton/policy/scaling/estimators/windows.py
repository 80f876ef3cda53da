"""Recent values: their greatest, how fast they rise, and rates without their sampling error."""

from __future__ import annotations

import math
from collections import deque
from statistics import linear_regression

_MEAN_RATE_S = 240.0
"""Over which a rate is averaged: some windows of half a minute, found by trying on the mixes of
`make bench-slo`."""
_CONTROL_LIMIT = 3.0
"""Standard errors."""
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


class SampledRate:
    """A rate of tokens, as a window of requests shows it, without the window's sampling error.

    Theory of operation. A window in which n requests are expected shows its rate with a relative
    standard error of sqrt((ca^2 + cs^2) / n), although the rate itself stays. Within three of those
    errors of the mean of the last minutes, the rate is that mean. A window farther from it shows a
    change, and counts in full. So a rate of few requests is steady, and a rate of many is followed
    closely. Needs contain a margin for the tail. They would have it twice otherwise, for the
    maximum of noisy windows is above their mean.

    The mean is smoothed twice, so that it does not lag behind a steady rise.

    Source: double exponential smoothing (R. Brown, Smoothing, Forecasting and Prediction, 1963);
    control limits of three standard errors (W. Shewhart, Economic Control of Quality,
    1931); the variance of a compound renewal process (D. Cox, Renewal Theory, 1962).
    """

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._smoothed = self._smoothed_twice = 0.0

    def update(
        self, at_s: float, rate: float, *, requests: float, squared_variation: float
    ) -> float:
        """Take in the rate of a window; the rate to plan with.

        Args:
            at_s: When the window ends.
            rate: Tokens a second over it.
            requests: In the window.
            squared_variation: ca^2 + cs^2 of arrivals and of tokens per request.
        """
        if self._at_s is None or at_s < self._at_s:
            self._smoothed = self._smoothed_twice = rate
        else:
            weight = -math.expm1((self._at_s - at_s) / _MEAN_RATE_S)
            self._smoothed += (rate - self._smoothed) * weight
            self._smoothed_twice += (self._smoothed - self._smoothed_twice) * weight
        self._at_s = at_s
        mean = 2.0 * self._smoothed - self._smoothed_twice
        if requests <= 0 or min(rate, mean) <= 0:
            return rate
        error = math.sqrt(squared_variation * rate / requests * mean)
        return rate if abs(rate - mean) > _CONTROL_LIMIT * error else mean
