"""The search for the highest rate that holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.planner.rates.measure import highest_rate


@given(st.floats(0.01, 1e4), st.floats(0.01, 100).map(lambda far: far), st.floats(0.005, 0.2))
def test_the_edge_lies_between_the_two_rates(edge: float, far: float, precision: float) -> None:
    low, high = highest_rate(lambda rate: rate <= edge, edge * far, precision=precision)

    assert low <= edge < high
    assert high <= low * (1 + precision) * (1 + 1e-9)


def test_nothing_holds_anywhere_near() -> None:
    low, high = highest_rate(lambda _rate: False, 10.0, precision=0.1)

    assert low == 0
    assert high < 0.1


def test_everything_holds_as_far_as_was_tried() -> None:
    low, high = highest_rate(lambda _rate: True, 10.0, precision=0.1)

    assert low > 1_000
    assert high == float("inf")


def test_few_rates_are_tried_near_a_good_guess() -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= 1.05

    highest_rate(holds, 1.0, precision=0.03)

    assert len(tried) <= 5


def test_a_guess_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        highest_rate(lambda _rate: True, 0.0, precision=0.1)
