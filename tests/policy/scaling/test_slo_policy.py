"""baton's own scaling policy: alone on single observations, and in a closed loop."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.domain.fleet import Role
from baton.policy.scaling.actions import FlipReplicas, StartReplicas
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.needs import objective_of
from baton.policy.scaling.observation import Demand, PoolObservation, ServiceLevel
from baton.policy.scaling.options import SloScalingOptions
from baton.policy.scaling.slo import SloPolicy
from tests.policy.scaling.simulated_pools import (
    SimulatedPools,
    decode_pool,
    demand,
    observe,
    options,
    pool,
    prefill_pool,
)

loads = st.floats(0.0, 15.0)


def once(
    asked: Demand,
    *pools: PoolObservation,
    service: ServiceLevel | None = None,
    names: tuple[str, ...] = ("prefill", "decode"),
) -> Mapping[str, DesiredReplicas]:
    """What a policy that has seen nothing else wants."""
    return SloPolicy(options(names=names)).desired(observe(10.0, asked, *pools, service=service))


def mixed(name: str, count: int, *, strength: float | None = 1.0) -> PoolObservation:
    return pool(name, Role.MIXED, {Role.MIXED: count}, speed=strength)


# ------------------------------------------------------------------ one observation


@given(prompts=loads, outputs=loads)
def test_there_is_more_than_the_mean_takes_of_each_role(prompts: float, outputs: float) -> None:
    wants = once(demand(prompts, outputs), prefill_pool(1), decode_pool(1))
    assert wants["prefill"].replicas >= math.ceil(prompts) >= 0
    assert wants["decode"].replicas >= math.ceil(outputs) >= 0
    assert wants["prefill"].replicas <= prompts + 3
    assert wants["decode"].replicas <= 1.4 * outputs + 2


@given(prompts=loads, outputs=loads, more=st.floats(0.0, 5.0))
def test_more_demand_never_wants_fewer(prompts: float, outputs: float, more: float) -> None:
    size = 1000.0
    before = once(demand(prompts, outputs, mean_tokens=size), prefill_pool(2), decode_pool(2))
    after = once(
        demand(prompts + more, outputs + more, mean_tokens=size), prefill_pool(2), decode_pool(2)
    )
    for name in before:
        assert after[name].replicas >= before[name].replicas


@given(prompts=loads, outputs=loads, count=st.integers(1, 9))
def test_the_order_of_pools_does_not_matter(prompts: float, outputs: float, count: int) -> None:
    pools = (prefill_pool(count), decode_pool(count), mixed("both", count))
    names = ("prefill", "decode", "both")
    asked = demand(prompts, outputs)
    assert once(asked, *pools, names=names) == once(asked, *reversed(pools), names=names)


def test_each_desire_has_its_reason_and_its_inputs() -> None:
    want = once(demand(3.0, 1.0), prefill_pool(1), decode_pool(1))["prefill"]
    assert want.reason is ScalingReason.DEMAND
    assert "prefill needs" in want.detail
    assert want.inputs["prompt_tokens_per_s"] == 30_000.0
    assert want.inputs["need_now"] > 3.0


def test_a_pool_that_has_more_than_it_needs_says_how_long_it_is_kept() -> None:
    kept = once(demand(0.1, 0.1), prefill_pool(4), decode_pool(4))["prefill"]
    assert kept.replicas == 4
    assert re.search(r"so 4, .* what is to spare is kept for \d+ s more", kept.detail)
    used = once(demand(3.0, 1.0), prefill_pool(1), decode_pool(1))["prefill"]
    assert "kept" not in used.detail


def test_a_bound_that_limits_a_pool_is_reported() -> None:
    enough = once(demand(10.0, 1.0), prefill_pool(1), decode_pool(1))["prefill"]
    short = once(demand(30.0, 1.0), prefill_pool(1), decode_pool(1))["prefill"]
    assert enough.inputs["unmet"] == 0
    assert short.inputs["unmet"] == short.inputs["target"] - 20 >= 10
    assert short.replicas == short.inputs["target"], "the autoscaler limits it to 20"
    assert enough.replicas == enough.inputs["target"] <= 20


@pytest.mark.parametrize(
    "pools",
    [(prefill_pool(20), decode_pool(20)), (mixed("both", 20),)],
    ids=["split", "both"],
)
def test_a_pool_at_its_maximum_that_would_have_more_says_so(
    pools: tuple[PoolObservation, ...],
) -> None:
    names = tuple(each.name for each in pools)
    bounded = options(names=names)
    tick = Autoscaler(SloPolicy(bounded), bounded).tick(observe(10.0, demand(60.0, 60.0), *pools))
    assert not tick.actions
    for decision in tick.decisions:
        assert (decision.target_replicas, decision.limited_by) == (20, "max"), decision
        assert decision.desired_replicas >= 60


def test_a_pool_at_its_maximum_that_has_enough_says_nothing_of_it() -> None:
    bounded = options()
    tick = Autoscaler(SloPolicy(bounded), bounded).tick(
        observe(10.0, demand(15.0, 15.0), prefill_pool(20), decode_pool(20))
    )
    assert [decision.limited_by for decision in tick.decisions] == ["", ""]


def test_one_pool_that_does_both_needs_enough_for_both() -> None:
    both = once(demand(2.0, 3.0), mixed("both", 1), names=("both",))["both"]
    apart = once(demand(2.0, 3.0), prefill_pool(1), decode_pool(1))
    assert 6 <= both.replicas <= apart["prefill"].replicas + apart["decode"].replicas


def test_pools_of_one_role_alone_do_both() -> None:
    alone = once(demand(2.0, 3.0), decode_pool(1), names=("decode",))
    both = once(demand(2.0, 3.0), mixed("both", 1), names=("both",))
    assert alone["decode"].replicas == both["both"].replicas


def test_need_beyond_the_bounds_of_other_pools_goes_to_mixed_pools() -> None:
    names = ("prefill", "decode", "both")
    little = once(demand(3.0, 3.0), prefill_pool(1), decode_pool(1), mixed("both", 1), names=names)
    much = once(demand(30.0, 3.0), prefill_pool(1), decode_pool(1), mixed("both", 1), names=names)
    assert little["both"].replicas == 1
    assert much["prefill"].replicas == much["prefill"].inputs["target"] > 20
    assert 10 <= much["both"].replicas <= 13


def test_of_pools_of_one_role_the_one_that_does_most_for_its_gpus_grows() -> None:
    strong = replace(prefill_pool(1), name="strong", prefill_tokens_per_s=30_000.0)
    wants = once(
        demand(6.0, 1.0),
        prefill_pool(1),
        strong,
        decode_pool(1),
        names=("prefill", "strong", "decode"),
    )
    assert wants["prefill"].replicas == 1
    assert wants["strong"].replicas == 3


def test_a_pool_of_unknown_capacity_grows_by_one_only_while_requests_are_late() -> None:
    unknown = mixed("both", 2, strength=None)
    late = ServiceLevel(min_ttft_slack_s=-1.0)
    assert once(demand(9.0, 9.0), unknown, names=("both",))["both"].replicas == 2
    want = once(demand(9.0, 9.0), unknown, service=late, names=("both",))["both"]
    assert want.replicas == 3
    waits = once(demand(9.0, 9.0), replace(unknown, starting=1), service=late, names=("both",))[
        "both"
    ]
    assert waits.replicas == 3


def test_the_first_request_wakes_pools_of_unknown_capacity() -> None:
    nobody = mixed("both", 0, strength=None)
    assert once(demand(0.0, 0.0), nobody, names=("both",))["both"].replicas == 0
    held = ServiceLevel(queued_requests=1)
    assert once(demand(0.0, 0.0), nobody, service=held, names=("both",))["both"].replicas == 1


def test_a_backlog_that_would_be_late_takes_what_clears_it() -> None:
    late = ServiceLevel(min_ttft_slack_s=-5.0, queued_requests=1500)
    calm = ServiceLevel(min_ttft_slack_s=5.0, queued_requests=1500)
    asked = demand(3.0, 1.0)
    rush = once(asked, prefill_pool(4), decode_pool(2), service=late)["prefill"]
    # 1.5 M tokens wait, and of each second's 40,000 10,000 are left for them: 0.85 M in 65 s
    assert rush.reason is ScalingReason.LATE_REQUESTS
    assert rush.replicas == math.ceil(3.0 + 0.85e6 / 10.0 / 10_000.0)
    assert once(asked, prefill_pool(4), decode_pool(2), service=calm)["prefill"].replicas == 4


def test_a_backlog_that_clears_before_a_replica_would_be_ready_starts_none() -> None:
    late = ServiceLevel(min_ttft_slack_s=-0.5, queued_requests=100)
    want = once(demand(3.0, 1.0), prefill_pool(6), decode_pool(3), service=late)["prefill"]
    assert want.replicas == 6


def test_a_backlog_grows_no_larger_in_the_reckoning_than_it_is() -> None:
    """What arrives meanwhile is demand, and counted as such."""
    late = ServiceLevel(min_ttft_slack_s=-5.0, queued_requests=500)
    want = once(demand(6.0, 1.0), prefill_pool(2), decode_pool(2), service=late)["prefill"]
    assert want.replicas == math.ceil(6.0 + 0.5e6 / 10.0 / 10_000.0)


def test_misses_are_shared_between_the_objectives_that_there_are() -> None:
    both = replace(observe(0.0, demand(1.0, 1.0)), attainment_target=0.9)
    assert objective_of(both, 2.0).allowed_miss_fraction == pytest.approx(0.05)
    assert objective_of(replace(both, tpot_s=None), 2.0).allowed_miss_fraction == pytest.approx(0.1)
    assert objective_of(replace(both, attainment_target=1.0), 2.0).allowed_miss_fraction > 0


def test_lateness_is_no_surprise_while_replicas_start() -> None:
    policy = SloPolicy(options())
    wrong = ServiceLevel(attainment=0.5, ttft_p90_s=4.0, tpot_p90_s=0.03)
    for tick in range(200):
        pools = (prefill_pool(4, starting=2), decode_pool(3))
        wants = policy.desired(observe(tick * 5.0, demand(4.0, 2.0), *pools, service=wrong))
    assert wants["prefill"].inputs["correction"] == 1.0


def test_streams_under_way_are_not_stopped() -> None:
    policy = SloPolicy(options())
    for tick in range(400):
        running = replace(
            decode_pool(6), running_requests=80.0
        )  # 480 streams: five replicas' worth
        wants = policy.desired(observe(tick * 5.0, demand(0.5, 0.5), prefill_pool(2), running))
    assert wants["decode"].replicas >= 5


# ------------------------------------------------------------------ in a closed loop


def test_a_step_up_is_answered_in_one_go() -> None:
    body = SimulatedPools(options())
    body.run(300.0, lambda _: demand(1.0, 0.5))
    body.run(5.0, lambda _: demand(6.0, 3.0))
    starts = [each for each in body.ticks[-1].actions if isinstance(each, StartReplicas)]
    assert {each.pool for each in starts} == {"prefill", "decode"}
    assert body.size("prefill") >= 6
    assert body.size("decode") >= 3


def test_it_comes_down_again_and_stays() -> None:
    body = SimulatedPools(options())
    body.run(600.0, lambda _: demand(6.0, 3.0))
    body.run(3600.0, lambda _: demand(1.0, 0.5))
    assert (body.size("prefill"), body.size("decode")) == (2, 1)
    assert body.reversals() == 2


def test_a_rise_is_met_before_it_comes() -> None:
    """A replica takes a minute to start; demand grows by one replica's worth every two."""
    body = SimulatedPools(options())
    body.run(1800.0, lambda at_s: demand(1.0 + at_s / 120.0, 1.0))
    assert any(
        decision.reason is ScalingReason.FORECAST
        for tick in body.ticks
        for decision in tick.decisions
    )
    for _ in range(20):
        body.run(5.0, lambda at_s: demand(1.0 + at_s / 120.0, 1.0))
        assert body.replicas_of_role(Role.PREFILL) >= 1.0 + body.now_s / 120.0


