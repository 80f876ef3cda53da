"""The greatest value of the last while, against a list of all values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.policy.scaling.windows import SlidingMax

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
