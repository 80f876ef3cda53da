"""The fit behind every estimate: right, bounded, forgetful, and hard to upset."""

from __future__ import annotations

import itertools
import random
from itertools import product
from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.fitting.least_squares import (
    CoefficientPrior,
    FitSettings,
    LeastSquares,
    solve_bounded,
)
from baton.perf.fitting.least_squares import CoefficientPrior as Prior

WIDE = (1e-9, 1e3)
ENGINE = (
    CoefficientPrior(8e-3, 1e-6, 10.0),
    CoefficientPrior(5e-5, 1e-8, 0.1),
    CoefficientPrior(5e-5, 1e-9, 0.1),
    CoefficientPrior(4e-8, 1e-12, 1e-4),
)


def windows(rng: Random, count: int) -> list[tuple[float, ...]]:
    """What replicas under changing load report: steps, prefill, decode and context tokens."""
    rows: list[tuple[float, ...]] = []
    for _ in range(count):
        steps, running = rng.randint(1, 20), rng.randint(0, 64)
        prefill = rng.choice([0, 0, rng.randint(1, 2000 * steps)])
        rows.append((steps, prefill, steps * running, steps * running * rng.randint(100, 4000)))
    return rows


def dot(features: tuple[float, ...], coefficients: tuple[float, ...]) -> float:
    return sum(x * c for x, c in zip(features, coefficients, strict=True))


def teach(
    fit: LeastSquares,
    truth: tuple[float, ...],
    *,
    rows: int,
    noise: float = 0.0,
    start_s: float = 0.0,
    seed: int = 0,
) -> None:
    rng = Random(seed)
    for number, features in enumerate(windows(rng, rows)):
        value = dot(features, truth) * max(0.1, rng.gauss(1.0, noise))
        assert fit.observe(features, value, start_s + 0.25 * number)


@pytest.mark.parametrize(
    "truth",
    [
        (9e-3, 5e-5, 5e-5, 4e-8),
        (1e-3, 5e-6, 1e-4, 2e-8),
        (2e-2, 2e-3, 1e-3, 1e-7),
        (5e-2, 1e-4, 5e-4, 5e-7),
    ],
    ids=["near-the-prior", "faster", "forty-times-slower-prefill", "ten-times-slower"],
)
def test_coefficients_are_recovered_within_a_tenth_from_noisy_rows(
    truth: tuple[float, ...],
) -> None:
    fit = LeastSquares(ENGINE)
    teach(fit, truth, rows=600, noise=0.1)
    for learned, true in zip(fit.coefficients, truth, strict=True):
        assert learned == pytest.approx(true, rel=0.1)


def test_predictions_are_within_a_few_hundredths_after_a_hundred_clean_rows() -> None:
    truth = (2e-2, 2e-3, 1e-3, 1e-7)
    fit = LeastSquares(ENGINE)
    teach(fit, truth, rows=100)
    for features in windows(Random(9), 50):
        assert fit.predict(features) == pytest.approx(dot(features, truth), rel=0.03)


def test_a_feature_that_is_always_nought_keeps_its_prior() -> None:
    fit = LeastSquares((CoefficientPrior(1.0, *WIDE), CoefficientPrior(7.0, *WIDE)))
    for number in range(500):
        fit.observe((number % 5 + 1, 0), 3.0 * (number % 5 + 1), float(number))
    assert fit.coefficients[0] == pytest.approx(3.0, rel=0.01)
    assert fit.coefficients[1] == 7.0


def test_features_that_never_vary_apart_predict_their_sum_and_stay_near_their_priors() -> None:
    fit = LeastSquares((CoefficientPrior(1.0, *WIDE), CoefficientPrior(1.0, *WIDE)))
    for number in range(2000):
        fit.observe((2, 2), 8.0, float(number))
    assert fit.predict((2, 2)) == pytest.approx(8.0, rel=0.02)
    assert fit.coefficients == pytest.approx((2.0, 2.0), rel=0.2)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_change_of_speed_is_followed_within_three_hundred_rows(factor: float) -> None:
    before = (9e-3, 5e-5, 5e-5, 4e-8)
    after = tuple(c * factor for c in before)
    fit = LeastSquares(ENGINE)
    teach(fit, before, rows=600)
    teach(fit, after, rows=300, start_s=1e4, seed=1)
    for features in windows(Random(9), 20):
        assert fit.predict(features) == pytest.approx(dot(features, after), rel=0.15)


def test_one_stalled_step_moves_a_prediction_by_less_than_a_hundredth() -> None:
    truth = (9e-3, 5e-5, 5e-5, 4e-8)
    fit = LeastSquares(ENGINE)
    teach(fit, truth, rows=300)
    before = fit.predict((1, 500, 10, 10_000))
    fit.observe((1, 500, 10, 10_000), 30.0, 1e3)
    assert fit.predict((1, 500, 10, 10_000)) == pytest.approx(before, rel=0.01)
    assert fit.clipped_rows > 0


