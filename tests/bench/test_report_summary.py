"""What runs amount to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.report import Curve, RunResult, Tradeoff
from baton.bench.report.summary import (
    capacity,
    length_notes,
    offered_rate,
    rate_curves_for,
    representative_results,
    scale_curves_for,
    summarize,
    tradeoffs_for,
)
from baton.simulator.outcome import Objectives
from tests.bench.studies import OBJECTIVES, failure, outcome, result, steady_result, study


def test_rates_count_over_the_time_from_the_first_arrival_to_the_last_end() -> None:
    run = result(outcome(10.0), outcome(11.0, ttft_s=0.9, tpot_s=0.01))  # ends at 12.0
    figures = summarize(run, OBJECTIVES)
    assert figures.span_s == pytest.approx(2.0)
    assert figures.output_tokens_per_s == pytest.approx(22 / 2.0)
    assert figures.total_tokens_per_s == pytest.approx((22 + 200) / 2.0)
    assert figures.output_tokens_per_device == pytest.approx(22 / 2.0 / 2)
    assert figures.goodput_per_s == pytest.approx(1 / 2.0)  # the second came too late
    assert figures.goodput_per_device == pytest.approx(1 / 2.0 / 2)


def test_a_request_without_a_token_misses_the_objectives_but_is_in_no_latency() -> None:
    figures = summarize(result(outcome(), outcome(1.0), failure(2.0)), OBJECTIVES)
    assert (figures.requests, figures.failed) == (3, 1)
    assert figures.attainment == pytest.approx(2 / 3)
    assert figures.ttft.p99 == pytest.approx(0.1)
    assert figures.e2e.p99 == pytest.approx(0.2)
    assert figures.span_s == pytest.approx(5.0)  # it was waited for


def test_a_request_of_one_token_has_no_time_between_tokens() -> None:
    one = outcome(output_tokens=1, tpot_s=0.0)
    two = outcome(1.0, output_tokens=2, tpot_s=0.04)
    figures = summarize(result(one, two), OBJECTIVES)
    assert figures.tpot.p50 == pytest.approx(0.04)
    assert figures.max_itl.p50 == pytest.approx(0.08)
    # It is judged like any other all the same.
    assert figures.attainment == 1.0
    assert figures.goodput_per_s == pytest.approx(2 / figures.span_s)


def test_a_run_that_mostly_waits_for_its_last_answers_says_so() -> None:
    def arriving_for(span_s: float) -> RunResult:
        return result(outcome(), outcome(span_s, ttft_s=0.9))  # which takes 1 s

    *_, note = length_notes([arriving_for(9.0), arriving_for(1.0)])
    assert note.startswith("Up to 50% of a run's time is after its last arrival")
    assert not list(length_notes([arriving_for(9.0)]))
    assert not list(length_notes([result()]))


def test_a_run_that_ends_before_its_fleet_is_full_says_so() -> None:
    def arriving_for(span_s: float) -> RunResult:
        return result(outcome(), outcome(span_s), outcome(span_s / 2))

    residence_s = outcome().e2e_s
    at_once = result(outcome())
    note, *_ = length_notes(
        [arriving_for(20 * residence_s), at_once, arriving_for(2 * residence_s)]
    )
    assert note.startswith("Requests arrive for only 2.0 times as long as a request takes")
    assert not list(length_notes([arriving_for(20 * residence_s)]))
    assert not any(note.startswith("Requests") for note in length_notes([at_once]))


def test_each_objective_is_evaluated_alone_and_all_together() -> None:
    run = result(outcome(ttft_s=0.9), outcome(1.0, tpot_s=0.9), outcome(2.0), outcome(3.0))
    figures = summarize(run, OBJECTIVES)
    assert figures.ttft_attainment == pytest.approx(3 / 4)
    assert figures.tpot_attainment == pytest.approx(3 / 4)
    assert figures.attainment == pytest.approx(2 / 4)


def test_the_cached_share_is_that_of_tokens() -> None:
    run = result(
        outcome(prompt_tokens=300, cached_tokens=0), outcome(prompt_tokens=100, cached_tokens=80)
    )
    assert summarize(run, OBJECTIVES).cached_fraction == pytest.approx(80 / 400)


def test_the_rate_is_the_one_that_was_offered_if_that_is_known() -> None:
    arrivals = [outcome(0.0), outcome(1.0), outcome(4.0)]
    assert offered_rate(result(*arrivals)) == pytest.approx(2 / 4.0)
    assert offered_rate(result(*arrivals, rate=7.0)) == 7.0
    assert offered_rate(result(outcome())) == 0.0


def test_a_run_without_requests_has_no_figures_and_nothing_breaks() -> None:
    figures = summarize(result(), OBJECTIVES)
    assert math.isnan(figures.ttft.p50)
    assert (figures.requests, figures.goodput_per_s, figures.rate_per_s) == (0, 0.0, 0.0)


# ------------------------------------------------------------------ curves and capacity


def test_runs_of_one_name_at_several_rates_are_one_curve_per_device() -> None:
    made = study(
        steady_result(rate=20.0, late_fraction=0.5),
        steady_result(rate=10.0),
        steady_result("other", rate=10.0, late_fraction=0.2),
    )
    assert rate_curves_for(made) == (Curve(name="predicted", points=((5.0, 1.0), (10.0, 0.5))),)


def test_there_is_no_attainment_without_objectives() -> None:
    runs = steady_result(rate=20.0), steady_result(rate=10.0)
    assert rate_curves_for(study(*runs, objectives=Objectives())) == ()
    assert scale_curves_for(study(*runs, objectives=Objectives())) == ()


def test_capacity_lies_where_the_curve_crosses_the_target() -> None:
    curve = Curve(name="a", points=((1.0, 1.0), (2.0, 0.95), (4.0, 0.85), (5.0, 0.99)))
    assert capacity(curve, 0.9) == pytest.approx(3.0)


def test_capacity_is_the_last_rate_when_all_meet_the_target_and_none_when_the_first_does_not() -> (
    None
):
    curve = Curve(name="a", points=((1.0, 0.9), (2.0, 0.9)))
    assert capacity(curve, 0.9) == 2.0
    assert capacity(curve, 0.91) is None
    assert capacity(Curve(name="a", points=()), 0.9) is None


_points = st.lists(
    st.tuples(st.floats(0.1, 100), st.floats(0, 1)),
    min_size=1,
    max_size=8,
    unique_by=lambda p: p[0],
).map(lambda points: tuple(sorted(points)))


@given(points=_points, low=st.floats(0.05, 1), high=st.floats(0.05, 1))
def test_a_higher_target_never_means_more_capacity(
    points: tuple[tuple[float, float], ...], low: float, high: float
) -> None:
    curve = Curve(name="a", points=points)
    less, more = sorted((low, high))
    assert (capacity(curve, more) or 0.0) <= (capacity(curve, less) or 0.0) + 1e-9


def test_scaled_objectives_evaluate_the_same_run() -> None:
    run = result(outcome(ttft_s=0.2), outcome(1.0, ttft_s=0.7), outcome(2.0, ttft_s=1.9))
    (curve,) = scale_curves_for(study(run))
    met = dict(curve.points)
    assert (met[0.25], met[0.5], met[1.0], met[1.5], met[4.0]) == pytest.approx(
        (0, 1 / 3, 1 / 3, 2 / 3, 1)
    )
    assert list(met.values()) == sorted(met.values())


def test_curves_scales_and_trades_that_are_given_are_taken() -> None:
    curves = (Curve(name="x", points=((1.0, 0.5),)),)
    trades = (Tradeoff(name="x", user_tokens_per_s=1.0, device_tokens_per_s=2.0),)
    made = study(steady_result(), rate_curves=curves, scale_curves=curves, tradeoffs=trades)
    assert (rate_curves_for(made), scale_curves_for(made), tradeoffs_for(made)) == (
        curves,
        curves,
        trades,
    )


def test_a_run_trades_tokens_for_each_user_against_tokens_for_each_device() -> None:
    (trade,) = tradeoffs_for(study(steady_result(rate=10.0)))
    assert trade.user_tokens_per_s == pytest.approx(1 / 0.01)
    assert trade.device_tokens_per_s == pytest.approx(1100 / 2 / (9.9 + 0.199 + 0.1), rel=1e-3)


def test_the_headline_is_the_highest_rate_at_which_the_first_name_meets_the_target() -> None:
    runs = [
        steady_result(rate=10.0),
        steady_result(rate=20.0, late_fraction=0.1),
        steady_result(rate=30.0, late_fraction=0.2),
        steady_result("other", rate=10.0),
        steady_result("other", rate=21.0, late_fraction=0.9),
    ]
    chosen = [
        (representative_result.name, representative_result.offered_per_s)
        for representative_result in representative_results(study(*runs))
    ]
    assert chosen == [("predicted", 20.0), ("other", 21.0)]


def test_the_lowest_rate_is_shown_when_none_meets_the_target() -> None:
    runs = [
        steady_result(rate=20.0, late_fraction=0.5),
        steady_result(rate=10.0, late_fraction=0.4),
    ]
    assert [
        representative_result.offered_per_s
        for representative_result in representative_results(study(*runs))
    ] == [10.0]
    assert representative_results(study()) == ()
