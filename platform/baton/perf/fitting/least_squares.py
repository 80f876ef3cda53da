"""Least squares that forgets, starts from a prior and keeps to bounds, for a handful of features.

Theory of operation. The value is modelled as the sum of features times coefficients. Each row is
divided by its size, so that errors are relative and a long window does not
outweigh a short one; each coefficient is counted in multiples of its prior. The state is the
normal matrix and vector of all rows so far, which fade: by `1 / memory_rows` per row at most, and
no faster than `memory_s` of time pass. Idle hours forget nothing, and a thousand reporters do not
shorten the memory to an instant. The prior counts as a fraction of a row that never fades, so a
feature that never varies on its own keeps its prior and nothing winds up. The coefficients are the
minimum within the bounds, found by coordinate descent from the last ones.

A value far off the prediction is clipped to a few times the usual error before it is taken in, so
one stalled step moves little; what stays far off raises the usual error each time, and is then
followed within some tens of rows. Rows that are not finite or mean nothing are refused and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import mul
from typing import NamedTuple

_SOLVE_SWEEPS = 500
_CONVERGED = 1e-7
_PRIOR_WEIGHT = 0.002
"""Of an unknown's squared distance from its prior, where the upper bound is at distance 1, against
the squared error of each row that it has a part in: what may lie far off is held less, and rows of
one sweep err alike, so more of them make nothing surer."""


class CoefficientPrior(NamedTuple):
    """What is believed of one coefficient before anything was seen, and what is never believed."""

    prior: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How fast a fit learns, and what it does not believe."""

    memory_rows: float = 128.0
    """A row fades to 1/e within so many."""
    memory_s: float = 30.0
    """... but not within less time than this."""
    prior_rows: float = 0.02
    """What the prior weighs against rows."""
    clip_errors: float = 4.0
    """A residual of more than so many usual errors is clipped."""
    error_rows: float = 10.0
    """How many rows the usual error is averaged over."""
    min_error: float = 0.02
    """The usual relative error is never taken to be smaller: noise-free rows must not turn every
    change into an outlier."""
    fast_decay: float = 0.25
    """How much faster all that is known fades, per row, ..."""
    fast_decay_error: float = 1 / 3
    """... as the usual error exceeds this: the thing has changed, and the old rows hold it back."""


_SWEEPS = 2
"""Per row. The next row goes on where this one stopped."""


