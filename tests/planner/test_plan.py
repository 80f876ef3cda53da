"""Whole plans, on engines with easy numbers: what is answered, and that it is reasonable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import InsufficientMemory
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.planner import explore
from baton.planner.plan import plan, plan_quantizations, unreachable_objectives
from baton.planner.problem import AcceleratorOffer, PlanningProblem, SloClass
from baton.planner.result import Plan, UnreachableObjective
from baton.planner.shapes.fleets import FleetKind
from baton.planner.shapes.space import Duty
from baton.planner.simulation_runner import Progress
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.arrivals import UserLoad
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.planner.shapes import GPU, TIMING, evenly_spaced, question, shapes, with_classes
from tests.simulator.v1_cores import LinearStepTiming

CHAT = evenly_spaced(20.0, 600, 40)
HEAVY = replace(TIMING, per_prefill_token_s=200e-6)
"""Prompts that hold up whoever decodes beside them."""


def answered(asked: PlanningProblem, timing: LinearStepTiming | None = None) -> Plan:
    return plan(asked, catalogue=shapes(timing))


TOLD: list[Progress] = []


@pytest.fixture(scope="module")
def most() -> Plan:
    """As much as two GPUs carry."""
    return plan(question(CHAT, tpot_s=0.05, gpus=2), catalogue=shapes(), on_progress=TOLD.append)


def test_the_best_is_one_of_the_fleets_that_were_simulated_and_none_carries_more(
    most: Plan,
) -> None:
    assert most.best is not None
    assert most.best in most.candidates
    assert most.best.rate_per_s >= 0.9 * max(candidate.rate_per_s for candidate in most.candidates)
    assert {candidate.fleet.kind for candidate in most.candidates} == set(FleetKind)


def test_nothing_takes_more_than_there_is(most: Plan) -> None:
    assert all(candidate.fleet.gpus <= 2 for candidate in most.candidates)


def test_the_answer_was_attained_in_a_simulated_run(most: Plan) -> None:
    assert most.best is not None
    trial = most.best.best_trial
    assert trial is not None
    assert trial.attainment >= 0.9
    assert trial.rate_per_s * most.best.scale_factor == pytest.approx(most.best.rate_per_s)


def test_the_binding_limit_is_reported_with_figures(most: Plan) -> None:
    assert most.bottleneck is not None
    assert "%" in most.bottleneck.reason or "requests/s" in most.bottleneck.reason


def test_fleets_of_an_answer_in_another_space_are_not_simulated_again(most: Plan) -> None:
    progress: list[Progress] = []
    again = plan(
        question(CHAT, tpot_s=0.05, gpus=2),
        catalogue=shapes(),
        on_progress=progress.append,
        simulated=most.candidates,
    )

    assert again.candidates == most.candidates
    assert {step.total for step in progress if step.stage == explore.STAGE} == {0}


def test_two_pools_of_unequal_work_are_no_reason_to_disaggregate(most: Plan) -> None:
    assert most.best is not None
    assert most.best.fleet.kind is FleetKind.COLOCATED
    assert most.verdict.startswith("do not disaggregate: colocated carries")


def test_tight_streams_beside_heavy_prompts_are() -> None:
    tight = answered(question(evenly_spaced(20.0, 1500, 40), ttft_s=2.0, tpot_s=0.016), HEAVY)

    assert tight.best is not None
    assert tight.best.fleet.kind is not FleetKind.COLOCATED
    assert tight.verdict.startswith("disaggregate")


def test_the_cheapest_fleet_for_a_rate_carries_it(most: Plan) -> None:
    assert most.best is not None
    rate = most.best.rate_per_s / 2
    cheap = answered(question(CHAT, tpot_s=0.05, gpus=None, rate_per_s=rate))

    assert cheap.meets_rate
    assert cheap.best is not None
    assert cheap.best.rate_per_s >= rate
    assert cheap.best.fleet.gpus == 1


def test_users_are_answered_by_the_cheapest_fleet_that_carries_what_they_send(most: Plan) -> None:
    assert most.best is not None
    users = UserLoad(users=round(3 * most.best.rate_per_s), think_s=2.0)
    found = answered(question(CHAT, tpot_s=0.05, gpus=None, users=users))

    assert found.meets_rate
    assert found.best is not None
    assert found.demand is not None
    assert found.demand.answer_s is not None
    assert found.demand.rate_per_s == pytest.approx(users.rate_per_s(found.demand.answer_s))
    assert found.demand.rate_per_s <= found.best.rate_per_s
    assert found.best.load(found.question) >= users.users
    same = answered(question(CHAT, tpot_s=0.05, gpus=None, rate_per_s=found.demand.rate_per_s))
    assert same.gpus == found.gpus


def test_few_users_send_as_much_as_an_idle_fleet_answers() -> None:
    found = answered(question(CHAT, tpot_s=0.05, gpus=None, users=UserLoad(users=1, think_s=0.0)))

    assert found.demand is not None
    assert found.demand.answer_s is not None
    # 600 tokens at 50 us and 40 steps of about 8 ms: 0.36 s
    assert 0.3 < found.demand.answer_s < 0.45


def test_users_beyond_what_there_is_say_how_many_gpus_they_take() -> None:
    users = UserLoad(users=500, think_s=2.0)
    short = answered(question(CHAT, tpot_s=0.05, gpus=1, users=users))

    assert not short.meets_rate
    assert short.verdict.startswith("do not disaggregate, although no fleet is enough:")
    assert short.gpus_needed is not None
    assert short.gpus_needed > 2


def test_narrower_types_are_planned_beside_the_question_and_none_twice() -> None:
    asked = question(CHAT, tpot_s=0.05, gpus=None, rate_per_s=20.0)
    found = plan_quantizations(asked)

    assert [(item.weights, item.kv) for item in found] == [
        *(("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8"), ("fp4", "fp8"))
    ]
    for item in found:
        assert item.plan is not None
        assert item.plan.meets_rate
        assert (item.plan.question.weights_dtype, item.plan.question.kv_dtype) == (
            item.weights,
            item.kv,
        )
    narrow = replace(asked, weights_dtype=Dtype.FP8, kv_dtype=Dtype.FP8)
    assert [(item.weights, item.kv) for item in plan_quantizations(narrow)] == [("fp4", "fp8")]


def test_a_model_that_does_not_fit_even_so_is_named() -> None:
    asked = question(CHAT, gpus=1)
    tiny = replace(GPU, memory_bytes=4e9)
    found = plan_quantizations(replace(asked, offers=(AcceleratorOffer(accelerator=tiny),)))

    assert found
    assert all(item.plan is None and item.reason for item in found)


def test_where_only_some_prices_are_known_it_is_said_that_gpus_are_compared(most: Plan) -> None:
    bare = AcceleratorOffer(accelerator=replace(GPU, name="bare", price_per_hour=None))
    asked = question(CHAT, tpot_s=0.05, gpus=2)
    some = answered(replace(asked, offers=(*asked.offers, bare)))

    assert some.verdict.endswith("(fleets are compared by GPUs: no price is known of bare)")
    assert " times as much per GPU" in some.verdict
    assert most.verdict.endswith("per dollar")


def test_a_looser_objective_never_needs_more_gpus() -> None:
    asked = question(CHAT, tpot_s=0.02, gpus=None, rate_per_s=40.0)
    tight, loose = (
        answered(replace(asked, classes=(SloClass(objectives=objectives),)))
        for objectives in (Objectives(ttft_s=0.3, tpot_s=0.02), Objectives(ttft_s=3.0, tpot_s=0.08))
    )

    assert tight.gpus is not None
    assert loose.gpus is not None
    assert loose.gpus <= tight.gpus


def test_a_rate_beyond_what_there_is_says_how_many_gpus_it_takes() -> None:
    short = answered(question(CHAT, tpot_s=0.05, gpus=1, rate_per_s=100.0))

    assert not short.meets_rate
    assert short.best is not None
    assert short.best.fleet.gpus == 1
    assert short.gpus_needed is not None
    assert short.gpus_needed > 2


def test_the_same_question_has_the_same_answer(most: Plan) -> None:
    assert answered(most.question) == most


def test_progress_ends_where_it_said_it_would(most: Plan) -> None:
    assert most.runs
    last = {progress.stage: progress for progress in TOLD}
    assert all(progress.done == progress.total for progress in last.values())
    assert set(last) == {"shapes", "fleets"}


def test_a_question_that_was_a_fifth_off_changes_the_answer_the_right_way() -> None:
    asked = question(CHAT, tpot_s=0.05, gpus=1)
    asked = replace(asked, effort=replace(asked.effort, sensitivity=True, precision=0.04))
    doubts = {
        (sensitivity.parameter, sensitivity.change): sensitivity
        for sensitivity in plan(asked, catalogue=shapes()).sensitivity
    }
    rates = {which: sensitivity.rate_per_s or 0.0 for which, sensitivity in doubts.items()}
    attained = {change: doubts["rate", change].attainment or 0.0 for change in (0.8, 1.2)}

    assert rates["prompt length", 1.2] < rates["prompt length", 0.8]
    assert rates["output length", 1.2] <= rates["output length", 0.8] * 1.1  # hardly matters here
    assert rates["objectives", 1.2] >= rates["objectives", 0.8]
    assert attained[0.8] >= 0.9 > attained[1.2]


def test_a_rate_far_beyond_what_the_fleet_carries_is_not_simulated() -> None:
    asked = question(CHAT, tpot_s=0.05, gpus=1, rate_per_s=1e9)
    asked = replace(asked, effort=replace(asked.effort, sensitivity=True))
    doubts = plan(asked, catalogue=shapes()).sensitivity

    assert {doubt.parameter for doubt in doubts} == {"prompt length", "output length", "objectives"}


# ----------------------------------------------------------------- what cannot be


def llama_on(name: str, *, ttft_s: float | None, tpot_s: float | None) -> PlanningProblem:
    return replace(
        question(CHAT, ttft_s=ttft_s, tpot_s=tpot_s),
        model=find_shape("meta-llama/Llama-3.1-70B"),
        offers=(AcceleratorOffer(accelerator=find_accelerator(name)),),
    )


def test_a_time_per_token_below_one_reading_of_the_weights_is_physically_out_of_reach() -> None:
    refused = plan(llama_on("H100", ttft_s=None, tpot_s=0.002))

    assert refused.best is None
    (bound,) = refused.unreachable_objectives
    assert bound.is_physical
    # 70.6e9 parameters of 2 bytes less the embedding, over 8 x 3.35 TB/s
    assert bound.physical_s == pytest.approx(141e9 / (8 * 3.35e12), rel=0.05)
    assert bound.factor == pytest.approx(bound.physical_s / 0.002)
    assert "reading the weights once" in refused.verdict
    assert "h100_sxm tp8" in refused.verdict


def test_an_objective_that_only_engines_miss_is_not_called_physical() -> None:
    refused = plan(llama_on("H100", ttft_s=None, tpot_s=0.0065))

    (bound,) = refused.unreachable_objectives
    assert not bound.is_physical
    assert bound.factor == pytest.approx(bound.modelled_s / 0.0065)
    assert "the data sheet alone would allow" in refused.verdict


def test_a_first_token_that_no_prefill_is_quick_enough_for_is_out_of_reach() -> None:
    refused = plan(llama_on("A100", ttft_s=0.005, tpot_s=None))

    (bound,) = refused.unreachable_objectives
    assert bound.objective == "time to first token"
    # 600 tokens through 70.6e9 parameters, over 8 x 312 TFLOPS
    assert bound.physical_s == pytest.approx(2 * 70.6e9 * 600 / (8 * 312e12), rel=0.05)
    assert "computing a prompt of 600 tokens" in refused.verdict


def test_a_model_that_fits_nowhere_says_which_term_overflows() -> None:
    asked = replace(
        llama_on("L4", ttft_s=None, tpot_s=1.0),
        model=find_shape("meta-llama/Llama-3.1-405B"),
    )

    with pytest.raises(InsufficientMemory, match="weights"):
        plan(asked)


def test_shapes_that_do_not_fit_are_left_out_with_the_reason() -> None:
    refused = plan(llama_on("H100", ttft_s=None, tpot_s=0.002))

    assert any(
        rejected_shape.label == "h100_sxm tp1" and "weights" in rejected_shape.reason
        for rejected_shape in refused.rejected_shapes
    )


def test_a_question_without_rate_or_gpus_is_none() -> None:
    with pytest.raises(ValueError, match="neither a rate nor a number of GPUs"):
        question(CHAT, gpus=None)


def test_prices_count_when_they_are_known() -> None:
    assert AcceleratorOffer(accelerator=GPU).price == 2.0
    assert AcceleratorOffer(accelerator=GPU, price_per_hour=3.5).price == 3.5


# ---------- objectives that nothing can meet: whose requests they are held to
MIXED = Trace(
    name="mixed",
    requests=tuple(
        TraceRequest(n / 2, 200, 100, slo_class="chat")
        if n % 2
        else TraceRequest(n / 2, 60_000, 100, slo_class="batch")
        for n in range(40)
    ),
)


def held(name: str | None, **limits: float) -> SloClass:
    return SloClass(name=name, objectives=Objectives(**limits))


def bounds(*classes: SloClass) -> tuple[UnreachableObjective, ...]:
    """A prompt token takes 50 us, 60,000 of them 3 s; a step at least 8 ms."""
    fitting = shapes().shapes_by_duty
    asked = with_classes(question(MIXED), *classes)
    return unreachable_objectives(asked, fitting[Duty.PREFILL], fitting[Duty.DECODE])


def test_a_class_of_short_prompts_is_not_held_to_the_long_ones_of_another() -> None:
    assert not bounds(held("chat", ttft_s=0.5), held("batch", ttft_s=60.0))


def test_a_class_of_long_prompts_is_held_to_them() -> None:
    (bound,) = bounds(held("chat", ttft_s=0.5), held("batch", ttft_s=1.0))

    assert bound.limit_s == 1.0
    assert "a prompt of 60000 tokens" in bound.operation


def test_a_class_of_short_contexts_is_not_held_to_the_long_ones_of_another() -> None:
    # attending to the 30,000 tokens of everybody's mean takes 0.6 ms more
    assert not bounds(held("chat", tpot_s=0.0084), held("batch", tpot_s=1.0))
    assert bounds(held("chat", tpot_s=1.0), held("batch", tpot_s=0.0084))


def test_a_class_that_no_request_is_of_bounds_nothing() -> None:
    both = held("chat", ttft_s=60.0), held("batch", ttft_s=60.0)

    assert not bounds(*both, held("nobody", ttft_s=1e-6, tpot_s=1e-6))
    assert not bounds(*both, held(None, ttft_s=1e-6, tpot_s=1e-6))
