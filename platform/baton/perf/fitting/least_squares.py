"""Least squares with a prior, bounds and forgetting, for a handful of features.

Theory of operation. The value is the sum of features times coefficients. Each row is divided by its
size: errors are relative, and a long window does not outweigh a short one. Coefficients are counted
in multiples of their priors.

- The state is the normal matrix and vector of all rows.
- Old rows fade by at most `1 / memory_rows` per row, and no faster than `memory_s` allows. Idle
  hours forget nothing, and many reporters do not shorten the memory.
- The prior counts as a fraction of a row that never fades. A feature that never varies on its own
  keeps its prior.
- Coordinate descent from the last coefficients finds the minimum within the bounds.
- A value far off the prediction is clipped to a few times the usual error, so a stalled step
  changes little. Repeated clipped values raise the usual error and are followed within some tens
  of rows.
- Rows that are not finite or have no meaning are rejected and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import mul
from typing import NamedTuple

_SOLVE_SWEEPS = 500
_CONVERGED = 1e-7
_PRIOR_WEIGHT = 0.002
"""Weight of an unknown's squared distance from its prior, with the upper bound at distance 1,
relative to each row with the unknown. Wide bounds therefore hold less. It grows with the rows,
because rows of one sweep err alike and more of these add no certainty."""


class CoefficientPrior(NamedTuple):
    """Prior and bounds of one coefficient."""

    prior: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Speed of learning, and treatment of outliers."""

    memory_rows: float = 128.0
    """A row fades to 1/e within this number of rows,"""
    memory_s: float = 30.0
    """but not in less time than this."""
    prior_rows: float = 0.02
    """Weight of the prior, in rows."""
    clip_errors: float = 4.0
    """A larger residual, in usual errors, is clipped."""
    error_rows: float = 10.0
    """Rows over which the usual error is averaged."""
    min_error: float = 0.02
    """Lower bound of the usual relative error, so that noise-free rows do not make each change an
    outlier."""
    fast_decay: float = 0.25
    """Additional decay per row, per unit of usual error"""
    fast_decay_error: float = 1 / 3
    """above this: the system has changed, and old rows delay the fit."""


_SWEEPS = 2
"""Per row; the next row continues."""


class LeastSquares:
    """One model; errors are relative to the larger of prediction and value."""

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
        self.rows = 0
        """Accepted rows."""
        self.clipped_rows = 0
        """Accepted rows whose residual was clipped."""
        self.rejected_rows = 0
        self.error = 1.0
        """Usual relative error of a prediction, after clipping."""

    def predict(self, features: Sequence[float]) -> float:
        """The value at `features`."""
        predicted: float = sum(map(mul, features, self.coefficients))
        return predicted

    def observe(self, features: Sequence[float], value: float, now_s: float) -> bool:
        """Learn from one row; False for a rejected row."""
        expected = self.predict(features)
        is_meaningful = 0 < expected < inf and 0 <= value < inf and isfinite(now_s)
        if not is_meaningful or min(features) < 0:
            self.rejected_rows += 1
            return False
        # Relative to the larger of both, a stalled step weighs little, and the first rows do not
        # outweigh later rows when the prior is far too small.
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
        """Factor on older rows when a row of `now_s` arrives."""
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
        """Coordinate descent: exact at convergence, within the bounds at every sweep."""
        factors, prior_rows = self._factors, self._settings.prior_rows
        # The prior is on the ratio, not the distance: far above the prior, rows are small in
        # multiples of it, so the prior's weight is too.
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
        # Rounding may have left the bounds by the last digit.
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
    *,
    held: Mapping[int, float] | None = None,
) -> list[float]:
    """Bounded weighted least squares by coordinate descent; exact at convergence.

    `held` has the weight of some unknowns' priors, by number, relative to all rows.
    """
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
        prior_rows = (held or {}).get(i, 0.0) * len(rows) or _PRIOR_WEIGHT * max(1, row_counts[i])
        prior_weight = prior_rows / (unknown.high - unknown.prior) ** 2
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
