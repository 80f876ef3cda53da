"""How long starts take, from counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.autoscaling.observer import ColdStartTimer


def look(starts: ColdStartTimer, starting: int, working: int, now_s: float) -> None:
    """All that are up take work."""
    starts.observe(starting=starting, running=working, serving=working, now_s=now_s)


def test_whoever_was_starting_at_the_first_look_is_not_measured() -> None:
    starts = ColdStartTimer()
    look(starts, 2, 0, 0.0)
    look(starts, 1, 1, 10.0)
    look(starts, 0, 2, 20.0)
    assert starts.measured_s is None


def test_starts_end_in_the_order_in_which_they_were_asked_for() -> None:
    starts = ColdStartTimer()
    for starting, working, now_s in ((0, 0, 0.0), (1, 0, 10.0), (2, 0, 20.0), (1, 1, 40.0)):
        look(starts, starting, working, now_s)
    assert starts.measured_s == 30.0
    look(starts, 0, 2, 60.0)
    assert starts.measured_s == 35.0


def test_a_start_that_is_given_up_is_forgotten() -> None:
    starts = ColdStartTimer()
    for starting, now_s in ((0, 0.0), (1, 10.0), (2, 20.0), (1, 30.0)):
        look(starts, starting, 1, now_s)
    look(starts, 0, 2, 40.0)
    assert starts.measured_s == 30.0
    look(starts, 0, 3, 50.0)
    assert starts.measured_s == 30.0, "one that nobody saw start measures nothing"


def test_a_replica_that_leaves_is_no_start() -> None:
    starts = ColdStartTimer()
    for working, now_s in ((3, 0.0), (2, 10.0), (3, 12.0)):
        look(starts, 0, working, now_s)
    assert starts.measured_s is None


def test_a_start_ends_when_it_takes_work_and_not_when_it_is_up() -> None:
    starts = ColdStartTimer()
    for starting, up, working, now_s in ((0, 1, 1, 0.0), (1, 1, 1, 10.0), (0, 2, 1, 30.0)):
        starts.observe(starting=starting, running=up, serving=working, now_s=now_s)
    assert starts.measured_s is None
    starts.observe(starting=0, running=2, serving=2, now_s=34.0)
    assert starts.measured_s == 24.0


def test_replicas_that_were_out_of_sight_are_no_starts() -> None:
    starts = ColdStartTimer()
    for working, now_s in ((3, 0.0), (0, 2.0), (3, 6.0)):
        starts.observe(starting=0, running=3, serving=working, now_s=now_s)
    assert starts.measured_s is None


def test_replicas_that_come_back_into_sight_do_not_end_a_start() -> None:
    starts = ColdStartTimer()
    for starting, working, now_s in ((0, 3, 0.0), (1, 3, 10.0), (1, 0, 12.0), (1, 3, 14.0)):
        starts.observe(starting=starting, running=3, serving=working, now_s=now_s)
    assert starts.measured_s is None
    starts.observe(starting=0, running=4, serving=4, now_s=70.0)
    assert starts.measured_s == 60.0


def test_one_slow_start_does_not_count_for_more_than_one() -> None:
    starts = ColdStartTimer()
    now_s, working = 0.0, 0
    look(starts, 0, 0, now_s)
    for took_s in (10.0, 11.0, 500.0, 12.0, 10.0):
        look(starts, 1, working, now_s)
        now_s, working = now_s + took_s, working + 1
        look(starts, 0, working, now_s)
    assert starts.measured_s == 11.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.0, 100.0)), max_size=30)
)
def test_whatever_is_counted_no_start_takes_longer_than_was_looked(
    looks: list[tuple[int, int, float]],
) -> None:
    starts, now_s = ColdStartTimer(), 0.0
    for starting, working, gone_s in looks:
        now_s += gone_s
        look(starts, starting, working, now_s)
        measured_s = starts.measured_s
        assert measured_s is None or 0.0 <= measured_s <= now_s


@given(st.lists(st.tuples(st.floats(1.0, 50.0), st.floats(1.0, 50.0)), min_size=1, max_size=8))
def test_starts_one_after_the_other_are_measured_to_the_look(
    starts_s: list[tuple[float, float]],
) -> None:
    starts, now_s, took = ColdStartTimer(), 0.0, []
    look(starts, 0, 0, now_s)
    for number, (rest_s, took_s) in enumerate(starts_s):
        look(starts, 1, number, now_s + rest_s)
        look(starts, 0, number + 1, now_s + rest_s + took_s)
        now_s += rest_s + took_s
        took.append(took_s)
    ordered = sorted(took)
    assert starts.measured_s is not None
    assert ordered[0] - 1e-6 <= starts.measured_s <= ordered[-1] + 1e-6
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    assert starts.measured_s == pytest.approx(middle, abs=1e-6)