@pytest.mark.parametrize("seed", range(2))
def test_noisy_steady_demand_reverses_twice_an_hour_at_most(seed: int) -> None:
    rng = Random(seed)
    body = SimulatedPools(options())
    body.run(3 * 3600.0, lambda _: demand(rng.gauss(4.0, 0.5), rng.gauss(3.0, 0.3)))
    assert body.reversals() <= 2 * 3
    assert body.replicas_of_role(Role.PREFILL) >= 5


def test_replicas_flip_before_others_are_started() -> None:
    """The mix moves from prompts to outputs, the sum stays."""
    body = SimulatedPools(options())
    body.run(600.0, lambda _: demand(6.0, 1.5))
    before = body.size("prefill") + body.size("decode")
    body.run(200.0, lambda _: demand(1.5, 5.0))
    flips = [each for tick in body.ticks for each in tick.actions if isinstance(each, FlipReplicas)]
    assert {(each.pool, each.role) for each in flips} == {("prefill", Role.DECODE)}
    assert body.replicas_of_role(Role.DECODE) >= 5
    assert body.size("prefill") + body.size("decode") <= before + 1
    assert any(
        decision.reason is ScalingReason.ROLE_FLIP
        for tick in body.ticks
        for decision in tick.decisions
    )


def test_a_flipped_replica_returns_when_the_mix_moves_back() -> None:
    body = SimulatedPools(options())
    body.run(600.0, lambda _: demand(6.0, 1.5))
    body.run(200.0, lambda _: demand(1.5, 5.0))
    body.run(900.0, lambda _: demand(6.0, 1.5))
    assert body.replicas_of_role(Role.PREFILL) >= 7
    assert body.roles["prefill"][Role.DECODE] == 0