def test_stalls_in_one_row_of_twenty_leave_the_fit_within_a_tenth() -> None:
    truth, rng = (9e-3, 5e-5, 5e-5, 4e-8), Random(3)
    fit = LeastSquares(ENGINE)
    for number, features in enumerate(windows(rng, 1000)):
        stall_s = 2.0 if number % 20 == 19 else 0.0
        fit.observe(features, dot(features, truth) + stall_s, 0.25 * number)
    for features in windows(Random(9), 50):
        assert fit.predict(features) == pytest.approx(dot(features, truth), rel=0.1)


@pytest.mark.parametrize(
    ("features", "value", "now_s"),
    [
        ((1, 2), nan, 0.0),
        ((1, 2), inf, 0.0),
        ((1, 2), -1.0, 0.0),
        ((nan, 2), 1.0, 0.0),
        ((inf, 2), 1.0, 0.0),
        ((5, -1), 1.0, 0.0),
        ((0, 0), 1.0, 0.0),
        ((1, 2), 1.0, nan),
    ],
)
def test_a_row_that_means_nothing_is_refused_and_counted(
    features: tuple[float, ...], value: float, now_s: float
) -> None:
    fit = LeastSquares((CoefficientPrior(1.0, *WIDE), CoefficientPrior(1.0, *WIDE)))
    fit.observe((1, 1), 3.0, 0.0)
    before = fit.coefficients
    assert not fit.observe(features, value, now_s)
    assert (fit.rejected_rows, fit.rows) == (1, 1)
    assert fit.coefficients == before


def test_idle_time_forgets_nothing() -> None:
    truth = (9e-3, 5e-5, 5e-5, 4e-8)
    lively, idle = LeastSquares(ENGINE), LeastSquares(ENGINE)
    teach(lively, truth, rows=300)
    teach(idle, truth, rows=300)
    lively.observe((1, 0, 0, 0), 9e-3, 75.0)
    idle.observe((1, 0, 0, 0), 9e-3, 1e6)
    assert idle.coefficients == lively.coefficients


def test_many_reporters_do_not_shorten_the_memory() -> None:
    """A thousand rows at once, all of one kind, leave what was known of other work in place."""
    truth = (9e-3, 5e-4, 5e-5, 4e-8)
    fit = LeastSquares(ENGINE)
    teach(fit, truth, rows=300)
    for _ in range(1000):
        fit.observe((10, 0, 100, 100_000), dot((10, 0, 100, 100_000), truth), 76.0)
    before = fit.coefficients[1]
    assert before == pytest.approx(5e-4, rel=0.02)
    # ... of which a seconds-long memory would have kept nothing: one odd row is outvoted.
    fit.observe((1, 2000, 0, 0), 0.5, 76.0)
    assert fit.coefficients[1] == pytest.approx(5e-4, rel=0.05)


def test_time_that_runs_backwards_passes_no_time() -> None:
    fits = [LeastSquares((CoefficientPrior(1.0, *WIDE),)) for _ in range(2)]
    for fit, times in zip(fits, ((100.0, 1.0, 100.0), (100.0, 100.0, 100.0)), strict=True):
        for number in range(100):  # until its errors are small and only time makes it forget
            fit.observe((1,), 2.0, float(number))
        for value, now_s in zip((2.0, 3.0, 4.0), times, strict=True):
            assert fit.observe((1,), value, now_s)
    assert fits[0].coefficients == fits[1].coefficients


def test_after_clean_rows_a_change_of_a_twentieth_is_no_outlier() -> None:
    fit = LeastSquares((CoefficientPrior(1.0, *WIDE),))
    for number in range(500):
        fit.observe((1,), 2.0, float(number))
    assert fit.error == FitSettings().min_error
    clipped = fit.clipped_rows
    fit.observe((1,), 2.1, 500.0)
    assert fit.clipped_rows == clipped


def test_rounding_moves_no_coefficient_out_of_its_bounds() -> None:
    rng = Random(5)
    for _ in range(200):
        low, prior, high = sorted(rng.uniform(1e-6, 1e-2) for _ in range(3))
        fit = LeastSquares((CoefficientPrior(prior, low, high),))
        for number in range(30):
            fit.observe((1,), 0.0, float(number))
        assert fit.coefficients[0] >= low
        for number in range(200):
            fit.observe((1,), 1e3, 100.0 + number)
        assert fit.coefficients[0] <= high


