"""The search for the knee: what it finds, and what it says where it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.knee import Knee, KneeOptions, KneeSearch

OPTIONS = KneeOptions(initial_rate_per_s=1.0, target=0.99, max_runs=40)


def found(
    attainment: Callable[[float], float],
    *,
    options: KneeOptions = OPTIONS,
    client_most_per_s: float = float("inf"),
) -> Knee:
    search = KneeSearch(options)
    while (rate := search.next_rate()) is not None:
        search.add_probe(rate, attainment(rate), valid=rate <= client_most_per_s)
    return search.knee()


def edge(at: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= at else 0.5


@given(knee=st.floats(0.01, 1000), first=st.floats(0.1, 100))
def test_an_edge_is_found_wherever_it_is(knee: float, first: float) -> None:
    options = KneeOptions(initial_rate_per_s=first, target=0.99, max_runs=60)
    what = found(edge(knee), options=options)
    assert what.is_bracketed
    assert what.rate_per_s is not None
    assert what.lowest_failing_per_s is not None
    assert what.rate_per_s <= knee < what.lowest_failing_per_s <= what.rate_per_s * 1.05


def test_few_runs_are_enough() -> None:
    assert len(found(edge(13.0)).probes) <= 10


def test_an_endpoint_that_keeps_up_with_all_that_is_tried_is_not_bracketed() -> None:
    what = found(lambda _: 1.0, options=KneeOptions(initial_rate_per_s=1, target=0.9, max_runs=4))
    assert (what.rate_per_s, what.lowest_failing_per_s, what.is_bracketed) == (8, None, False)
    assert what.description == "not bracketed: at least 8/s, the highest rate tried"


def test_an_endpoint_that_never_meets_its_objective_is_not_bracketed() -> None:
    what = found(lambda _: 0.7, options=KneeOptions(initial_rate_per_s=1, target=0.9, max_runs=4))
    assert (what.rate_per_s, what.lowest_failing_per_s, what.is_bracketed) == (None, 0.125, False)
    assert "even 0.125/s, the lowest rate tried, met the objectives for 70.0%" in what.description


def test_runs_that_run_out_say_how_far_they_came() -> None:
    what = found(edge(13.0), options=KneeOptions(initial_rate_per_s=1, target=0.9, max_runs=6))
    assert not what.is_bracketed
    assert what.description == "not near enough: between 11.31/s and 16/s after 6 runs"


def test_a_client_that_cannot_send_more_finds_no_knee() -> None:
    what = found(edge(1000.0), client_most_per_s=30.0)
    assert not what.is_bracketed
    assert what.rate_per_s == pytest.approx(30, rel=0.05)
    assert "the client, not the endpoint, was what was measured" in what.description


def test_a_client_that_cannot_send_at_all_says_so() -> None:
    what = found(
        edge(1000.0),
        options=KneeOptions(initial_rate_per_s=8, target=0.9, max_runs=2),
        client_most_per_s=1.0,
    )
    assert "is more than the client can send" in what.description


def test_an_objective_that_is_reached_exactly_is_met() -> None:
    what = found(lambda rate: 0.99 if rate <= 2 else 0.98999)
    assert what.rate_per_s == pytest.approx(2, rel=0.05)


def test_luck_above_a_rate_that_failed_ends_the_search() -> None:
    search = KneeSearch(OPTIONS)
    for rate, attainment in ((1.0, 1.0), (2.0, 0.5), (2.0**0.5, 1.0)):
        assert search.next_rate() == pytest.approx(rate)
        search.add_probe(rate, attainment, valid=True)
    assert 2**0.5 < (search.next_rate() or 0) < 2


def test_nothing_tried_is_nothing_found() -> None:
    assert KneeSearch(OPTIONS).knee().description == "nothing was tried"
