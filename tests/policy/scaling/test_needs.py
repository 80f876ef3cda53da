"""What is forecast of steady, rising, jumping, silent and broken series."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.policy.scaling.observation import ServiceLevel
from baton.policy.scaling.slo import (
    BurstinessEstimator,
    CapacityCorrection,
    RateForecast,
    is_miss_unexplained,
)
from tests.policy.scaling.simulated_pools import decode_pool, demand, observe, prefill_pool

HORIZON_S = 60.0


def fed(rate: Callable[[float], float], *, for_s: float, every_s: float = 5.0) -> RateForecast:
    forecast = RateForecast()
    for tick in range(int(for_s / every_s) + 1):
        forecast.observe(tick * every_s, rate(tick * every_s), horizon_s=HORIZON_S)
    return forecast


def test_steady_demand_stays_as_it_is() -> None:
    forecast = fed(lambda _: 100.0, for_s=1200)
    assert forecast.predict(HORIZON_S) == pytest.approx(100.0)
    assert forecast.predict(HORIZON_S, quantile=0.9) == pytest.approx(100.0)


def test_a_rise_is_carried_on() -> None:
    forecast = fed(lambda at_s: 100.0 + at_s, for_s=1200)
    assert 1300.0 < forecast.predict(HORIZON_S, quantile=0.5) < 1400.0


def test_a_trend_dies_away() -> None:
    forecast = fed(lambda at_s: 100.0 + at_s, for_s=600)
    near, far, farther = (forecast.predict(horizon) for horizon in (60.0, 600.0, 6000.0))
    assert far - near > farther - far


def test_a_fall_never_goes_below_nothing() -> None:
    forecast = fed(lambda at_s: max(0.0, 1000.0 - 5 * at_s), for_s=199)
    assert forecast.predict(3600.0) == 0.0


def noisy(seed: int, spread: float) -> Callable[[float], float]:
    rng = Random(seed)
    return lambda _: max(0.0, rng.gauss(100.0, spread))


def test_jumpy_demand_gets_more_headroom_than_steady_demand() -> None:
    headroom = [
        fed(noisy(1, spread), for_s=3600).predict(HORIZON_S, quantile=0.9) for spread in (2, 20, 60)
    ]
    assert headroom[0] < headroom[1] < headroom[2]


def test_a_quantile_covers_its_share_of_arrivals() -> None:
    rate = noisy(7, 20.0)
    forecast = RateForecast()
    due: list[tuple[float, float]] = []
    covered: list[bool] = []
    for tick in range(1000):
        at_s, now = tick * 15.0, rate(0)
        covered += [now <= predicted for due_s, predicted in due[-4:] if due_s == at_s]
        forecast.observe(at_s, now, horizon_s=HORIZON_S)
        due.append((at_s + HORIZON_S, forecast.predict(HORIZON_S, quantile=0.9)))
    assert sum(covered) / len(covered) == pytest.approx(0.9, abs=0.03)


def test_a_higher_quantile_forecasts_no_less() -> None:
    forecast = fed(noisy(3, 30.0), for_s=3600)
    values = [forecast.predict(HORIZON_S, quantile=index / 10) for index in range(11)]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_a_burst_after_idle_time_counts_within_a_minute() -> None:
    forecast = fed(lambda at_s: 0.0 if at_s < 600 else 500.0, for_s=660)
    assert forecast.predict(HORIZON_S, quantile=0.6) > 450.0


def test_arrivals_in_a_gap_teach_nothing() -> None:
    forecast = fed(lambda _: 100.0, for_s=1200)
    forecast.observe(1e6, 5.0, horizon_s=HORIZON_S)
    for quantile in (0.0, 0.9):
        assert forecast.predict(HORIZON_S, quantile=quantile) == pytest.approx(5.0, rel=0.1)


def test_a_clock_that_goes_back_restarts_the_estimate() -> None:
    forecast = fed(lambda _: 100.0, for_s=1200)
    forecast.observe(10.0, 7.0, horizon_s=HORIZON_S)
    assert forecast.predict(HORIZON_S) == 7.0


def test_garbage_is_passed_over() -> None:
    forecast = fed(lambda _: 100.0, for_s=1200)
    for bad in (math.nan, math.inf, -1.0):
        forecast.observe(1300.0, bad, horizon_s=HORIZON_S)
    assert forecast.predict(HORIZON_S) == pytest.approx(100.0)


@given(
    steps=st.lists(st.tuples(st.floats(-10.0, 1e5), st.floats(0.0, 1e9)), min_size=1, max_size=40),
    horizon_s=st.floats(0.0, 1e5),
    quantile=st.floats(0.0, 1.0),
)
def test_a_forecast_is_always_a_number_and_never_negative(
    steps: list[tuple[float, float]], horizon_s: float, quantile: float
) -> None:
    forecast, at_s = RateForecast(), 0.0
    for step_s, rate in steps:
        at_s += step_s
        forecast.observe(at_s, rate, horizon_s=horizon_s)
        assert 0 <= forecast.predict(horizon_s, quantile=quantile) < math.inf


@given(factor=st.floats(0.01, 100.0))
def test_demand_of_another_scale_is_forecast_at_that_scale(factor: float) -> None:
    rates = noisy(5, 30.0)
    one, other = RateForecast(), RateForecast()
    for tick in range(100):
        rate = rates(0)
        one.observe(tick * 10.0, rate, horizon_s=HORIZON_S)
        other.observe(tick * 10.0, rate * factor, horizon_s=HORIZON_S)
    assert other.predict(HORIZON_S, quantile=0.8) == pytest.approx(
        factor * one.predict(HORIZON_S, quantile=0.8)
    )


def test_headroom_for_jumps_does_not_lead_beyond_the_most_that_was_seen() -> None:
    forecast = RateForecast()
    for tick in range(300):
        burst = (tick // 10) % 5 == 0
        forecast.observe(2.0 * tick, 1000.0 if burst else 50.0, horizon_s=30.0)
    for tick in range(300, 310):
        forecast.observe(2.0 * tick, 1000.0, horizon_s=30.0)
    mean = forecast.predict(30.0)
    assert forecast.predict(30.0, quantile=0.95) <= max(mean, 1000.0) * 1.001
    assert forecast.predict(30.0, quantile=0.95) >= mean


# ---------- how irregular demand is, told from windows of simulated arrivals
WINDOW_S, SIZE = 30.0, 100.0


def measured(work: Callable[[int], float], windows: int = 60) -> float:
    meter = BurstinessEstimator()
    for number in range(windows):
        rate = work(number) / WINDOW_S
        meter.observe(number * WINDOW_S, window_s=WINDOW_S, rate=rate, mean_tokens=SIZE)
    return meter.squared_variation()


def batches(rng: Random, of: int) -> Callable[[int], float]:
    """300 prompts a window, all alike, that arrive at random in batches of so many."""

    def work(_: int) -> float:
        count, at = 0, rng.expovariate(300 / of)
        while at < 1.0:
            count, at = count + of, at + rng.expovariate(300 / of)
        return count * SIZE

    return work


def test_arrivals_in_pairs_are_more_irregular_than_at_random() -> None:
    def of_prompts_alike(batch: int) -> float:
        return sum(measured(batches(Random(seed), batch), 400) for seed in range(20)) / 20

    assert of_prompts_alike(1) == pytest.approx(2.0, rel=0.1)
    assert 2.1 < of_prompts_alike(2) < of_prompts_alike(3) <= 3.0


def test_bursts_of_many_count_no_more_than_requests_by_themselves_can() -> None:
    assert all(measured(batches(Random(seed), 12)) == 3.0 for seed in range(20))


def test_even_demand_counts_as_random_at_least() -> None:
    assert measured(lambda _: 300 * SIZE) == 2.0


def test_a_slow_rise_and_a_single_jump_are_no_irregularity() -> None:
    assert measured(lambda number: (300 + 3 * number) * SIZE) == 2.0
    assert measured(lambda number: (300 if number < 30 else 900) * SIZE) == 2.0


def test_there_is_a_most_that_is_believed() -> None:
    rng = Random(1)
    assert measured(lambda _: rng.choice((0.0, 10_000.0)) * SIZE) == 3.0


def test_windows_that_overlap_count_once() -> None:
    meter = BurstinessEstimator()
    rng = Random(2)
    for tick in range(8 * 15):  # eight windows, looked at every two seconds
        meter.observe(tick * 2.0, window_s=WINDOW_S, rate=rng.choice((1.0, 1e4)), mean_tokens=SIZE)
    assert meter.squared_variation() == 2.0, "seven pairs are too few to tell"


def test_gaps_and_missing_reports_teach_nothing() -> None:
    assert measured(lambda _: 0.0) == 2.0
    meter = BurstinessEstimator()
    for number in range(60):
        rate = 1e4 if number % 2 else 1.0
        meter.observe(number * 1000.0, window_s=WINDOW_S, rate=rate, mean_tokens=SIZE)
    assert meter.squared_variation() == 2.0


# ---------- needs are raised when requests are late for no reason that is known, and only then
def unexplained(service: ServiceLevel, role: Role, *, load: float = 3.0) -> bool:
    observation = observe(0.0, demand(load, 1.0), prefill_pool(4), decode_pool(2), service=service)
    return is_miss_unexplained(replace(observation, attainment_target=0.9), role)


def test_a_factor_goes_up_a_tenth_a_minute_up_to_its_bound() -> None:
    correction = CapacityCorrection(1.3)
    for second in range(0, 59, 2):
        correction.update(float(second), is_unexplained=True)
    assert correction.factor == 1.0
    correction.update(60.0, is_unexplained=True)
    assert correction.factor == pytest.approx(1.1)
    for second in range(62, 1200, 2):
        correction.update(float(second), is_unexplained=True)
    assert correction.factor == 1.3


def test_a_factor_fades_in_half_an_hour() -> None:
    correction = CapacityCorrection(2.0)
    for second in range(0, 400, 10):
        correction.update(float(second), is_unexplained=True)
    raised = correction.factor
    for second in range(400, 2200, 10):
        correction.update(float(second), is_unexplained=False)
    assert correction.factor - 1.0 == pytest.approx((raised - 1.0) / 2.718, rel=0.02)


def test_a_moment_without_misses_restarts_the_minute() -> None:
    correction = CapacityCorrection(2.0)
    for second in range(0, 600, 10):
        correction.update(float(second), is_unexplained=second % 50 != 0)
    assert correction.factor == 1.0


def test_whose_objective_is_kept_worse_is_to_blame() -> None:
    slow_start = ServiceLevel(attainment=0.8, ttft_p90_s=3.0, tpot_p90_s=0.04)
    slow_stream = ServiceLevel(attainment=0.8, ttft_p90_s=1.0, tpot_p90_s=0.06)
    assert unexplained(slow_start, Role.PREFILL)
    assert not unexplained(slow_start, Role.DECODE)
    assert unexplained(slow_stream, Role.DECODE)
    assert not unexplained(slow_stream, Role.PREFILL)
    assert unexplained(slow_stream, Role.MIXED)


def test_nothing_is_wrong_at_the_target_or_with_hardly_any_arrival() -> None:
    late = ServiceLevel(attainment=0.89, ttft_p90_s=3.0)
    assert unexplained(late, Role.PREFILL)
    assert not unexplained(replace(late, attainment=0.9), Role.PREFILL)
    assert not unexplained(replace(late, attainment=None), Role.PREFILL)
    assert not unexplained(late, Role.PREFILL, load=0.05)