@pytest.mark.parametrize(
    "coefficient",
    [(1.0, 0.0, 2.0), (1.0, -1.0, 2.0), (3.0, 1.0, 2.0), (0.5, 1.0, 2.0), (1.0, 0.5, inf)],
)
def test_bounds_that_do_not_hold_the_prior_are_refused(coefficient: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected 0 < low <= prior <= high"):
        LeastSquares((CoefficientPrior(*coefficient),))


FEATURES = st.tuples(*[st.floats(0, 1e6) for _ in range(3)])
BOUNDED = (
    CoefficientPrior(1.0, 0.3, 4.0),
    CoefficientPrior(1e-3, 1e-5, 1e-1),
    CoefficientPrior(7.0, 7.0, 8.0),
)


@given(rows=st.lists(st.tuples(FEATURES, st.floats(0, 1e9), st.floats(0, 1e5)), max_size=30))
def test_coefficients_never_leave_their_bounds(
    rows: list[tuple[tuple[float, ...], float, float]],
) -> None:
    fit = LeastSquares(BOUNDED)
    for features, value, now_s in rows:
        fit.observe(features, value, now_s)
        for learned, (_, low, high) in zip(fit.coefficients, BOUNDED, strict=True):
            assert low <= learned <= high
    assert fit.rows + fit.rejected_rows == len(rows)
    assert 0 < fit.error <= 1.0


# -------------------------------------------------------------------- the slow, obvious twin


def batch_minimum(
    normal: list[list[float]], target: list[float], bounds: list[tuple[float, float]]
) -> list[float]:
    """Minimise x'Nx/2 - t'x by trying every set of coefficients that may rest on a bound."""
    best: tuple[float, list[float]] | None = None
    for choice in product(("free", "low", "high"), repeat=len(target)):
        fixed = {i: bounds[i][c == "high"] for i, c in enumerate(choice) if c != "free"}
        free = [i for i in range(len(target)) if i not in fixed]
        solved = gauss(
            [[normal[i][j] for j in free] for i in free],
            [target[i] - sum(normal[i][j] * x for j, x in fixed.items()) for i in free],
        )
        x = [fixed[i] if i in fixed else solved[free.index(i)] for i in range(len(target))]
        if any(
            not low - 1e-9 <= v <= high + 1e-9 for v, (low, high) in zip(x, bounds, strict=True)
        ):
            continue
        cost = sum(
            x[i] * (0.5 * sum(normal[i][j] * x[j] for j in range(len(x))) - target[i])
            for i in range(len(x))
        )
        if best is None or cost < best[0]:
            best = (cost, x)
    assert best is not None
    return best[1]


def gauss(matrix: list[list[float]], vector: list[float]) -> list[float]:
    rows = [[*row, v] for row, v in zip(matrix, vector, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(len(rows)):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


@given(seed=st.integers(0, 10**6))
def test_at_rest_the_fit_is_the_least_squares_solution_within_the_bounds(seed: int) -> None:
    """Rows taken in all at once, without forgetting or clipping, by a solver of a few lines."""
    rng = Random(seed)
    coefficients = (
        CoefficientPrior(1.0, 0.5, 2.0),
        CoefficientPrior(2.0, 0.1, 3.0),
        CoefficientPrior(1.0, *WIDE),
    )
    settings = FitSettings(memory_rows=inf, clip_errors=inf, fast_decay=0.0, prior_rows=0.5)
    fit = LeastSquares(coefficients, settings)
    truth = (rng.uniform(0.1, 4.0), rng.uniform(0.05, 5.0), rng.uniform(0.1, 1.0))
    normal = [[0.0] * 3 for _ in range(3)]
    target = [0.0] * 3
    for number in range(12):
        features = tuple(rng.uniform(0.0, 3.0) for _ in range(3))
        value = dot(features, truth) * rng.uniform(0.7, 1.3)
        scale = max(value, fit.predict(features))
        row = [x * c.prior / scale for x, c in zip(features, coefficients, strict=True)]
        for i in range(3):
            target[i] += row[i] * value / scale
            for j in range(3):
                normal[i][j] += row[i] * row[j]
        assert fit.observe(features, value, float(number))
    for _ in range(300):
        fit._solve()
    factors = [c / p.prior for c, p in zip(fit.coefficients, coefficients, strict=True)]
    held = [0.5 / max(1.0, factor) ** 2 for factor in factors]
    for i in range(3):
        normal[i][i] += held[i]
        target[i] += held[i]
    bounds = [(c.low / c.prior, c.high / c.prior) for c in coefficients]
    assert factors == pytest.approx(batch_minimum(normal, target, bounds), rel=1e-3)


# ---------- least squares within bounds against a search over a grid, and what priors hold
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


def test_a_coefficient_that_no_row_measures_keeps_its_prior() -> None:
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


def test_a_coefficient_with_a_wide_prior_moves_more_easily() -> None:
    near, far = (
        solve_bounded([[1.0]], [1.5], [1.0], [Prior(1.0, 0.0, high)])[0] for high in (1.6, 9.0)
    )
    assert near < far < 1.5
