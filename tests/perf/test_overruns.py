"""Sums that forget, and how late things come."""

from __future__ import annotations

import random

import pytest

from baton.perf.fitting.decayed_sum import DecayedSum
from baton.perf.fitting.lateness import LatenessHistogram


def test_a_steady_rate_is_what_a_sum_comes_to_in_its_memory() -> None:
    total = DecayedSum(5.0)
    for tenth in range(1000):
        total.add(0.3, tenth / 10)
    assert total.rate(99.9) == pytest.approx(3.0, rel=0.02)
    assert total.value(99.9) == pytest.approx(15.0, rel=0.02)


def test_after_its_memory_a_third_is_left() -> None:
    total = DecayedSum(2.0)
    total.add(10.0, 0.0)
    assert total.value(2.0) == pytest.approx(3.6788, rel=1e-3)
    assert total.value(-5.0) == 10.0


def test_what_is_told_late_is_not_forgotten_twice() -> None:
    total = DecayedSum(2.0)
    total.add(1.0, 10.0)
    total.add(1.0, 5.0)
    assert total.value(10.0) == 2.0


def test_a_quantile_is_the_edge_above_it() -> None:
    seen, rng = LatenessHistogram(), random.Random(1)
    late_s = [rng.expovariate(10.0) for _ in range(900)]
    for value in late_s:
        seen.observe(value)
    true_s = sorted(late_s)[890]
    assert true_s <= seen.quantile_s(0.99) * 1.05
    assert seen.quantile_s(0.99) <= true_s * 1.3
    assert seen.quantile_s(0.5) < seen.quantile_s(0.99)


@pytest.mark.parametrize("late_s", [60.0, 600.0, 86_400.0])
def test_what_is_later_than_half_a_minute_is_not_taken_for_half_a_minute(late_s: float) -> None:
    seen = LatenessHistogram()
    for _ in range(100):
        seen.observe(late_s)
    assert seen.quantile_s(0.99) == pytest.approx(late_s, rel=0.25)


def test_of_a_few_nothing_is_said() -> None:
    seen = LatenessHistogram()
    for _ in range(49):
        seen.observe(3.0)
    assert seen.quantile_s(0.99) == 0.0
    seen.observe(3.0)
    assert seen.quantile_s(0.99) == pytest.approx(3.0, rel=0.25)


def test_what_comes_early_is_not_late() -> None:
    seen = LatenessHistogram()
    for _ in range(100):
        seen.observe(-0.5)
    assert seen.quantile_s(0.99) == 0.0


def test_what_was_is_forgotten_and_what_makes_no_sense_ignored() -> None:
    seen = LatenessHistogram()
    for _ in range(1000):
        seen.observe(2.0)
    for _ in range(8000):
        seen.observe(0.01)
        seen.observe(float("nan"))
    assert seen.quantile_s(0.99) < 0.02
    for _ in range(1000):
        seen.observe(float("inf"))
    assert seen.quantile_s(0.99) < float("inf")