class LeastSquares:
    """One model of one thing. Errors are relative to the larger of prediction and value."""

    __slots__ = (
        "_coefficient_priors",
        "_factors",
        "_last_at_s",
        "_normal",
        "_priors",
        "_relative_bounds",
        "_settings",
        "_target",
        "clipped_rows",
        "coefficients",
        "error",
        "rejected_rows",
        "rows",
    )

    def __init__(
        self, coefficients: Sequence[CoefficientPrior], settings: FitSettings | None = None
    ) -> None:
        for number, (prior, low, high) in enumerate(coefficients):
            if not 0 < low <= prior <= high < inf:
                raise ValueError(
                    f"coefficient {number}: got prior {prior}, bounds {low} to {high},"
                    " expected 0 < low <= prior <= high < inf"
                )
        self._settings = settings or FitSettings()
        self._priors = tuple(prior for prior, _, _ in coefficients)
        self._coefficient_priors = tuple(coefficients)
        self._relative_bounds = tuple(
            (low / prior, high / prior) for prior, low, high in coefficients
        )
        size = len(self._priors)
        self._normal = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size
        self._factors = [1.0] * size
        self._last_at_s: float | None = None
        self.coefficients = self._priors
        """The fit as it stands."""
        self.rows = 0
        """Rows taken in."""
        self.clipped_rows = 0
        """Those among them that were too far off to be believed as they were."""
        self.rejected_rows = 0
        self.error = 1.0
        """The usual relative error of a prediction, clipped ones counted as clipped."""

    def predict(self, features: Sequence[float]) -> float:
        """What the fit makes of `features`."""
        predicted: float = sum(map(mul, features, self.coefficients))
        return predicted

    def observe(self, features: Sequence[float], value: float, now_s: float) -> bool:
        """Learn from one row; False when it was refused as meaningless."""
        expected = self.predict(features)
        is_meaningful = 0 < expected < inf and 0 <= value < inf and isfinite(now_s)
        if not is_meaningful or min(features) < 0:
            self.rejected_rows += 1
            return False
        # Divided by the larger of the two, a row of a stalled step weighs little, and a prior that
        # is far too small does not make the first rows outweigh all that come after.
        scale = max(expected, value)
        residual = self._clip((value - expected) / scale)
        row = [x * p / scale for x, p in zip(features, self._priors, strict=True)]
        self._add_row(row, expected / scale + residual, self._decay(now_s))
        self._solve()
        self.rows += 1
        return True

    def _clip(self, residual: float) -> float:
        settings = self._settings
        limit = settings.clip_errors * self.error
        if abs(residual) > limit:
            self.clipped_rows += 1
            residual = limit if residual > 0 else -limit
        new_error = self.error + (abs(residual) - self.error) / settings.error_rows
        self.error = max(settings.min_error, new_error)
        return residual

    def _decay(self, now_s: float) -> float:
        """The weight that older rows keep as a row of `now_s` comes in."""
        settings = self._settings
        last_at_s = now_s if self._last_at_s is None else self._last_at_s
        self._last_at_s = max(now_s, last_at_s)
        by_time = (self._last_at_s - last_at_s) / settings.memory_s
        by_error = settings.fast_decay * (self.error - settings.fast_decay_error)
        return 1.0 - max(min(1.0 / settings.memory_rows, by_time), by_error)

    def _add_row(self, row: list[float], target: float, decay: float) -> None:
        for i, x in enumerate(row):
            self._normal[i] = [n * decay + x * y for n, y in zip(self._normal[i], row, strict=True)]
            self._target[i] = self._target[i] * decay + x * target

    def _solve(self) -> None:
        """Coordinate descent: exact where it comes to rest, within the bounds at every moment."""
        factors, prior_rows = self._factors, self._settings.prior_rows
        # Far above its prior a coefficient's rows are small in multiples of it, and so must its
        # prior's weight be: it is the ratio that was believed in, not the distance.
        prior_weights = [prior_rows / (f * f) if f > 1.0 else prior_rows for f in factors]
        for _ in range(_SWEEPS):
            for i, (normal, prior_weight, (low, high)) in enumerate(
                zip(self._normal, prior_weights, self._relative_bounds, strict=True)
            ):
                gradient = self._target[i] + prior_weight - sum(map(mul, normal, factors))
                minimum = factors[i] + (gradient - prior_weight * factors[i]) / (
                    normal[i] + prior_weight
                )
                factors[i] = min(max(minimum, low), high)
        # Once more, for rounding may have led out by the last digit.
        self.coefficients = tuple(
            [
                min(max(factor * prior, low), high)
                for factor, (prior, low, high) in zip(
                    factors, self._coefficient_priors, strict=True
                )
            ]
        )


def solve_bounded(
    rows: Sequence[Sequence[float]],
    targets: Sequence[float],
    weights: Sequence[float],
    unknowns: Sequence[CoefficientPrior],
) -> list[float]:
    """Bounded weighted least squares by coordinate descent; exact where it comes to rest."""
    size = len(unknowns)
    normal = [[0.0] * size for _ in range(size)]
    right_side = [0.0] * size
    row_counts = [0] * size
    for row, target, weight in zip(rows, targets, weights, strict=True):
        for i in range(size):
            row_counts[i] += row[i] != 0
            right_side[i] += weight * row[i] * target
            for j in range(size):
                normal[i][j] += weight * row[i] * row[j]
    for i, unknown in enumerate(unknowns):
        prior_weight = _PRIOR_WEIGHT * max(1, row_counts[i]) / (unknown.high - unknown.prior) ** 2
        normal[i][i] += prior_weight
        right_side[i] += prior_weight * unknown.prior
    solution = [unknown.prior for unknown in unknowns]
    for _ in range(_SOLVE_SWEEPS):
        previous = list(solution)
        for i, (_, low, high) in enumerate(unknowns):
            others = sum(normal[i][j] * solution[j] for j in range(size) if j != i)
            minimum = (right_side[i] - others) / normal[i][i]
            solution[i] = min(max(minimum, low), high)
        if max(abs(a - b) for a, b in zip(solution, previous, strict=True)) < _CONVERGED:
            break
    return solution
