"""A need is followed up at once, and down when that is worth it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.scaling.estimators.stabilization import (
    NeedStabilizer,
    headroom_replicas,
    whole_replicas,
)
from baton.policy.scaling.estimators.windows import SampledRate, SlidingMax, SlidingSlope


def followed(
    need: Callable[[float], float], for_s: float, *, have: int = 1, patience_s: float = 240.0
) -> list[tuple[float, int]]:
    """Every change of what is had, by whoever follows at once."""
    track = NeedStabilizer(120.0, headroom_fraction=0.2, min_surplus_s=patience_s)
    changes = []
    for tick in range(int(for_s / 10)):
        target = track.target(tick * 10.0, current=have, need=need(tick * 10.0))
        if target != have:
            changes.append((tick * 10.0, target))
        have = target
    return changes


def test_it_goes_up_at_once_and_all_the_way() -> None:
    assert followed(lambda at_s: 1.0 if at_s < 100 else 7.3, 200) == [(100.0, 8)]


def test_a_need_that_is_met_changes_nothing() -> None:
    assert followed(lambda _: 3.7, 3600, have=4) == []


def test_it_goes_down_only_when_enough_has_been_to_spare() -> None:
    """Of ten, nine are to spare from the end of the window on: 0.9 of the pool a second."""
    ((at_s, left),) = followed(lambda at_s: 9.5 if at_s < 100 else 0.5, 3600, have=10)
    assert left == 1
    assert 100 + 120 + 240 / 0.9 - 10 <= at_s <= 100 + 120 + 240 / 0.9 + 10


def test_a_slow_start_extends_the_stabilization_by_its_length() -> None:
    def stopped_at_s(cold_start_s: float) -> float:
        track = NeedStabilizer(120.0, headroom_fraction=0.2, min_surplus_s=240.0)
        have, tick = 10, 0
        while have == 10:
            need = 9.5 if tick < 10 else 0.0
            have = track.target(tick * 10.0, current=have, need=need, cold_start_s=cold_start_s)
            tick += 1
        return tick * 10.0

    assert stopped_at_s(300.0) - stopped_at_s(0.0) == 300.0


def test_how_long_more_something_is_kept_is_as_it_comes() -> None:
    track = NeedStabilizer(120.0, headroom_fraction=0.2, min_surplus_s=240.0)
    predicted_s = []
    at_s, have = 0.0, 4
    while have == 4:
        have = track.target(at_s, current=have, need=3.5 if at_s < 100 else 0.5, cold_start_s=60.0)
        if track.kept_for_s is not None:
            predicted_s.append(at_s + track.kept_for_s)
        at_s += 10.0
    ended_s = at_s - 10.0
    assert len(predicted_s) > 10
    assert all(ended_s - 10 <= at_s <= ended_s for at_s in predicted_s)
    assert track.kept_for_s is None


def test_nothing_is_kept_that_is_needed() -> None:
    track = NeedStabilizer(120.0, headroom_fraction=0.2, min_surplus_s=240.0)
    assert track.target(0.0, current=4, need=3.7) == 4
    assert track.kept_for_s is None


def test_a_small_part_too_many_is_kept_longer() -> None:
    ((some_s, _),) = followed(lambda at_s: 9.5 if at_s < 100 else 6.4, 7200, have=10)
    ((all_s, _),) = followed(lambda at_s: 9.5 if at_s < 100 else 0.5, 7200, have=10)
    assert some_s > all_s + 400


def test_a_falling_need_is_followed_without_another_stabilization() -> None:
    changes = followed(lambda at_s: max(1.0, 10.0 - at_s / 200), 7200, have=10)
    times = [at_s for at_s, _ in changes]
    assert len(changes) > 3
    assert all(later - sooner <= 200 for sooner, later in pairwise(times))


def test_a_need_that_swings_quickly_is_only_followed_up() -> None:
    assert followed(lambda at_s: 9.5 if at_s % 200 < 50 else 2.0, 7200) == [(0.0, 10)]


def test_a_need_that_wavers_about_a_whole_number_stops_nothing() -> None:
    assert followed(lambda at_s: 3.98 if at_s % 600 < 300 else 4.02, 7200, have=5) == []


def test_a_need_that_wavers_after_a_fall_is_not_followed_into_every_trough() -> None:
    def need(at_s: float) -> float:
        if at_s < 100:
            return 9.5
        return 3.98 if at_s % 600 < 300 else 4.02

    assert [left for _, left in followed(need, 7200, have=10)] == [5]


def test_a_large_need_that_wavers_by_a_part_is_not_followed_into_every_trough() -> None:
    def need(at_s: float) -> float:
        if at_s < 100:
            return 59.5
        return 38.0 if at_s % 1200 < 600 else 41.5

    assert [left for _, left in followed(need, 7200, have=60)] == [46, 42]


@pytest.mark.parametrize(("need", "kept"), [(2.0, 0.4), (4.0, 0.6), (6.0, 0.6), (40.0, 4.0)])
def test_headroom_is_a_replica_of_a_small_pool_and_a_part_of_a_large_one(
    need: float, kept: float
) -> None:
    assert headroom_replicas(need, 0.2) == pytest.approx(kept)


def test_an_hour_in_which_nothing_could_be_seen_is_no_hour_to_spare() -> None:
    track = NeedStabilizer(120.0, headroom_fraction=0.2, min_surplus_s=240.0)
    assert track.target(0.0, current=10, need=9.5) == 10
    assert track.target(3600.0, current=10, need=1.0) == 10
    assert track.target(3610.0, current=10, need=1.0) == 10


@given(needs=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=80), have=st.integers(0, 30))
def test_the_target_is_between_the_need_and_the_larger_of_need_and_current(
    needs: list[float], have: int
) -> None:
    track = NeedStabilizer(120.0, headroom_fraction=0.2, min_surplus_s=240.0)
    for tick, need in enumerate(needs):
        target = track.target(tick * 10.0, current=have, need=need)
        assert whole_replicas(need) <= target <= max(have, whole_replicas(need))
        have = target


# ---------- what is said of the values of the last while, against a list of all values
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


def test_a_clock_that_goes_back_restarts_the_estimate() -> None:
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


def test_a_clock_that_went_back_restarts_the_estimate() -> None:
    slope = SlidingSlope(6.0)
    for at_s in range(100, 120, 2):
        slope.push(at_s, float(at_s))
    assert slope.push(0.0, 500.0) == 0.0


def sampled(rates: list[float], *, requests: float) -> list[float]:
    """As a window of these requests shows each of these rates, every 30 s."""
    track = SampledRate()
    return [
        track.update(number * 30.0, rate, requests=requests * rate / 100.0, squared_variation=2.0)
        for number, rate in enumerate(rates)
    ]


def test_the_sampling_error_of_a_steady_rate_is_no_change() -> None:
    rng = Random(1)
    shown = [rng.gauss(100.0, 100.0 * (2.0 / 450) ** 0.5) for _ in range(400)]
    found = sampled(shown, requests=450)
    assert max(shown) > 115
    assert max(found[40:]) < 108
    assert fmean(found) == pytest.approx(100.0, abs=1.0)


def test_a_rate_that_changes_by_more_than_its_error_is_followed_at_once() -> None:
    assert sampled([100.0] * 40 + [130.0], requests=450)[-1] == 130.0
    assert sampled([100.0] * 40 + [70.0], requests=450)[-1] == 70.0
    assert sampled([100.0] * 40 + [103.0], requests=450)[-1] < 101.0
    assert sampled([100.0] * 40 + [103.0], requests=50_000)[-1] == 103.0


def test_a_steady_rise_is_followed_without_a_lag() -> None:
    rise = [100.0 + number for number in range(200)]
    assert sampled(rise, requests=20)[-1] == pytest.approx(rise[-1], rel=0.02)


def test_a_rate_without_requests_is_what_is_shown() -> None:
    assert sampled([0.0, 0.0, 5.0, 0.0], requests=0.0) == [0.0, 0.0, 5.0, 0.0]
