"""Rates in closed form: the field's worked table, and what must be so for any engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.step_timing import StepBatch
from baton.planner.problem import AcceleratorOffer, PlanningProblem, SearchSpace, SloClass
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.closed_form import (
    MeanRequest,
    ServiceTime,
    decode_rate,
    decode_s,
    max_batch,
    max_concurrent_requests,
    mixed_rate,
    prefill_rate,
    prefill_s,
)
from baton.planner.rates.measure import highest_rate
from baton.planner.rates.trials import DutyRequirement, Trial, evaluate_trial
from baton.planner.shapes.space import Duty, enumerate_shapes
from baton.simulator.outcome import Objectives, Outcome
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.presets import synthetic
from baton.simulator.workloads.trace import Trace, TraceRequest

WEIGHTS_BYTES = 70.6e9
KV_TOKEN_BYTES = 327_680
LAYERS, WIDTH, TP = 80, 8192, 4


@dataclass(frozen=True)
class Worked:
    """A 70B model in FP8 on four devices, as the worked table has it: one efficiency for each of
    memory (0.8) and compute (0.55), 4 ms a step, 10 us an all-reduce."""

    bytes_per_s: float
    flops: float = 1979e12

    def step_s(self, batch: StepBatch) -> float:
        memory, compute = TP * self.bytes_per_s * 0.8, TP * self.flops * 0.55
        products_s = max(WEIGHTS_BYTES / memory, 2 * WEIGHTS_BYTES * batch.tokens / compute)
        # four operations for each pair, layer and width: 2 L d n^2 for a causal prompt
        attention_s = (
            4 * LAYERS * WIDTH * batch.prefill_pairs / compute
            + KV_TOKEN_BYTES * batch.decode_context_tokens / memory
        )
        return products_s + attention_s + 2 * LAYERS * 10e-6 + 4e-3


GPUS = {"H100": (80e9, 3.35e12), "H200": (141e9, 4.8e12)}


def settings_on(gpu: str) -> V1Settings:
    memory, bandwidth = GPUS[gpu]
    room = 0.9 * TP * memory - WEIGHTS_BYTES - TP * 3.5e9
    return V1Settings(
        timing=Worked(bandwidth),
        kv_blocks=int(room / KV_TOKEN_BYTES / 16),
        kv_block_bytes=16 * KV_TOKEN_BYTES,
        max_running_requests=1024,
        max_batched_tokens=32_768,
    )


# workload, device, prompt, output, share cached -> prefill replicas per decode replica at a TPOT of
# 30 and of 50 ms. Source: SCIENCE of the field, appendix B.
Row = tuple[str, str, int, int, float, float, float]
TABLE: list[Row] = [
    ("code", "H100", 2048, 28, 0.0, 21.6, 22.4),
    ("conversation", "H100", 1155, 211, 0.0, 2.26, 2.39),
    ("servegen", "H100", 914, 155, 0.0, 2.82, 3.04),
    ("mooncake", "H100", 12035, 343, 0.37, 1.33, 1.37),
    ("mooncake synthetic", "H100", 15325, 149, 0.65, 1.84, 1.90),
    ("sharegpt", "H100", 857, 653, 0.0, 0.55, 0.57),
    ("reasoning", "H100", 1268, 1527, 0.0, 0.25, 0.25),
    ("conversation", "H200", 1155, 211, 0.0, 2.68, 2.92),
    ("mooncake", "H200", 12035, 343, 0.37, 2.12, 2.35),
    ("reasoning", "H200", 1268, 1527, 0.0, 0.32, 0.34),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]} on {row[1]}")
def test_the_fields_table_of_balanced_ratios_comes_out(row: Row) -> None:
    _, gpu, prompt, output, hit, at_30, at_50 = row
    mix = MeanRequest(prompt_tokens=prompt, output_tokens=output, cached_tokens=hit * prompt)
    engine = settings_on(gpu)

    assert prefill_decode_ratio(engine, mix, 0.030) == pytest.approx(at_30, rel=0.3)
    assert prefill_decode_ratio(engine, mix, 0.050) == pytest.approx(at_50, rel=0.3)


def prefill_decode_ratio(engine: V1Settings, mix: MeanRequest, tpot_s: float) -> float:
    """Prefill replicas per decode replica that keep both busy."""
    return decode_rate(engine, mix, tpot_s) / prefill_rate(engine, mix)


def test_one_split_cannot_suit_both_code_and_reasoning() -> None:
    engine = settings_on("H100")
    code = prefill_decode_ratio(engine, MeanRequest(prompt_tokens=2048, output_tokens=28), 0.03)
    reasoning = prefill_decode_ratio(
        engine, MeanRequest(prompt_tokens=1268, output_tokens=1527), 0.03
    )

    assert code / reasoning > 60


mixes = st.builds(
    MeanRequest,
    prompt_tokens=st.integers(2, 20_000).map(float),
    output_tokens=st.integers(1, 3_000).map(float),
)
tpots = st.floats(0.012, 0.3)


@given(mixes, tpots, tpots)
def test_a_looser_objective_never_lowers_a_rate(mix: MeanRequest, one: float, other: float) -> None:
    engine, (tight, loose) = settings_on("H100"), sorted((one, other))

    assert decode_rate(engine, mix, tight) <= decode_rate(engine, mix, loose) * 1.05
    assert mixed_rate(engine, mix, tight) <= mixed_rate(engine, mix, loose) * 1.05


@given(mixes, tpots)
def test_the_largest_batch_is_in_time_and_one_more_is_not(mix: MeanRequest, tpot_s: float) -> None:
    engine = settings_on("H100")
    most = min(200, max_concurrent_requests(engine, mix))
    batch = max_batch(engine.timing, context_tokens=mix.context_tokens, tpot_s=tpot_s, limit=most)

    twin = [
        n for n in range(1, most + 1) if decode_s(engine.timing, n, mix.context_tokens) <= tpot_s
    ]
    assert batch == max(twin, default=0)


def test_pulls_bound_how_often_a_decode_engine_begins_a_stream() -> None:
    engine, mix = settings_on("H100"), MeanRequest(prompt_tokens=138, output_tokens=20)
    step_s = decode_s(engine.timing, engine.max_pulls * 20, mix.context_tokens)
    assert decode_rate(engine, mix, None) == pytest.approx(engine.max_pulls / step_s)
    unbounded = decode_rate(replace(engine, max_pulls=1_000), mix, None)
    assert unbounded > 1.2 * decode_rate(engine, mix, None)


def test_short_prompts_share_the_steps_of_a_prefill_engine() -> None:
    engine, mix = settings_on("H100"), MeanRequest(prompt_tokens=100, output_tokens=2)
    alone = 1 / prefill_s(engine.timing, 100)
    assert prefill_rate(engine, mix) > 1.5 * alone
    tokens = engine.max_batched_tokens // 2 + 1
    long = MeanRequest(prompt_tokens=tokens, output_tokens=2)
    alone_s = prefill_s(engine.timing, tokens, budget_tokens=engine.max_batched_tokens)
    assert prefill_rate(engine, long) == pytest.approx(1 / alone_s)


@given(mixes, tpots)
def test_doing_both_never_carries_more_than_either_alone(mix: MeanRequest, tpot_s: float) -> None:
    engine = replace(settings_on("H100"), max_pulls=1_000_000)  # who does both pulls nothing
    both = mixed_rate(engine, mix, tpot_s)

    # a step with many prompts shares what one prompt alone pays in full: the fixed 5.6 ms
    alone = 1 / (prefill_s(engine.timing, int(mix.prompt_tokens)) - 5.6e-3 - 6.6e-3 + 1e-9)
    assert both <= max(alone, prefill_rate(engine, mix)) * 1.35 or alone < 0
    assert both <= decode_rate(engine, mix, tpot_s) * 1.1 + 1e-9


def test_a_chunk_of_a_prompt_attends_to_its_computed_part() -> None:
    engine = settings_on("H100")
    whole = prefill_s(engine.timing, 16_384, budget_tokens=16_384)
    halves = prefill_s(engine.timing, 16_384, budget_tokens=8_192)
    cached = prefill_s(engine.timing, 16_384, cached_tokens=8_192, budget_tokens=16_384)

    assert halves == pytest.approx(whole + 4e-3 + 160 * 10e-6, rel=1e-3)
    assert cached > prefill_s(engine.timing, 8_192, budget_tokens=16_384)


@given(st.integers(1, 5_000), st.integers(0, 5_000), st.integers(1, 3_000))
def test_every_token_that_is_not_cached_is_computed_once(
    tokens: int, cached: int, budget: int
) -> None:
    seen: list[StepBatch] = []

    class Noted:
        def step_s(self, batch: StepBatch) -> float:
            seen.append(batch)
            return 1.0

    took_s = prefill_s(Noted(), tokens, cached_tokens=cached, budget_tokens=budget)
    computed = max(1, tokens - cached)

    assert sum(step_batch.prefill_tokens for step_batch in seen) == computed
    assert took_s == len(seen) == -(-computed // budget)
    assert [step_batch.finished_prefills for step_batch in seen] == [0] * (len(seen) - 1) + [1]
    # each token attends to all before it and to itself
    pairs = tokens * (tokens + 1) / 2 - (tokens - computed) * (tokens - computed + 1) / 2
    assert sum(step_batch.prefill_pairs for step_batch in seen) == pairs


def test_a_cached_prompt_still_has_its_last_token_computed() -> None:
    engine = settings_on("H100")

    assert prefill_s(engine.timing, 1_000, cached_tokens=1_000) > 0
    assert MeanRequest(prompt_tokens=100, output_tokens=1, cached_tokens=100).computed_tokens == 1


def test_pipeline_stages_work_at_the_same_time() -> None:
    one = settings_on("H100")
    two = replace(one, pipeline_stages=2)
    mix = MeanRequest(prompt_tokens=1000, output_tokens=100)

    assert prefill_rate(two, mix) == pytest.approx(2 * prefill_rate(one, mix))
    assert decode_rate(two, mix, 0.015) == pytest.approx(2 * decode_rate(one, mix, 0.015))


def test_memory_bounds_how_many_streams_there_are() -> None:
    engine = settings_on("H100")
    mix = MeanRequest(prompt_tokens=100_000, output_tokens=100)
    kept = engine.kv_blocks * 16 // 100_100

    assert max_concurrent_requests(engine, mix) == kept
    assert max_concurrent_requests(replace(engine, max_running_requests=1), mix) == 1


def test_no_decode_rate_exists_when_one_step_is_too_slow() -> None:
    engine = settings_on("H100")
    mix = MeanRequest(prompt_tokens=1000, output_tokens=100)

    assert decode_rate(engine, mix, 0.001) == 0
    assert mixed_rate(engine, mix, 0.001) == 0


def test_a_queue_is_short_enough_only_below_full_load() -> None:
    steady, bursty = ServiceTime.from_times([0.1]), ServiceTime.from_times([0.01, 0.19])

    assert 0 < bursty.rate_within(0.3, 0.9) < steady.rate_within(0.3, 0.9) < 10
    assert steady.rate_within(0.3, 0.99) < steady.rate_within(0.3, 0.9)
    assert steady.rate_within(0.0, 0.9) == 0
    assert steady.rate_within(1e6, 0.9) == pytest.approx(10, rel=1e-3)


def test_the_tail_of_the_wait_is_kingmans() -> None:
    # at rho = 0.5 and no spread: P(W > t) = 0.5 exp(-t / S) = 0.1 at t = S ln 5
    service = ServiceTime.from_times([0.2, 0.2])

    assert service.rate_within(0.2 * 1.6094, 0.9) == pytest.approx(0.5 / 0.2, rel=1e-3)


# ---------- samples of traffic: their rate, their lengths, and what stays shared
CONV = synthetic("conv", rate_per_s=10, duration_s=200)
PAUSED = Trace(
    name="paused",
    requests=tuple(TraceRequest(at_s, 100, 10) for at_s in (*(n / 100 for n in range(999)), 1e4)),
)
"""All but one at the beginning: about 0.1 a second in the mean."""


@pytest.mark.parametrize("rate", [0.5, 3.0, 10.0, 47.0, 400.0])
def test_a_sample_has_the_rate_and_about_the_number_that_were_asked_for(rate: float) -> None:
    sample = TrafficSampler(CONV).sample(rate, 2_000)

    assert len(sample) == pytest.approx(2_000, rel=0.1)
    assert sample.rate_per_s == pytest.approx(rate, rel=0.1)
    assert sample.requests[0].at_s >= 0


def test_a_sample_has_the_lengths_of_the_trace() -> None:
    sample = TrafficSampler(CONV).sample(50.0, 4_000)
    mean = sum(request.prompt_tokens for request in sample.requests) / len(sample)
    whole = sum(request.prompt_tokens for request in CONV.requests) / len(CONV)

    assert mean == pytest.approx(whole, rel=0.1)


def test_the_same_seed_gives_the_same_sample_and_another_another() -> None:
    assert TrafficSampler(CONV, 1).sample(5.0, 300) == TrafficSampler(CONV, 1).sample(5.0, 300)
    assert TrafficSampler(CONV, 1).sample(5.0, 300) != TrafficSampler(CONV, 2).sample(5.0, 300)


def test_a_little_more_rate_adds_requests_and_takes_none_away() -> None:
    sparse, dense = (TrafficSampler(CONV).sample(rate, 500) for rate in (4.0, 4.4))
    end_s = min(sparse.requests[-1].at_s, dense.requests[-1].at_s)
    kept = [
        {request for request in each.requests if request.at_s <= end_s} for each in (sparse, dense)
    ]

    assert kept[0] < kept[1]


def test_a_trace_that_is_too_short_repeats_with_new_prompts() -> None:
    short = Trace(
        name="short",
        requests=tuple(TraceRequest(float(n), 1024, 10, (n, n + 100), f"s{n}") for n in range(10)),
    )
    sample = TrafficSampler(short).sample(1.0, 45)
    blocks = [block for request in sample.requests for block in request.block_ids]

    assert len(sample) == pytest.approx(45, abs=3)
    assert len(set(blocks)) == len(blocks)
    assert len({request.session_id for request in sample.requests}) == len(sample)


def test_copies_share_only_blocks_shared_within_the_original() -> None:
    twice = Trace(
        name="twice",
        requests=tuple(TraceRequest(n / 10, 1024, 10, (7, n)) for n in range(1_000)),
    )
    sample = TrafficSampler(twice).sample(19.0, 100)  # two copies, neither of which ends

    assert len({request.block_ids[0] for request in sample.requests}) == 2


def test_half_a_conversation_is_never_drawn() -> None:
    chat = synthetic("chat", rate_per_s=10, duration_s=300)
    sample = TrafficSampler(chat).sample(3.0, 300)
    whole, drawn = gaps(chat), gaps(sample)

    assert sum(map(bool, drawn.values())) > 10
    for session, waits in drawn.items():
        every = whole[session.partition("/")[0]]
        starts = range(len(every) - len(waits) + 1)
        assert any(every[at : at + len(waits)] == waits for at in starts), "a turn is missing"


def test_where_whole_sessions_are_too_few_for_a_rate_single_requests_are_drawn() -> None:
    three = Trace(
        name="three",
        requests=tuple(TraceRequest(n / 10, 100, 10, session_id=f"s{n % 3}") for n in range(3_000)),
    )
    samples = [TrafficSampler(three, seed).sample(2.0, 400) for seed in range(8)]

    assert all(len(sample) == pytest.approx(400, rel=0.2) for sample in samples)


def test_a_pause_that_no_request_arrives_in_is_an_empty_sample() -> None:
    assert not TrafficSampler(PAUSED).sample(0.1, 20).requests


def gaps(trace: Trace) -> dict[str, list[float]]:
    """The times between the turns of each session."""
    times: dict[str, list[float]] = {}
    for request in trace.requests:
        times.setdefault(str(request.session_id), []).append(request.at_s)
    return {
        session: [round(later - earlier, 6) for earlier, later in pairwise(each)]
        for session, each in times.items()
    }


def test_scaled_traffic_keeps_arrivals_and_shared_prefixes() -> None:
    longer = TrafficSampler(CONV).scaled(prompts=2.0, outputs=0.5).trace

    assert [request.at_s for request in longer.requests] == [
        request.at_s for request in CONV.requests
    ]
    assert longer.requests[5].prompt_tokens == 2 * CONV.requests[5].prompt_tokens
    assert longer.requests[5].output_tokens == max(1, round(CONV.requests[5].output_tokens / 2))


# ---------- how a run is judged: who counts, what each duty is held to, and which class decides
AIMS = Objectives(ttft_s=1.0, tpot_s=0.1)
CLASS = SloClass(objectives=AIMS, attainment=0.81)


def outcome(ttft_s: float = 0.5, tpot_s: float = 0.05, *, ok: bool = True) -> Outcome:
    return Outcome(0.0, 100, 20, 10 if ok else 0, ttft_s, tpot_s, 2.0, ok)


def trial_of(outcomes: list[Outcome], *, duty: Duty = Duty.BOTH, spent_s: float = 0.0) -> Trial:
    requests = [TraceRequest(float(n), 100, 10) for n in range(len(outcomes))]
    return evaluate_trial(
        1.0, requests, outcomes, (CLASS,), DutyRequirement(duty=duty, elsewhere_s=spent_s)
    )


def test_requests_that_found_an_empty_engine_do_not_count() -> None:
    trial = trial_of([outcome(ttft_s=9.0)] * 10 + [outcome()] * 20)

    assert trial.attainment == 1
    assert trial.requests == 20


def test_a_run_holds_when_the_share_that_is_wanted_meets_everything() -> None:
    late = [outcome(ttft_s=1.1)] * 3 + [outcome(tpot_s=0.2)] * 3
    trial = trial_of([outcome()] * 15 + [outcome()] * 24 + late)

    assert trial.attainment == pytest.approx(24 / 30)
    assert not trial.holds
    assert trial.late_first_token_fraction == pytest.approx(3 / 30)
    assert trial.slow_stream_fraction == pytest.approx(3 / 30)
    assert trial.cached_fraction == pytest.approx(0.2)


def test_a_request_without_output_is_late() -> None:
    trial = trial_of([outcome()] * 10 + [outcome(float("inf"), ok=False)] * 20)

    assert trial.attainment == 0
    assert trial.late_first_token_fraction == 1


def test_prefill_gets_the_rest_of_the_ttft_objective() -> None:
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
    return trial_of(outcomes)


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

    assert trial_of(outcomes).holds


# ---------- the search for the highest rate that holds
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


# -------------------------------------------------------------------- layouts of experts


def splits_of(model: str, gpu: str, *sizes: int) -> set[str]:
    question = PlanningProblem(
        model=find_shape(model),
        offers=(AcceleratorOffer(accelerator=find_accelerator(gpu)),),
        traffic=synthetic("conv", rate_per_s=5, duration_s=20),
        classes=(SloClass(objectives=Objectives(ttft_s=1.0)),),
        gpus=64,
        weights_dtype=Dtype.FP8,
        space=SearchSpace(tensor_parallel_sizes=(1, 8), data_parallel_sizes=sizes),
    )
    shapes = enumerate_shapes(question).shapes_by_duty[Duty.DECODE]
    return {shape.split.label for shape in shapes}


def test_experts_may_be_whole_on_each_gpu_or_shared_by_ranks() -> None:
    found = splits_of("deepseek-ai/DeepSeek-V3", "H200", 1, 8)
    assert found == {"tp8", "tp8 ep", "tp1 dp8 ep", "tp8 dp8 ep"}
    assert splits_of("deepseek-ai/DeepSeek-V3", "H200", 1) == {"tp8", "tp8 ep"}


def test_models_without_experts_have_no_such_layouts() -> None:
    assert splits_of("meta-llama/Llama-3.1-70B", "H200", 1, 8) == {"tp1", "tp8"}


def test_where_no_node_holds_a_model_ranks_over_nodes_do() -> None:
    assert splits_of("deepseek-ai/DeepSeek-V3", "H100", 1, 16) >= {"tp1 dp16 ep"}
