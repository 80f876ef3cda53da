"""Whether a new generation may stay: by what ran on it and on the old one."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.control.autoscaling.rollout import (
    RolloutRules,
    Step,
    Tally,
    Trial,
    interval,
    judge,
    stages,
)
from baton.domain.fleet import Role

RULES = RolloutRules(bake_s=10.0)
COUNTS = st.integers(0, 5000)


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    legs, judged = draw(COUNTS), draw(COUNTS)
    return Tally(legs, draw(st.integers(0, legs)), judged, draw(st.integers(0, judged)))


TRIALS = st.builds(
    Trial,
    old=tallies(),
    new=tallies(),
    deaths=st.integers(0, 2),
    baked_s=st.none() | st.floats(0, 60),
)


def step(trial: Trial) -> Step:
    return judge(trial, RULES).step


def test_new_replicas_that_do_as_well_go_on_when_they_were_watched_long_enough() -> None:
    well = Tally(500, 1, 500, 490)
    assert step(Trial(old=well, new=well)) is Step.HOLD
    assert step(Trial(old=well, new=well, baked_s=9.9)) is Step.HOLD
    assert step(Trial(old=well, new=well, baked_s=10)) is Step.GO_ON


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (Tally(60, 12, 60, 60), "20% of 60 legs broke on new replicas, 0% on old ones"),
        (Tally(200, 0, 200, 120), "40% of 200 requests missed"),
    ],
)
def test_new_replicas_that_do_worse_are_taken_back_before_all_are_replaced(
    new: Tally, why: str
) -> None:
    verdict = judge(Trial(old=Tally(1000, 2, 1000, 990), new=new), RULES)
    assert verdict.step is Step.ROLL_BACK
    assert why in verdict.why


def test_one_that_ends_by_itself_is_one_too_many() -> None:
    assert step(Trial(deaths=1, new=Tally(900, 0, 900, 900), baked_s=60)) is Step.ROLL_BACK


def test_with_nothing_to_compare_with_only_hopeless_ones_are_taken_back() -> None:
    assert step(Trial(new=Tally(40, 39))) is Step.ROLL_BACK
    assert step(Trial(new=Tally(40, 20), baked_s=10)) is Step.GO_ON


def test_a_roll_forward_out_of_trouble_is_not_taken_back() -> None:
    assert step(Trial(old=Tally(300, 290), new=Tally(300, 200), baked_s=10)) is Step.GO_ON


def test_a_verdict_on_few_legs_says_so() -> None:
    verdict = judge(Trial(new=Tally(3, 0), baked_s=10), RULES)
    assert (verdict.step, "too few" in verdict.why) == (Step.GO_ON, True)


@given(TRIALS)
def test_it_holds_only_while_it_is_watched(trial: Trial) -> None:
    over = trial.baked_s is not None and trial.baked_s >= RULES.bake_s
    assert (step(trial) is Step.HOLD) <= (not over)


@given(TRIALS, st.integers(1, 100))
def test_more_broken_legs_never_make_it_better(trial: Trial, more: int) -> None:
    assume(step(trial) is Step.ROLL_BACK)
    new = trial.new
    worse = new._replace(broken=min(new.legs, new.broken + more))
    again = Trial(old=trial.old, new=worse, deaths=trial.deaths, baked_s=trial.baked_s)
    assert step(again) is Step.ROLL_BACK


@given(tallies(), st.none() | st.floats(0, 60))
def test_the_same_figures_are_never_taken_back(both: Tally, baked_s: float | None) -> None:
    assume(both.legs)
    assert step(Trial(old=both, new=both, baked_s=baked_s)) is not Step.ROLL_BACK


@given(COUNTS, st.integers(1, 5000), st.floats(0.1, 5))
def test_the_interval_holds_what_was_seen_and_solves_its_own_equation(
    hits: int, of: int, z: float
) -> None:
    hits = min(hits, of)
    low, high = interval(hits, of, z)
    assert 0 <= low <= hits / of + 1e-12
    assert hits / of - 1e-12 <= high <= 1
    for end in (low, high):  # |seen - p| = z sqrt(p (1 - p) / n): the oracle
        if 0 < end < 1:
            assert abs(hits / of - end) == pytest.approx(
                z * math.sqrt(end * (1 - end) / of), abs=1e-6
            )


def test_nothing_seen_says_nothing() -> None:
    assert interval(0, 0, 3.0) == (0.0, 1.0)


POOLS = {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.MIXED}


def test_who_decodes_is_replaced_first_one_pool_at_a_time() -> None:
    assert stages(POOLS, together=False) == (("b",), ("c",), ("a",))
    assert stages({}, together=False) == ()


def test_pools_whose_generations_cannot_exchange_blocks_change_together() -> None:
    assert stages(POOLS, together=True) == (("a", "b", "c"),)
    assert stages({}, together=True) == ()
