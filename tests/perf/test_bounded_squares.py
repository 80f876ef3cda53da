"""Least squares within bounds against a search over a grid, and what priors hold."""

from __future__ import annotations

import itertools
import random

import pytest

from baton.perf.fitting.least_squares import CoefficientPrior as Prior
from baton.perf.fitting.least_squares import solve_bounded


def cost(
    rows: list[list[float]],
    targets: list[float],
    weights: list[float],
    unknowns: list[Prior],
    found: tuple[float, ...],
) -> float:
    errors = sum(
        weight * (sum(x * s for x, s in zip(row, found, strict=True)) - target) ** 2
        for row, target, weight in zip(rows, targets, weights, strict=True)
    )
    held = sum(
        0.002
        * max(1, sum(row[i] != 0 for row in rows))
        * ((found[i] - value.prior) / (value.high - value.prior)) ** 2
        for i, value in enumerate(unknowns)
    )
    return errors + held


@pytest.mark.parametrize("seed", range(6))
def test_nothing_within_the_bounds_is_better(seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.uniform(0, 2) * (rng.random() < 0.7) for _ in range(3)] for _ in range(12)]
    targets = [rng.uniform(0, 4) for _ in rows]
    weights = [rng.choice((0.2, 1.0, 3.0)) for _ in rows]
    unknowns = [Prior(1.0, 0.5, 1.4) for _ in range(3)]
    found = solve_bounded(rows, targets, weights, unknowns)
    assert all(value.low <= x <= value.high for value, x in zip(unknowns, found, strict=True))
    best = cost(rows, targets, weights, unknowns, (found[0], found[1], found[2]))
    steps = [0.5 + 0.05 * i for i in range(19)]
    for other in itertools.product(steps, repeat=3):
        assert best <= cost(rows, targets, weights, unknowns, other) + 1e-9


def test_what_no_row_has_a_part_in_stays_where_it_is_believed_to_be() -> None:
    found = solve_bounded(
        [[1.0, 0.0]],
        [3.0],
        [1.0],
        [Prior(1.0, 0.0, 9.0), Prior(0.7, 0.0, 9.0)],
    )
    assert found == pytest.approx([3.0, 0.7], abs=0.01)


def test_more_rows_of_the_same_make_nothing_surer() -> None:
    one, many = (
        solve_bounded([[1.0]] * count, [2.0] * count, [1.0] * count, [Prior(1.0, 0.0, 2.5)])
        for count in (1, 100)
    )
    assert one == pytest.approx(many)
    assert one[0] < 1.9995


def test_what_may_lie_far_off_is_held_less() -> None:
    near, far = (
        solve_bounded([[1.0]], [1.5], [1.0], [Prior(1.0, 0.0, high)])[0] for high in (1.6, 9.0)
    )
    assert near < far < 1.5
