"""How a run is judged: who counts, what each duty is held to, and which class decides."""

from __future__ import annotations

import pytest

from baton.planner.problem import SloClass
from baton.planner.rates.trials import DutyRequirement, Trial, evaluate_trial
from baton.planner.shapes.space import Duty
from baton.simulator.outcome import Objectives, Outcome
from baton.simulator.workloads.trace import TraceRequest

AIMS = Objectives(ttft_s=1.0, tpot_s=0.1)
CLASS = SloClass(objectives=AIMS, attainment=0.81)


def outcome(ttft_s: float = 0.5, tpot_s: float = 0.05, *, ok: bool = True) -> Outcome:
    return Outcome(0.0, 100, 20, 10 if ok else 0, ttft_s, tpot_s, 2.0, ok)


def judged(outcomes: list[Outcome], *, duty: Duty = Duty.BOTH, spent_s: float = 0.0) -> Trial:
    requests = [TraceRequest(float(n), 100, 10) for n in range(len(outcomes))]
    return evaluate_trial(
        1.0, requests, outcomes, (CLASS,), DutyRequirement(duty=duty, elsewhere_s=spent_s)
    )


def test_requests_that_found_an_empty_engine_do_not_count() -> None:
    trial = judged([outcome(ttft_s=9.0)] * 10 + [outcome()] * 20)

    assert trial.attainment == 1
    assert trial.requests == 20


def test_a_run_holds_when_the_share_that_is_wanted_meets_everything() -> None:
    late = [outcome(ttft_s=1.1)] * 3 + [outcome(tpot_s=0.2)] * 3
    trial = judged([outcome()] * 15 + [outcome()] * 24 + late)

    assert trial.attainment == pytest.approx(24 / 30)
    assert not trial.holds
    assert trial.late_first_token_fraction == pytest.approx(3 / 30)
    assert trial.slow_stream_fraction == pytest.approx(3 / 30)
    assert trial.cached_fraction == pytest.approx(0.2)


def test_a_request_without_output_is_late() -> None:
    trial = judged([outcome()] * 10 + [outcome(float("inf"), ok=False)] * 20)

    assert trial.attainment == 0
    assert trial.late_first_token_fraction == 1


def test_prefill_is_held_to_what_the_rest_of_the_way_leaves_of_the_first_token() -> None:
    held = DutyRequirement(duty=Duty.PREFILL, elsewhere_s=0.4)

    assert held.limits(AIMS) == Objectives(ttft_s=0.6)
    assert DutyRequirement(duty=Duty.PREFILL, elsewhere_s=2.0).limits(AIMS).ttft_s == pytest.approx(
        0, abs=1e-6
    )


def test_decode_is_held_to_the_stream_and_to_a_place_in_the_batch() -> None:
    assert DutyRequirement(duty=Duty.DECODE, elsewhere_s=0.5).limits(AIMS) == Objectives(
        ttft_s=0.5, tpot_s=0.1
    )


def test_two_duties_miss_independently() -> None:
    assert DutyRequirement(duty=Duty.PREFILL).required_attainment(0.81) == pytest.approx(0.9)
    assert DutyRequirement(duty=Duty.BOTH).required_attainment(0.81) == 0.81


def test_without_a_ttft_objective_the_limit_is_finite() -> None:
    limits = DutyRequirement(duty=Duty.BOTH).limits(Objectives(tpot_s=0.1))

    assert limits == Objectives(ttft_s=30.0, tpot_s=0.1)


def test_the_class_that_is_furthest_from_its_target_decides() -> None:
    strict = SloClass(name="strict", objectives=AIMS, attainment=0.9)
    loose = SloClass(objectives=Objectives(ttft_s=5.0, tpot_s=1.0), attainment=0.5)
    requests = [
        TraceRequest(float(n), 100, 10, slo_class="strict" if n % 2 else None) for n in range(60)
    ]
    outcomes = [outcome(ttft_s=2.0)] * 60
    trial = evaluate_trial(
        1.0, requests, outcomes, (loose, strict), DutyRequirement(duty=Duty.BOTH)
    )

    assert trial.attainment == 0
    assert trial.margin == pytest.approx(-0.9)


def test_an_outcome_is_missing() -> None:
    with pytest.raises(ValueError, match="1 outcomes for 2 requests"):
        evaluate_trial(
            1.0,
            [TraceRequest(0.0, 1, 1)] * 2,
            [outcome()],
            (CLASS,),
            DutyRequirement(duty=Duty.BOTH),
        )


def queueing(growth: float, *, seconds: int, base_s: float = 0.1) -> Trial:
    """Ten requests a second, each waiting so many seconds longer per second."""
    outcomes = [
        outcome(base_s + growth * n / 10)._replace(arrived_at_s=n / 10) for n in range(10 * seconds)
    ]
    return judged(outcomes)


def test_a_queue_that_grows_does_not_hold_even_while_it_is_not_late_yet() -> None:
    trial = queueing(0.1, seconds=6)

    assert trial.attainment == 1
    assert trial.wait_grows
    assert not trial.holds


def test_a_wait_that_stays_or_gets_shorter_holds() -> None:
    assert queueing(0.0, seconds=6).holds
    assert queueing(0.03, seconds=6).holds
    assert queueing(-0.1, seconds=6, base_s=0.9).holds


def test_in_a_long_run_the_objective_itself_tells() -> None:
    trial = queueing(0.05, seconds=40)

    assert not trial.wait_grows
    assert trial.attainment < 0.81


def test_one_long_prompt_at_the_end_is_no_queue() -> None:
    outcomes = [outcome(0.1)._replace(arrived_at_s=n / 10) for n in range(60)]
    outcomes[-1] = outcomes[-1]._replace(ttft_s=0.9)

    assert judged(outcomes).holds
