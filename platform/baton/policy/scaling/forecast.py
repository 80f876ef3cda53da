"""The forecast of demand at the time when a replica that is started now would be ready.

Theory of operation. A level and a damped trend are smoothed from the rates that ticks see, by the
time between them, so that uneven ticks and gaps do no harm. Every so often the forecast for one
horizon ahead is put aside, and compared when its time comes. The last few dozen of these relative
errors give a quantile that is added to the next forecast. So steady demand costs little headroom
and jumpy demand costs much, without any setting. Relative errors of a lull are large, and say
little of a burst's. So the addition never leads beyond the highest rate seen, which is forgotten
over an hour. Memory is bounded, and nothing is ever negative.

Source: E. Gardner and E. McKenzie, Forecasting trends in time series (1985), for the damped trend,
written for uneven steps: with smoothing times T the weight of a step dt is 1 - exp(-dt / T).

A memory of the same time yesterday was tried and left out. On the one public fortnight of rates
there is (ServeGen, m-large), requested tokens correlate with those of a day before by 0.1 and less.
The value of an hour ago is the better guess by far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

_MAX_ERRORS = 64
"""Errors that are remembered: enough for a 95th percentile, few enough to follow a change."""
_MIN_ERRORS = 8
_CHECKS_PER_HORIZON = 4
"""How often within a horizon a prediction is put aside."""
_MIN_CHECK_INTERVAL_S = 5.0
_MAX_RELATIVE_ERROR = 3.0
"""Relative: four times what was predicted, or more, says no more than that it was a burst."""
_ERROR_SCALE_FLOOR_FRACTION = 0.05
"""Of the usual level: errors are not taken relative to less, so that idle time does not count for
much."""
_BASELINE_S = 3600.0


class RateForecast:
    """One series of rates, and its near future."""

    def __init__(self, *, level_s: float = 15.0, trend_s: float = 120.0) -> None:
        """Smooth the level and the trend over these times; a trend lasts as long again."""
        self._level_s, self._trend_s = level_s, trend_s
        self._at_s: float | None = None
        self._level = 0.0
        self._trend = 0.0
        self._baseline = 0.0
        self._peak = 0.0
        """Highest rate seen, falling to the usual rate."""
        self._pending_checks: deque[tuple[float, float]] = deque()
        self._errors: deque[float] = deque(maxlen=_MAX_ERRORS)

    def observe(self, at_s: float, rate: float, *, horizon_s: float) -> None:
        """Take in the present rate, and put aside the forecast for one horizon ahead."""
        if not (math.isfinite(rate) and rate >= 0):
            return
        if self._at_s is None or at_s < self._at_s:
            self._reset(at_s, rate)
        elif at_s > self._at_s:
            self._smooth(at_s - self._at_s, rate)
            self._at_s = at_s
            self._check_predictions(at_s, rate)
        self._schedule_check(at_s, horizon_s)

    def predict(self, horizon_s: float, *, quantile: float | None = None) -> float:
        """The rate `horizon_s` after the last rate seen; at its mean without a quantile."""
        mean = self._mean(horizon_s)
        if quantile is None or len(self._errors) < _MIN_ERRORS:
            return mean
        error = _quantile(sorted(self._errors), quantile)
        return max(0.0, min(mean + error * self._error_scale(mean), max(mean, self._peak)))

    def _mean(self, horizon_s: float) -> float:
        damped_horizon_s = self._trend_s * -math.expm1(-horizon_s / self._trend_s)
        return max(0.0, self._level + self._trend * damped_horizon_s)

    def _error_scale(self, predicted: float) -> float:
        return max(predicted, _ERROR_SCALE_FLOOR_FRACTION * self._baseline, 1e-9)

    def _reset(self, at_s: float, rate: float) -> None:
        self._at_s, self._level, self._trend = at_s, rate, 0.0
        self._baseline = self._peak = rate
        self._pending_checks.clear()

    def _smooth(self, step_s: float, rate: float) -> None:
        expected = self._mean(step_s)
        previous_level = self._level
        self._level = expected + (rate - expected) * -math.expm1(-step_s / self._level_s)
        observed_trend = (self._level - previous_level) / step_s
        trend_decay = math.exp(-step_s / self._trend_s)
        self._trend = self._trend * trend_decay + observed_trend * (1.0 - trend_decay)
        baseline_weight = -math.expm1(-step_s / _BASELINE_S)
        self._baseline += (rate - self._baseline) * baseline_weight
        self._peak = max(rate, self._peak + (self._baseline - self._peak) * baseline_weight)

    def _check_predictions(self, at_s: float, rate: float) -> None:
        while self._pending_checks and self._pending_checks[0][0] <= at_s:
            due_s, predicted = self._pending_checks.popleft()
            if at_s - due_s <= max(self._level_s, _MIN_CHECK_INTERVAL_S):  # else it fell into a gap
                error = (rate - predicted) / self._error_scale(predicted)
                self._errors.append(min(error, _MAX_RELATIVE_ERROR))

    def _schedule_check(self, at_s: float, horizon_s: float) -> None:
        due_s = at_s + horizon_s
        every_s = max(horizon_s / _CHECKS_PER_HORIZON, _MIN_CHECK_INTERVAL_S)
        if self._pending_checks and due_s < self._pending_checks[-1][0] + every_s:
            return
        self._pending_checks.append((due_s, self._mean(horizon_s)))


def _quantile(ordered: Sequence[float], quantile: float) -> float:
    """Linear between the two nearest (Hyndman and Fan's type 7)."""
    rank = quantile * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
