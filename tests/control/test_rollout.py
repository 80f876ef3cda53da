"""Whether a new generation may stay: by what ran on it and on the old one."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.control.autoscaling.rollout import (
    RolloutAction,
    RolloutCounts,
    RolloutRules,
    StageObservation,
    evaluate_stage,
    replacement_stages,
    wilson_interval,
)
from baton.domain.fleet import Role

RULES = RolloutRules(bake_s=10.0)
COUNTS = st.integers(0, 5000)


@st.composite
def tallies(draw: st.DrawFn) -> RolloutCounts:
    legs, judged = draw(COUNTS), draw(COUNTS)
    return RolloutCounts(legs, draw(st.integers(0, legs)), judged, draw(st.integers(0, judged)))


TRIALS = st.builds(
    StageObservation,
    old=tallies(),
    new=tallies(),
    crashes=st.integers(0, 2),
    baked_s=st.none() | st.floats(0, 60),
)


def step(trial: StageObservation) -> RolloutAction:
    return evaluate_stage(trial, RULES).action


def test_new_replicas_that_do_as_well_go_on_when_they_were_watched_long_enough() -> None:
    well = RolloutCounts(500, 1, 500, 490)
    assert step(StageObservation(old=well, new=well)) is RolloutAction.HOLD
    assert step(StageObservation(old=well, new=well, baked_s=9.9)) is RolloutAction.HOLD
    assert step(StageObservation(old=well, new=well, baked_s=10)) is RolloutAction.PROCEED


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (RolloutCounts(60, 12, 60, 60), "20% of 60 legs broke on new replicas, 0% on old ones"),
        (RolloutCounts(200, 0, 200, 120), "40% of 200 requests missed"),
    ],
)
def test_new_replicas_that_do_worse_cause_a_rollback_before_all_are_replaced(
    new: RolloutCounts, why: str
) -> None:
    verdict = evaluate_stage(
        StageObservation(old=RolloutCounts(1000, 2, 1000, 990), new=new), RULES
    )
    assert verdict.action is RolloutAction.ROLL_BACK
    assert why in verdict.reason


def test_one_that_ends_by_itself_is_one_too_many() -> None:
    assert (
        step(StageObservation(crashes=1, new=RolloutCounts(900, 0, 900, 900), baked_s=60))
        is RolloutAction.ROLL_BACK
    )


def test_without_a_comparison_only_hopeless_replicas_cause_a_rollback() -> None:
    assert step(StageObservation(new=RolloutCounts(40, 39))) is RolloutAction.ROLL_BACK
    assert step(StageObservation(new=RolloutCounts(40, 20), baked_s=10)) is RolloutAction.PROCEED


def test_a_roll_forward_out_of_trouble_is_not_reverted() -> None:
    assert (
        step(StageObservation(old=RolloutCounts(300, 290), new=RolloutCounts(300, 200), baked_s=10))
        is RolloutAction.PROCEED
    )


def test_a_rollout_decision_on_few_legs_says_so() -> None:
    verdict = evaluate_stage(StageObservation(new=RolloutCounts(3, 0), baked_s=10), RULES)
    assert (verdict.action, "too few" in verdict.reason) == (RolloutAction.PROCEED, True)


@given(TRIALS)
def test_it_holds_only_while_it_is_watched(trial: StageObservation) -> None:
    over = trial.baked_s is not None and trial.baked_s >= RULES.bake_s
    assert (step(trial) is RolloutAction.HOLD) <= (not over)


@given(TRIALS, st.integers(1, 100))
def test_more_broken_legs_never_make_it_better(trial: StageObservation, more: int) -> None:
    assume(step(trial) is RolloutAction.ROLL_BACK)
    new = trial.new
    worse = new._replace(failed_legs=min(new.legs, new.failed_legs + more))
    again = StageObservation(old=trial.old, new=worse, crashes=trial.crashes, baked_s=trial.baked_s)
    assert step(again) is RolloutAction.ROLL_BACK


@given(tallies(), st.none() | st.floats(0, 60))
def test_equal_figures_never_cause_a_rollback(both: RolloutCounts, baked_s: float | None) -> None:
    assume(both.legs)
    assert (
        step(StageObservation(old=both, new=both, baked_s=baked_s)) is not RolloutAction.ROLL_BACK
    )


@given(COUNTS, st.integers(1, 5000), st.floats(0.1, 5))
def test_the_interval_holds_what_was_seen_and_solves_its_own_equation(
    hits: int, of: int, z: float
) -> None:
    hits = min(hits, of)
    low, high = wilson_interval(hits, of, z)
    assert 0 <= low <= hits / of + 1e-12
    assert hits / of - 1e-12 <= high <= 1
    for end in (low, high):  # |seen - p| = z sqrt(p (1 - p) / n): the oracle
        if 0 < end < 1:
            assert abs(hits / of - end) == pytest.approx(
                z * math.sqrt(end * (1 - end) / of), abs=1e-6
            )


def test_nothing_seen_says_nothing() -> None:
    assert wilson_interval(0, 0, 3.0) == (0.0, 1.0)


POOLS = {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.MIXED}


def test_decode_replicas_are_replaced_first_one_pool_at_a_time() -> None:
    assert replacement_stages(POOLS, together=False) == (("b",), ("c",), ("a",))
    assert replacement_stages({}, together=False) == ()


def test_pools_whose_generations_cannot_exchange_blocks_change_together() -> None:
    assert replacement_stages(POOLS, together=True) == (("a", "b", "c"),)
    assert replacement_stages({}, together=True) == ()