def test_no_replica_flips_at_the_first_observation() -> None:
    policy = SloPolicy(options())
    first = policy.desired(observe(0.0, demand(1.0, 5.0), prefill_pool(6), decode_pool(2)))
    assert not first["prefill"].role_flips
    assert first["decode"].replicas == 2, "what can flip soon is waited for"
    last = policy.desired(observe(31.0, demand(1.0, 5.0), prefill_pool(6), decode_pool(2)))
    assert last["prefill"].role_flips == {Role.DECODE: 4}


@pytest.mark.parametrize(("budget", "flips"), [(None, {}), (13.0, {Role.DECODE: 1})])
def test_a_role_keeps_headroom_from_a_flip_where_replicas_can_be_started(
    budget: float | None, flips: Mapping[Role, int]
) -> None:
    """Of eight replicas prefill needs 6.9 and decode is two short of its 6.1."""
    policy = SloPolicy(options(gpu_budget=budget))
    asked, pools = demand(6.6, 5.5), (prefill_pool(8), decode_pool(5))
    policy.desired(observe(0.0, asked, *pools))
    wants = policy.desired(observe(31.0, asked, *pools))
    assert wants["prefill"].role_flips == flips
    assert wants["decode"].replicas == 7 - sum(flips.values())


def test_no_replica_flips_back_before_the_dwell_time_is_over() -> None:
    body = SimulatedPools(options(gpu_budget=9.0))
    body.run(600.0, lambda _: demand(6.0, 1.5))
    body.run(60.0, lambda _: demand(1.5, 5.0))
    body.run(300.0, lambda _: demand(6.0, 1.5))
    times: dict[Role, list[float]] = {Role.PREFILL: [], Role.DECODE: []}
    for tick in body.ticks:
        for action in tick.actions:
            if isinstance(action, FlipReplicas):
                times[action.role].append(tick.at_s)
    assert times[Role.DECODE]
    assert times[Role.PREFILL]
    assert min(times[Role.PREFILL]) - max(times[Role.DECODE]) >= 120.0


