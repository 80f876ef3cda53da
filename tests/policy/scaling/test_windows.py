"""What is said of the values of the last while, against a list of all values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.scaling.estimators.windows import SlidingMax, SlidingSlope

steps = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=60)


@given(steps=steps)
def test_it_is_the_maximum_of_the_values_in_the_window(steps: list[tuple[int, int]]) -> None:
    window, at_s, values = SlidingMax(100.0), 0.0, []
    for step_s, value in steps:
        at_s += step_s
        values.append((at_s, float(value)))
        assert window.push(at_s, value) == max(
            value for then_s, value in values if then_s >= at_s - 100.0
        )


def test_values_close_together_are_bounded_in_number_and_hardly_forgotten_early() -> None:
    window = SlidingMax(1000.0)
    for tick in range(20_000):
        window.push(tick / 10, 20_000.0 - tick)
    assert len(window._values) <= 1001
    assert window.push(2000.0, 0.0) >= 20_000.0 - 10 * 1002.0


def test_a_clock_that_goes_back_begins_anew() -> None:
    window = SlidingMax(100.0)
    window.push(500.0, 9.0)
    assert window.push(10.0, 2.0) == 2.0


@given(
    rate=st.floats(-5, 5), start=st.floats(-10, 10), step_s=st.sampled_from((0.5, 1.0, 2.0, 3.0))
)
def test_the_slope_of_a_straight_line_is_known_once_it_spans_the_window(
    rate: float, start: float, step_s: float
) -> None:
    slope = SlidingSlope(6.0)
    said = [slope.push(at_s, start + rate * at_s) for at_s in (step_s * tick for tick in range(20))]
    spans = round(6.0 / step_s)
    assert said[:spans] == [0.0] * spans
    assert said[spans:] == pytest.approx([rate] * (20 - spans), abs=1e-9)


def test_a_slope_forgets_what_is_older_than_its_window() -> None:
    slope = SlidingSlope(6.0)
    for at_s in range(0, 20, 2):
        slope.push(at_s, 10.0 * at_s)
    flat = [slope.push(at_s, 190.0) for at_s in range(20, 30, 2)]
    assert flat[0] > 0
    assert flat[-1] == 0


def test_a_slope_is_not_told_from_two_values_however_far_apart() -> None:
    slope = SlidingSlope(6.0)
    slope.push(0.0, 0.0)
    assert slope.push(20.0, 100.0) == 0.0


def test_a_slope_keeps_a_bounded_number_of_values() -> None:
    slope = SlidingSlope(6.0)
    for tick in range(10_000):
        slope.push(tick / 1000, float(tick))
    assert len(slope._values) <= 102


def test_a_clock_that_went_back_begins_anew() -> None:
    slope = SlidingSlope(6.0)
    for at_s in range(100, 120, 2):
        slope.push(at_s, float(at_s))
    assert slope.push(0.0, 500.0) == 0.0
