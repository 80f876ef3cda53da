"""Scaling policies of other projects, by their published formulas, and the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.policy.scaling.desired import ScalingPolicy, ScalingReason
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel
from baton.policy.scaling.slo import SloPolicy
from benchmarks._oracle import Oracle
from benchmarks.policies.dynamo_planner import DynamoPlanner
from benchmarks.policies.hpa import Hpa
from benchmarks.policies.kpa import Kpa
from benchmarks.policies.wva import StepLine, Wva
from tests.policy.scaling.simulated_pools import decode_pool, demand, observe, options, prefill_pool

NOTHING = Demand()


def busy(count: int, fraction: float | None, *, starting: int = 0) -> PoolObservation:
    return replace(prefill_pool(count, starting=starting), utilization_fraction=fraction)


def wanted(policy: ScalingPolicy, observation: Observation, name: str = "prefill") -> int:
    return policy.desired(observation)[name].replicas


# ------------------------------------------------------------------ HPA


def test_hpa_takes_utilization_over_target_rounded_up() -> None:
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(5, 1.0))) == math.ceil(5 / 0.8)


def test_hpa_tolerates_a_tenth() -> None:
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(10, 0.8 * 1.1))) == 10
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(10, 0.8 * 1.12))) == 12
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(40, 0.8 * 0.95))) == 40
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(40, 0.8 * 0.85))) == 34


def test_hpa_goes_up_to_double_or_four_more_at_a_time() -> None:
    policy = Hpa(options(), target=0.1)
    assert wanted(policy, observe(0.0, NOTHING, busy(2, 1.0))) == 6
    assert wanted(policy, observe(15.0, NOTHING, busy(6, 1.0))) == 12


def test_hpa_decides_once_in_fifteen_seconds() -> None:
    policy = Hpa(options())
    assert wanted(policy, observe(0.0, NOTHING, busy(5, 1.0))) == 7
    assert wanted(policy, observe(14.9, NOTHING, busy(7, 1.0))) == 7
    assert wanted(policy, observe(15.0, NOTHING, busy(7, 1.0))) == 9


def test_hpa_goes_down_to_the_most_of_five_minutes() -> None:
    policy = Hpa(options())
    for second in range(0, 301, 15):
        fraction = 0.4 if second == 15 else 0.08
        last = wanted(policy, observe(float(second), NOTHING, busy(10, fraction)))
    assert last == 5
    assert wanted(policy, observe(330.0, NOTHING, busy(10, 0.08))) == 1


def test_hpa_takes_replicas_that_start_for_idle_when_it_would_go_up() -> None:
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(5, 1.0, starting=5))) == 10
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(5, 1.0, starting=1))) == 6


def test_hpa_leaves_a_pool_alone_of_which_it_is_not_known_how_busy_it_is() -> None:
    assert wanted(Hpa(options()), observe(0.0, NOTHING, busy(5, None))) == 5


# ------------------------------------------------------------------ KPA


def crowded(count: int, streams: float) -> PoolObservation:
    return replace(decode_pool(count), running_requests=streams / count)


def kpa(policy: Kpa, at_s: float, count: int, streams: float) -> tuple[int, ScalingReason]:
    want = policy.desired(observe(at_s, NOTHING, crowded(count, streams)))["decode"]
    return want.replicas, want.reason


def test_kpa_divides_the_mean_of_a_minute_by_seven_tenths_of_a_replicas_capacity() -> None:
    policy = Kpa(options())
    for second in range(0, 60, 5):
        last = kpa(policy, float(second), 5, 300.0 + second)
    assert last == (math.ceil((300.0 + 27.5) / 70.0), ScalingReason.CONCURRENCY)


def test_kpa_panics_when_six_seconds_need_twice_as_many() -> None:
    policy = Kpa(options())
    for second in range(0, 60, 5):
        kpa(policy, float(second), 2, 100.0)
    assert kpa(policy, 60.0, 2, 560.0) == (5, ScalingReason.PANIC), "330 at once in six seconds"
    # and does not go down before a minute without panic is over
    assert kpa(policy, 65.0, 5, 10.0) == (5, ScalingReason.PANIC)
    assert kpa(policy, 120.0, 5, 10.0) == (5, ScalingReason.PANIC)
    assert kpa(policy, 125.0, 5, 10.0)[1] is ScalingReason.CONCURRENCY


def test_kpa_goes_down_to_half_at_a_time() -> None:
    assert kpa(Kpa(options()), 0.0, 9, 1.0)[0] == 4


def test_kpa_takes_one_prompt_at_a_time() -> None:
    pool = replace(prefill_pool(3), running_requests=1.0, queued_requests=0.5)
    want = Kpa(options()).desired(observe(0.0, NOTHING, pool))["prefill"]
    assert want.replicas == math.ceil(4.5 / 0.7)


# ------------------------------------------------------------------ Dynamo


def dynamo(
    policy: DynamoPlanner, at_s: float, asked: Demand, service: ServiceLevel | None = None
) -> int:
    return wanted(policy, observe(at_s, asked, prefill_pool(3), decode_pool(3), service=service))


def test_dynamo_divides_demand_by_throughput_without_headroom() -> None:
    wants = DynamoPlanner(options()).desired(
        observe(0.0, demand(4.0, 2.5), prefill_pool(3), decode_pool(3))
    )
    assert (wants["prefill"].replicas, wants["decode"].replicas) == (4, 3)


def test_dynamo_moves_by_eight_at_most() -> None:
    assert dynamo(DynamoPlanner(options()), 0.0, demand(19.0, 1.0)) == 11


def test_dynamo_adds_one_while_the_mean_is_late_and_takes_one_away_when_it_is_not() -> None:
    late, early = ServiceLevel(ttft_mean_s=2.1), ServiceLevel(ttft_mean_s=0.5)
    policy = DynamoPlanner(options())
    dynamo(policy, 0.0, demand(1.0, 1.0))
    assert dynamo(policy, 5.0, demand(1.0, 1.0), late) == 4
    assert dynamo(policy, 8.0, demand(1.0, 1.0), late) == 3, "not within five seconds"
    assert dynamo(policy, 10.0, demand(1.0, 1.0), early) == 2


def test_dynamo_does_nothing_while_replicas_start() -> None:
    policy = DynamoPlanner(options())
    dynamo(policy, 0.0, demand(1.0, 1.0))
    late = ServiceLevel(ttft_mean_s=2.1)
    observation = observe(
        5.0, demand(1.0, 1.0), prefill_pool(2, starting=1), decode_pool(3), service=late
    )
    assert wanted(policy, observation) == 3


def test_dynamos_throughput_is_the_floor_of_its_load_loop() -> None:
    policy = DynamoPlanner(options())
    dynamo(policy, 0.0, demand(3.0, 1.0))
    assert dynamo(policy, 5.0, demand(3.0, 1.0), ServiceLevel(ttft_mean_s=0.1)) == 3


# ------------------------------------------------------------------ WVA


def test_a_line_of_steps_is_learned_from_batches_that_differ() -> None:
    line = StepLine()
    for batch in (10, 40, 80, 20, 60) * 20:
        line.learn(batch, 0.010 + batch * 2e-4)
    assert line.alpha_s == pytest.approx(0.010, rel=1e-3)
    assert line.beta_s == pytest.approx(2e-4, rel=1e-3)
    assert line.batch(0.030) == pytest.approx(100.0, rel=1e-3)


def test_batches_that_do_not_differ_teach_no_slope() -> None:
    line = StepLine()
    for _ in range(50):
        line.learn(10.0, 0.02)
    assert line.batch(0.05) is None


def test_wva_wants_as_many_as_the_rate_takes_on_average() -> None:
    wants = Wva(options()).desired(observe(0.0, demand(5.0, 2.5), prefill_pool(3), decode_pool(3)))
    # a prompt takes 0.1 s, of 2 s: 5 / (1 - 0.1 / 2) replicas' worth
    assert wants["prefill"].replicas == math.ceil(5.0 / 0.95)
    assert wants["decode"].replicas == 3


def test_wva_scales_down_as_slowly_as_the_hpa_below_it() -> None:
    policy = Wva(options())
    policy.desired(observe(0.0, demand(5.0, 2.5), prefill_pool(6), decode_pool(3)))
    assert wanted(policy, observe(290.0, demand(1.0, 1.0), prefill_pool(6), decode_pool(3))) == 6
    assert wanted(policy, observe(310.0, demand(1.0, 1.0), prefill_pool(6), decode_pool(3))) == 2


# ------------------------------------------------------------------ the oracle


def test_the_oracle_has_ready_what_will_be_needed_and_no_longer() -> None:
    policy = Oracle(options(), lambda at_s: demand(6.0 if 300 <= at_s < 400 else 1.0, 1.0))
    needs = {
        at_s: wanted(policy, observe(at_s, NOTHING, prefill_pool(3), decode_pool(3)))
        for at_s in (200.0, 240.0, 390.0, 410.0)
    }
    assert needs == {200.0: 2, 240.0: 7, 390.0: 7, 410.0: 2}


def test_the_oracle_needs_no_less_than_the_present_takes() -> None:
    asked = demand(6.0, 3.0)
    oracle = Oracle(options(), lambda _: asked).desired(
        observe(0.0, asked, prefill_pool(1), decode_pool(1))
    )
    ours = SloPolicy(options()).desired(observe(0.0, asked, prefill_pool(1), decode_pool(1)))
    assert {name: want.replicas for name, want in oracle.items()} == {
        name: want.replicas for name, want in ours.items()
    }
