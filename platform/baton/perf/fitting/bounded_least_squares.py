"""Weighted least squares within bounds, held to where each unknown is believed to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SWEEPS = 500
_CONVERGED = 1e-7
_PRIOR_WEIGHT = 0.002
"""Of an unknown's squared distance from its prior, where the upper bound is at distance 1, against
the squared error of each row that it has a part in: what may lie far off is held less, and rows of
one sweep err alike, so more of them make nothing surer."""


class Unknown(NamedTuple):
    """One coefficient."""

    prior: float
    low: float
    high: float


def solve(
    rows: Sequence[Sequence[float]],
    targets: Sequence[float],
    weights: Sequence[float],
    unknowns: Sequence[Unknown],
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
    for _ in range(_SWEEPS):
        previous = list(solution)
        for i, (_, low, high) in enumerate(unknowns):
            others = sum(normal[i][j] * solution[j] for j in range(size) if j != i)
            minimum = (right_side[i] - others) / normal[i][i]
            solution[i] = min(max(minimum, low), high)
        if max(abs(a - b) for a, b in zip(solution, previous, strict=True)) < _CONVERGED:
            break
    return solution
