"""How irregular demand is, told from windows of simulated arrivals."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from baton.policy.scaling.slo import BurstinessEstimator

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


def test_gaps_and_silence_teach_nothing() -> None:
    assert measured(lambda _: 0.0) == 2.0
    meter = BurstinessEstimator()
    for number in range(60):
        rate = 1e4 if number % 2 else 1.0
        meter.observe(number * 1000.0, window_s=WINDOW_S, rate=rate, mean_tokens=SIZE)
    assert meter.squared_variation() == 2.0
