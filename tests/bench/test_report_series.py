"""What plots draw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.report.plots import bin_by_arrival, count_in_flight, cumulative_distribution
from tests.bench.studies import NEVER, OBJECTIVES, failure, outcome


def test_a_distribution_ends_below_one_when_some_never_came() -> None:
    assert cumulative_distribution([0.3, NEVER, 0.1, 0.2], 4) == (
        [0.1, 0.2, 0.3],
        [0.25, 0.5, 0.75],
    )
    assert cumulative_distribution([NEVER], 1) == ([], [])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=1500))
def test_a_thinned_distribution_keeps_its_ends_and_says_the_truth_at_each_point(
    values: list[float],
) -> None:
    at, shares = cumulative_distribution(values, len(values))
    assert len(at) <= 500
    assert (at[0], at[-1], shares[-1]) == (min(values), max(values), 1.0)
    for value, share in list(zip(at, shares, strict=True))[::50]:
        below = sum(other < value for other in values) / len(values)
        up_to = sum(other <= value for other in values) / len(values)
        assert below < share <= up_to + 1e-12


def test_bins_count_arrivals_and_those_of_them_that_met_the_objectives() -> None:
    outcomes = [outcome(5.0 + at / 10, ttft_s=0.9 if at < 10 else 0.1) for at in range(41)]
    bins = bin_by_arrival(outcomes, OBJECTIVES)
    assert bins.width_s == pytest.approx(2.0)
    assert bins.arrivals_per_s == pytest.approx((10.0, 10.5))
    assert bins.attainment == pytest.approx((0.5, 1.0))
    assert bins.edges_s == pytest.approx((0.0, 2.0, 4.0))


def test_bins_of_nothing_and_of_one_moment() -> None:
    assert bin_by_arrival([], OBJECTIVES).attainment == ()
    assert bin_by_arrival([outcome(3.0)] * 3, OBJECTIVES).attainment == (1.0,)


_times = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=40)


@given(stays=_times, at_s=st.floats(0, 80))
def test_in_flight_is_who_had_arrived_and_not_ended(
    stays: list[tuple[float, float]], at_s: float
) -> None:
    outcomes = [failure(arrived_s, after_s=took_s) for arrived_s, took_s in stays]
    start_s = min(arrived_s for arrived_s, _ in stays)
    slow = sum(
        arrived_s - start_s <= at_s and not arrived_s - start_s + took_s <= at_s
        for arrived_s, took_s in stays
    )
    assert count_in_flight(outcomes, [at_s]) == [slow]
