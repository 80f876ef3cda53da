"""A fleet as a fluid: what flows through, what is refused, and what an autoscaler sees and does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.observation import Observation
from baton.simulator.workloads.rate_series import RateWindow
from benchmarks._fluid import FluidOptions, FluidRun, flow, inflows
from benchmarks._fluid_pools import FluidCapacity, FluidPool, Inflow

OPTIONS = FluidOptions(
    step_s=1.0,
    interval_s=2.0,
    slo=Slo(ttft_s=2.0, tpot_s=0.2, attainment_target=0.9),
    margin_fraction=0.0,
    overhead_s=0.0,
)
SHAPE = FluidPool(
    name="prefill",
    role=Role.PREFILL,
    replicas=1,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=1000.0,
    max_streams=100.0,
    least_step_s=0.02,
    cold_start_s=4.0,
    drain_s=3.0,
    gpus_per_replica=2.0,
)
"""A step with 100 streams takes 0.1 s."""
EXACT = replace(OPTIONS, usable_fraction=1.0)


def pools(prefill: int, decode: int) -> list[FluidPool]:
    return [
        replace(SHAPE, replicas=prefill),
        replace(SHAPE, name="decode", role=Role.DECODE, replicas=decode),
    ]


def mixed(replicas: int) -> list[FluidPool]:
    return [replace(SHAPE, name="mixed", role=Role.MIXED, replicas=replicas)]


class Scripted:
    def __init__(self, script: Mapping[int, tuple[ScalingAction, ...]] | None = None) -> None:
        self.script = script or {}
        self.seen: list[Observation] = []

    def tick(self, seen: Observation) -> AutoscalerTick:
        self.seen.append(seen)
        return AutoscalerTick(
            at_s=seen.at_s, policy="scripted", actions=self.script.get(len(self.seen), ())
        )


def even(steps: int, requests: float, prompt: float = 100.0, output: float = 10.0) -> list[Inflow]:
    return [Inflow(requests, requests * prompt, requests * output)] * steps


def test_load_within_capacity_is_served_and_the_rest_rejected() -> None:
    within = flow(even(100, 9), pools(1, 1), None, EXACT)
    assert within.attainment == pytest.approx(1.0)
    beyond = flow(even(400, 20), pools(1, 2), None, EXACT)
    assert beyond.attainment == pytest.approx(0.5, abs=0.01)


def test_a_backlog_is_carried_over_and_refuses_only_beyond_what_may_be_waited() -> None:
    # Two seconds may be waited: a burst of three seconds' work is taken in whole, one of five not.
    burst = [Inflow(30, 3000, 30), *even(10, 0.0)]
    assert flow(burst, pools(1, 5), None, EXACT).attainment == 1.0
    burst = [Inflow(50, 5000, 50), *even(10, 0.0)]
    assert flow(burst, pools(1, 5), None, EXACT).attainment == pytest.approx(3 / 5)
    then = [Inflow(30, 3000, 30), Inflow(10, 1000, 10), Inflow(10, 1000, 10), Inflow(20, 2000, 20)]
    assert flow(then, pools(1, 5), None, EXACT).good == pytest.approx(30 + 10 + 10 + 10)


def test_streams_are_bounded_by_the_slots_of_replicas() -> None:
    # 20 requests/s of 100 tokens at up to 0.1 s a token: 200 streams, of which one replica has 100.
    long = even(300, 20, prompt=1.0, output=100.0)
    assert flow(long, pools(1, 1), None, EXACT).attainment == pytest.approx(0.5, abs=0.05)
    assert flow(long, pools(1, 3), None, EXACT).attainment == 1.0


@pytest.mark.parametrize("step_s", [0.02, 0.5, 4.0])
def test_streams_shorter_than_a_step_are_bounded_by_the_generated_tokens(
    step_s: float,
) -> None:
    # 100 streams generate 1,000 tokens a second: 500 requests/s of 2 tokens, each within 0.2 s.
    def attained(requests_per_s: float) -> float:
        short = even(round(80 / step_s), requests_per_s * step_s, prompt=1.0, output=2.0)
        options = replace(EXACT, step_s=step_s)
        return flow(short, pools(1, 1), None, options).attainment

    assert attained(450) == pytest.approx(1.0)
    assert attained(1000) == pytest.approx(0.5, abs=0.02)


def test_capacities_follow_the_lengths_of_requests() -> None:
    def capacity_at(at_s: float) -> FluidCapacity:
        return FluidCapacity(1000.0 if at_s < 50 else 500.0, 1000.0, 100.0, 0.02)

    scaler = Scripted()
    made = flow(even(100, 10), pools(1, 1), scaler, EXACT, capacity_at=capacity_at)
    seen = [observation.pools["prefill"].prefill_tokens_per_s for observation in scaler.seen]
    assert seen[:20] == [1000.0] * 20
    assert seen[30:] == [500.0] * len(seen[30:])
    assert made.attainment == pytest.approx(0.76, abs=0.01)  # half of the second half


def test_streams_go_the_faster_the_fewer_there_are() -> None:
    scaler = Scripted()
    flow(even(60, 6, prompt=1.0, output=100.0), pools(1, 1), scaler, EXACT)
    service = scaler.seen[-1].service
    assert service.tpot_mean_s is not None
    assert service.in_flight == pytest.approx(6 * 100 * service.tpot_mean_s, rel=0.05)
    least_s, all_of_it_s = 0.02, 0.1
    assert service.tpot_mean_s == pytest.approx(
        least_s + (all_of_it_s - least_s) * service.in_flight / 100, rel=0.05
    )


def test_only_a_part_of_the_capacity_is_useful() -> None:
    part = replace(EXACT, usable_fraction=0.8)
    made = flow(even(400, 10), pools(1, 2), None, part)
    assert made.attainment == pytest.approx(0.8, abs=0.01)


def test_a_start_helps_after_a_cold_start_and_is_paid_for_from_the_asking() -> None:
    scaler = Scripted({1: (StartReplicas(pool="prefill", replicas=1),)})
    made = flow(even(20, 20, output=1.0), pools(1, 1), scaler, EXACT)
    ready = [sample.replicas[Role.PREFILL] for sample in made.timeline]
    assert ready == [1] * 6 + [2] * 14
    assert [sample.starting for sample in made.timeline] == [0, 0, *[1] * 4, *[0] * 14]
    assert made.scaling.replica_seconds == {"prefill": 20.0 + 18.0, "decode": 20.0}
    assert made.scaling.gpu_seconds == 2 * 58.0


def test_a_stop_cancels_starts_before_it_drains_serving_replicas() -> None:
    scaler = Scripted(
        {
            1: (StartReplicas(pool="prefill", replicas=1),),
            2: (StopReplicas(pool="prefill", replicas=2),),
        }
    )
    made = flow(even(20, 1), pools(2, 1), scaler, EXACT)
    assert made.scaling.replica_seconds["prefill"] == 20.0 + 2.0 + (4.0 + 3.0)
    assert made.timeline[-1].replicas[Role.PREFILL] == 1
    assert [observation.pools["prefill"].draining for observation in scaler.seen[:5]] == [
        0,
        0,
        1,
        0,
        0,
    ]


def test_streams_of_a_replica_that_stops_end_there() -> None:
    scaler = Scripted({20: (StopReplicas(pool="decode", replicas=1),)})
    made = flow(even(60, 6, prompt=1.0, output=100.0), pools(1, 2), scaler, EXACT)
    before, after = scaler.seen[19].service, scaler.seen[20].service
    assert after.in_flight < 0.85 * before.in_flight
    assert made.good <= made.arrived


def test_a_step_in_which_nothing_arrives_is_none_too_many_for_a_pool_that_has_shrunk() -> None:
    scaler = Scripted({2: (StopReplicas(pool="prefill", replicas=1),)})
    load = [*even(4, 20), *even(4, 0.0), *even(4, 5)]
    made = flow(load, pools(2, 2), scaler, replace(EXACT, slo=Slo(ttft_s=1.0)))
    assert made.good == pytest.approx(made.arrived)
    scaler = Scripted({1: (StopReplicas(pool="prefill", replicas=2),)})
    made = flow([*even(2, 25), *even(4, 0.0), *even(2, 5)], pools(2, 2), scaler, EXACT)
    assert made.good == pytest.approx(50)


def test_a_flip_moves_capacity_at_once_and_costs_nothing_more() -> None:
    flip = FlipReplicas(pool="decode", replicas=1, role=Role.PREFILL)
    scaler = Scripted({1: (flip,)})
    made = flow(even(60, 20, output=1.0), pools(1, 2), scaler, EXACT)
    still = flow(even(60, 20, output=1.0), pools(1, 2), None, EXACT)
    assert made.attainment > still.attainment + 0.3
    assert made.scaling.gpu_seconds == still.scaling.gpu_seconds
    assert scaler.seen[1].pools["decode"].prefill == 1


def test_mixed_replicas_give_prompts_and_streams_what_each_needs() -> None:
    # Prompts are worth 1.6 replicas and streams about 0.7, or the other way round.
    many_prompts = even(200, 16, prompt=100.0, output=20.0)
    many_outputs = even(200, 16, prompt=20.0, output=100.0)
    for load in (many_prompts, many_outputs):
        assert flow(load, mixed(3), None, EXACT).attainment > 0.99
        assert flow(load, mixed(1), None, EXACT).attainment < 0.7


def test_an_autoscaler_sees_rates_over_its_window_and_results_of_requests() -> None:
    scaler = Scripted()
    flow(even(100, 20), pools(1, 2), scaler, EXACT)
    last = scaler.seen[-1]
    assert last.demand.requests_per_s == pytest.approx(20)
    assert last.demand.prompt_tokens_per_s == pytest.approx(2000)
    assert last.demand.mean_output_tokens == pytest.approx(10)
    assert last.service.attainment == pytest.approx(0.5)
    assert last.service.rejected_per_s == pytest.approx(10)
    assert last.window_s == pytest.approx(EXACT.window_s)
    prefill = last.pools["prefill"]
    assert (prefill.ready_replicas, prefill.prefill_tokens_per_s, prefill.utilization_fraction) == (
        1,
        1000.0,
        1.0,
    )
    assert last.pools["decode"].running_requests < 100
    assert last.missing_inputs == ()
    assert (last.ttft_s, last.tpot_s, last.attainment_target) == (2.0, 0.2, 0.9)


def test_a_timeline_says_attainment_between_its_points() -> None:
    made = flow([*even(50, 5), *even(50, 50)], pools(1, 5), None, replace(EXACT, samples=10))
    shares = [sample.attainment for sample in made.timeline]
    assert shares[1:5] == [1.0] * 4
    assert max(shares[6:]) < 0.5


def test_noise_has_the_mean_of_the_series_and_the_variance_of_independent_requests() -> None:
    windows = [RateWindow(0.0, 100.0, 200.0, 50.0), RateWindow(2000.0, 100.0, 200.0, 50.0)]
    drawn = inflows(windows, OPTIONS, random.Random(1))
    assert len(drawn) == 4000
    requests = [inflow.requests for inflow in drawn]
    assert fmean(requests) == pytest.approx(100, rel=0.01)
    assert pstdev(requests) == pytest.approx(10, rel=0.05)
    prompts = [inflow.prompt_tokens for inflow in drawn]
    assert fmean(prompts) == pytest.approx(20_000, rel=0.01)
    # Of a sum of Poisson many: mean of squares, which is (1 + cv^2) times the square of the mean.
    assert pstdev(prompts) == pytest.approx(200 * (100 * (1 + 1.5**2)) ** 0.5, rel=0.05)


def test_a_request_has_a_token_of_each_however_little_was_drawn() -> None:
    # Where a rate comes down to nothing there are steps with a hundredth of a request: their
    # lengths, drawn by themselves, may be none, and streams of no length never were.
    windows = [RateWindow(0.0, 0.01, 200.0, 50.0), RateWindow(2000.0, 0.0, 1.0, 1.0)]
    drawn = inflows(windows, OPTIONS, random.Random(1))
    assert any(0 < inflow.requests < 1 for inflow in drawn)
    for inflow in drawn:
        assert inflow.prompt_tokens >= inflow.requests
        assert inflow.output_tokens >= inflow.requests
    assert 0.0 <= flow(drawn, pools(1, 1), None, OPTIONS).attainment <= 1.0


def test_between_the_middles_of_windows_rates_lie_on_a_straight_line() -> None:
    windows = [RateWindow(0.0, 1000.0, 10.0, 5.0), RateWindow(100.0, 3000.0, 30.0, 5.0)]
    quiet = replace(OPTIONS, prompt_cv=0.0)
    drawn = inflows(windows, quiet, random.Random(2))

    def about(at: int) -> tuple[float, float]:
        part = drawn[at - 5 : at + 5]
        asked = fmean(inflow.requests for inflow in part)
        return asked, fmean(inflow.prompt_tokens for inflow in part) / asked

    for at, requests, prompt in ((20, 1000, 10), (75, 1500, 15), (100, 2000, 20), (180, 3000, 30)):
        assert about(at)[0] == pytest.approx(requests, rel=0.05)
        assert about(at)[1] == pytest.approx(prompt, rel=0.05)


def test_the_same_seed_draws_the_same_and_a_scale_scales() -> None:
    windows = [RateWindow(0.0, 100.0, 200.0, 50.0)]
    one, other = (inflows(windows, OPTIONS, random.Random(3)) for _ in range(2))
    assert one == other
    half = inflows(windows, OPTIONS, random.Random(3), scale=0.5)
    assert fmean(each.requests for each in half) == pytest.approx(50, rel=0.05)


RUNS = st.lists(st.integers(0, 60), min_size=5, max_size=40)


@given(RUNS, st.integers(1, 4), st.integers(1, 4))
def test_more_replicas_never_serve_fewer_and_nothing_is_served_that_did_not_arrive(
    arrivals: list[int], prefill: int, decode: int
) -> None:
    load = [Inflow(float(arrival), arrival * 80.0, arrival * 20.0) for arrival in arrivals]

    def served(more: int) -> FluidRun:
        return flow(load, pools(prefill + more, decode + more), None, EXACT)

    few, many = served(0), served(1)
    assert few.good <= many.good + 1e-6
    assert 0 <= few.good <= few.arrived == sum(arrivals)
