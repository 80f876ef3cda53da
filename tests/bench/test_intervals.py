"""Intervals of confidence: known cases, and how often they hold what they should."""

from __future__ import annotations

import math
import random

import pytest

from baton.bench.findings.document import confidence_interval


def test_an_interval_is_students() -> None:
    found = confidence_interval([10.0, 12.0, 11.0, 13.0, 14.0])
    assert found.mean == 12
    # t(0.975, 4) = 2.776, s = sqrt(2.5)
    assert found.low == pytest.approx(12 - 2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert found.high == pytest.approx(12 + 2.776 * math.sqrt(2.5) / math.sqrt(5))


@pytest.mark.parametrize("values", [[3.0], [1.0, math.nan], [1.0, math.inf]])
def test_nothing_is_claimed_where_nothing_is_known(values: list[float]) -> None:
    assert (confidence_interval(values).low, confidence_interval(values).high) == (None, None)


def test_no_values_have_no_mean() -> None:
    assert math.isnan(confidence_interval([]).mean)


@pytest.mark.parametrize("repeats", [3, 5, 12])
def test_nineteen_of_twenty_intervals_hold_the_truth(repeats: int) -> None:
    rng = random.Random(repeats)
    held = 0
    for _ in range(2000):
        found = confidence_interval([rng.gauss(5, 2) for _ in range(repeats)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 5 <= found.high
    assert 0.935 <= held / 2000 <= 0.965


def test_the_table_goes_on_smoothly() -> None:
    def half(count: int) -> float:
        values = [(-1.0) ** number for number in range(count)]
        found = confidence_interval(values)
        assert found.high is not None
        spread = math.sqrt(count / (count - 1)) / math.sqrt(count)
        return (found.high - found.mean) / spread if count % 2 == 0 else math.nan

    # t(0.975, 29) = 2.045, t(0.975, 31) = 2.040, t(0.975, 99) = 1.984
    assert half(30) == pytest.approx(2.045)
    assert half(32) == pytest.approx(2.040, abs=0.001)
    assert half(100) == pytest.approx(1.984, abs=0.001)