def test_no_replica_flips_when_flips_are_off() -> None:
    body = SimulatedPools(options(slo=SloScalingOptions(flips=False)))
    body.run(600.0, lambda _: demand(6.0, 1.5))
    body.run(600.0, lambda _: demand(1.5, 5.0))
    assert not any(isinstance(each, FlipReplicas) for tick in body.ticks for each in tick.actions)


def test_a_role_keeps_a_player_however_short_the_other_is() -> None:
    body = SimulatedPools(options(max_replicas=3))
    body.run(900.0, lambda _: demand(3.0, 0.1))
    body.run(900.0, lambda _: demand(12.0, 0.1))
    assert body.replicas_of_role(Role.DECODE) >= 1


def test_when_no_gpus_are_left_a_shortage_is_shared_out() -> None:
    body = SimulatedPools(options(gpu_budget=8.0))
    body.run(600.0, lambda _: demand(4.5, 2.4))
    assert body.size("prefill") + body.size("decode") == 8
    body.run(900.0, lambda _: demand(2.0, 9.0))
    assert body.size("prefill") + body.size("decode") == 8
    assert body.replicas_of_role(Role.DECODE) == 6


def test_requests_that_are_late_although_there_should_be_enough_raise_the_need() -> None:
    body = SimulatedPools(options())
    body.run(300.0, lambda _: demand(4.0, 2.0))
    before = body.size("prefill")
    wrong = ServiceLevel(attainment=0.8, ttft_p90_s=4.0, tpot_p90_s=0.03)
    body.run(600.0, lambda _: demand(4.0, 2.0), service=wrong)
    assert before < body.size("prefill") <= 2 * before
    assert body.size("decode") == 3
    right = ServiceLevel(attainment=1.0, ttft_p90_s=0.5, tpot_p90_s=0.03)
    body.run(2 * 3600.0, lambda _: demand(4.0, 2.0), service=right)
    assert body.size("prefill") == before


def test_the_last_replicas_go_when_nothing_was_asked_for_and_come_back() -> None:
    body = SimulatedPools(options(min_replicas=0, scale_to_zero=True))
    body.run(300.0, lambda _: demand(2.0, 1.0))
    body.run(1200.0, lambda _: Demand())
    assert (body.size("prefill"), body.size("decode")) == (0, 0)
    body.run(5.0, lambda _: demand(0.5, 0.5))
    assert min(body.size("prefill"), body.size("decode")) >= 1


def test_a_start_from_zero_is_not_called_off_when_its_client_has_left() -> None:
    body = SimulatedPools(options(min_replicas=0, scale_to_zero=True))
    body.run(1200.0, lambda _: Demand())
    assert body.size("decode") == 0
    body.cold_start_s = 600.0  # five times as long as idle replicas are kept
    body.run(5.0, lambda _: demand(0.5, 0.5))
    body.run(590.0, lambda _: Demand())
    assert (body.size("prefill"), body.size("decode")) == (1, 1)
    body.run(900.0, lambda _: Demand())
    assert (body.size("prefill"), body.size("decode")) == (0, 0)


def test_a_start_that_is_stuck_does_not_keep_a_fleet_from_zero() -> None:
    policy = SloPolicy(options(min_replicas=0, scale_to_zero=True))
    wants = [
        policy.desired(observe(at_s, Demand(), stuck(at_s)))["decode"].replicas
        for at_s in (0.0, 170.0, 400.0)
    ]
    assert wants == [1, 1, 0]


def stuck(at_s: float) -> PoolObservation:
    """A pool whose only start takes for ever."""
    none = {Role.PREFILL: 0, Role.DECODE: 0}
    made = pool("decode", Role.DECODE, none, starting=1, cold_start_s=60.0)
    return replace(made, oldest_start_age_s=at_s)


def test_the_last_replicas_stay_while_anything_is_under_way() -> None:
    body = SimulatedPools(options(min_replicas=0, scale_to_zero=True))
    body.run(300.0, lambda _: demand(2.0, 1.0))
    body.run(1200.0, lambda _: Demand(), service=ServiceLevel(in_flight=1))
    assert min(body.size("prefill"), body.size("decode")) >= 1


def test_the_last_replicas_stay_where_zero_is_not_wanted() -> None:
    body = SimulatedPools(options(min_replicas=0))
    body.run(1200.0, lambda _: Demand())
    assert (body.size("prefill"), body.size("decode")) == (1, 1)
