"""Who flips where nothing can be started, and how soon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.policy.scaling.budget import GpuClaim, apply_gpu_budget
from baton.policy.scaling.observation import PoolObservation, ServiceLevel
from baton.policy.scaling.options import PoolBounds
from baton.policy.scaling.pools.pool_assignment import PoolAssignment, plan_pools, resize
from baton.policy.scaling.pools.role_flips import RoleNeeds, RoleRebalancer
from baton.policy.scaling.slo import SloPolicy
from tests.policy.scaling.simulated_pools import (
    decode_pool,
    demand,
    observe,
    options,
    pool,
    prefill_pool,
)

FULL = options(gpu_budget=6.0)
TICK_S = 2.0


def flipped(
    needs: Mapping[Role, float],
    lacking: Mapping[Role, int],
    *pools: PoolObservation,
    foreseen: Mapping[Role, float] | None = None,
    for_s: float = 6.0,
) -> tuple[Role, int, float]:
    """To which role, how many and when first, while needs stay and no GPU is left; 0: nobody."""
    rebalance, at_s, bounds = RoleRebalancer(FULL), 0.0, PoolBounds(min=1, initial=1, max=6)
    split = RoleNeeds(greatest=dict(foreseen or needs), present=needs)
    while True:
        assignment = PoolAssignment(pools, dict.fromkeys(("prefill", "decode"), bounds))
        found = rebalance.flip(observe(at_s, demand(1.0, 1.0), *pools), assignment, split, lacking)
        if found.flipped or at_s >= for_s:
            return found.role, found.flipped, at_s
        at_s += TICK_S


def both(prefill: float, decode: float) -> dict[Role, float]:
    return {Role.PREFILL: prefill, Role.DECODE: decode}


def short(prefill: int, decode: int) -> dict[Role, int]:
    return {Role.PREFILL: prefill, Role.DECODE: decode}


def test_of_two_roles_that_lack_as_many_the_worse_served_one_is_helped() -> None:
    to, made, _ = flipped(both(4.2, 2.0), short(1, 1), prefill_pool(5), decode_pool(1))
    assert (to, made) == (Role.DECODE, 1)


def test_a_shortage_is_shared_out_within_seconds_but_not_on_first_sight() -> None:
    to, made, at_s = flipped(both(5.2, 0.2), short(3, 0), prefill_pool(3), decode_pool(3))
    assert (to, made) == (Role.PREFILL, 2)
    assert at_s == FULL.slo.flip_urgent_s


def test_a_forecast_need_does_not_block_a_flip_for_a_present_miss() -> None:
    pools = (prefill_pool(5), decode_pool(1))
    foreseen = both(8.0, 2.0)
    to, made, _ = flipped(both(4.0, 2.0), short(1, 1), *pools, foreseen=foreseen)
    assert (to, made) == (Role.DECODE, 1)


def test_prompts_that_spare_decoders_compute_are_no_reason_to_flip() -> None:
    """A prefill replica more would serve prompts, but take from streams what they need."""
    _, made, _ = flipped(both(1.2, 4.4), short(1, 0), prefill_pool(1), decode_pool(5), for_s=60.0)
    assert made == 0


def test_streams_do_not_count_on_spare_prefill_replicas() -> None:
    to, made, _ = flipped(both(1.2, 4.4), short(0, 1), prefill_pool(2), decode_pool(4))
    assert (to, made) == (Role.DECODE, 1)


def test_the_gain_of_a_flip_is_counted_in_capacity_and_not_in_replicas() -> None:
    """Who is left does 3.85 replicas' worth of prompts, which is nearly enough; three were not."""
    weak = replace(decode_pool(3, flipped=2), prefill_tokens_per_s=8_500.0)
    to, made, _ = flipped(both(4.0, 1.3), short(0, 1), prefill_pool(3), weak)
    assert (to, made) == (Role.DECODE, 1)


def test_queued_requests_count_as_future_streams() -> None:
    policy = SloPolicy(options())
    busy = replace(decode_pool(1), running_requests=95.0)
    service = ServiceLevel(queued_requests=60)
    wants = policy.desired(observe(0.0, demand(2.0, 0.3), prefill_pool(3), busy, service=service))
    assert wants["decode"].inputs["need_busy"] == 1.55


def rising(per_s: float) -> list[float]:
    """When a decode pool of one gets help whose streams become more by so many a second."""
    policy, helped = SloPolicy(FULL), []
    for tick in range(8):
        at_s = tick * TICK_S
        busy = replace(decode_pool(1), running_requests=30.0 + per_s * at_s)
        wants = policy.desired(observe(at_s, demand(3.5, 0.3), prefill_pool(5), busy))
        if wants["prefill"].role_flips.get(Role.DECODE):
            helped.append(at_s)
    return helped


def test_streams_that_become_more_are_met_before_they_are_too_many() -> None:
    """At 6 s there are 60, which one replica takes; at 14 s there would be 100."""
    assert rising(5.0)[0] == 6.0


def test_nearly_constant_streams_cause_no_flip() -> None:
    assert rising(0.5) == []
    assert rising(-1.0) == []


def test_a_newly_known_decode_capacity_is_no_rise() -> None:
    """Fifty streams all the while; until the third tick it is not known what a replica can do."""
    policy = SloPolicy(FULL)
    for tick in range(10):
        busy = replace(decode_pool(1), running_requests=50.0)
        if tick < 3:
            busy = replace(busy, decode_tokens_per_s=None, decode_streams=None)
        wants = policy.desired(observe(tick * TICK_S, demand(3.5, 0.3), prefill_pool(5), busy))
        assert not wants["prefill"].role_flips
    assert wants["decode"].inputs["need_rising"] == 0.5


def test_a_rising_need_alone_starts_no_replica() -> None:
    """It is known for seconds, and a start takes minutes."""
    policy = SloPolicy(options())
    for tick in range(5):
        busy = replace(decode_pool(1), running_requests=30.0 + 10.0 * tick)
        wants = policy.desired(observe(tick * TICK_S, demand(1.0, 0.3), prefill_pool(1), busy))
    assert wants["decode"].inputs["need_rising"] > 1.0
    assert wants["decode"].replicas == 1


def test_a_roster_stays_as_it_is_when_a_flip_is_only_tried() -> None:
    assignment = PoolAssignment(
        [prefill_pool(3), decode_pool(3)],
        {name: PoolBounds(max=6) for name in ("prefill", "decode")},
    )
    there = assignment.with_flip(Role.PREFILL, 2)
    assert (there.effective_replicas(Role.PREFILL), there.effective_replicas(Role.DECODE)) == (
        5.0,
        1.0,
    )
    assert (
        assignment.effective_replicas(Role.PREFILL),
        assignment.effective_replicas(Role.DECODE),
    ) == (
        3.0,
        3.0,
    )


# ---------- who is where: flips, growth and shrinking on paper
BOUNDS = {name: PoolBounds(min=1, initial=1, max=8) for name in ("prefill", "decode", "more")}


def assignment(prefill: int, decode: int, *, away: int = 0, back: int = 0) -> PoolAssignment:
    return PoolAssignment(
        [prefill_pool(prefill, flipped=back), decode_pool(decode, flipped=away)], BOUNDS
    )


def sizes(of: PoolAssignment) -> dict[str, tuple[int, int]]:
    planned_pools = (*of.planned[Role.PREFILL], *of.planned[Role.DECODE])
    return {
        planned_pool.pool.name: (planned_pool.replicas, planned_pool.flipped)
        for planned_pool in planned_pools
    }


def test_players_are_a_roles_own_but_for_those_away_and_the_others_guests() -> None:
    plan = assignment(4, 5, away=2, back=1)
    assert (plan.whole_replicas(Role.PREFILL), plan.whole_replicas(Role.DECODE)) == (5, 4)


def test_flipped_replicas_return_before_others_leave() -> None:
    plan = assignment(4, 5, back=2)
    assert plan.flip(Role.PREFILL, 3) == 3
    assert sizes(plan) == {"prefill": (4, 0), "decode": (5, 1)}


def test_a_role_keeps_at_least_one_replica() -> None:
    plan = assignment(1, 3)
    assert plan.flip(Role.PREFILL, 9) == 2
    assert plan.whole_replicas(Role.DECODE) == 1


def test_replicas_that_start_do_not_flip() -> None:
    plan = PoolAssignment([prefill_pool(1), decode_pool(2, starting=4)], BOUNDS)
    assert plan.flip(Role.PREFILL, 5) == 1


def test_a_pool_of_another_shape_does_not_play_what_it_was_never_seen_to_do() -> None:
    unseen = replace(decode_pool(4), prefill_tokens_per_s=None, gpus_per_replica=2.0)
    plan = PoolAssignment([prefill_pool(1), unseen], BOUNDS)
    assert plan.flip(Role.PREFILL, 2) == 0


def test_a_pool_of_the_same_shape_is_taken_to_do_as_much_as_the_roles_own() -> None:
    plan = PoolAssignment(
        [prefill_pool(1), replace(decode_pool(4), prefill_tokens_per_s=None)], BOUNDS
    )
    assert plan.flip(Role.PREFILL, 2) == 2
    assert plan.whole_replicas(Role.PREFILL) == 3


def test_no_replica_flips_to_a_role_of_unknown_capacity() -> None:
    unseen = [
        replace(observation, prefill_tokens_per_s=None)
        for observation in (prefill_pool(1), decode_pool(4))
    ]
    assert PoolAssignment(unseen, BOUNDS).flip(Role.PREFILL, 2) == 0


def test_growth_fills_a_roles_own_pools_and_then_the_others() -> None:
    plan = assignment(6, 2)
    assert plan.grow(Role.PREFILL, 5) == 0
    assert sizes(plan) == {"prefill": (8, 0), "decode": (5, 0)}
    assert assignment(6, 7).grow(Role.PREFILL, 9) == 6


def test_own_replicas_are_stopped_before_guests_and_none_below_the_least() -> None:
    plan = assignment(3, 5, away=2)
    plan.shrink(Role.PREFILL, 3)
    assert sizes(plan) == {"prefill": (1, 0), "decode": (4, 1)}


def test_pools_of_other_capacity_count_by_it() -> None:
    weak = pool("more", Role.PREFILL, {Role.PREFILL: 4}, speed=0.25)
    plan = PoolAssignment([prefill_pool(2), weak, decode_pool(1)], BOUNDS)
    assert plan.whole_replicas(Role.PREFILL) == 3
    assert plan.max_effective_replicas(Role.PREFILL) == 10.0
    plan.grow(Role.PREFILL, 7.0)
    assert sizes(plan)["prefill"] == (8, 0)
    assert sizes(plan)["more"] == (8, 0)
    plan.shrink(Role.PREFILL, 1)
    assert sizes(plan)["more"] == (4, 0)


counts = st.integers(1, 8)


@given(
    prefill=counts,
    decode=counts,
    flips=st.integers(0, 9),
    to=st.sampled_from(("prefill", "decode")),
)
def test_flips_keep_every_replica(prefill: int, decode: int, flips: int, to: str) -> None:
    plan = assignment(prefill, decode, away=decode // 3, back=prefill // 4)
    before = plan.whole_replicas(Role(to))
    made = plan.flip(Role(to), flips)
    assert plan.whole_replicas(Role(to)) == before + made
    assert sum(size for size, _ in sizes(plan).values()) == prefill + decode
    assert all(0 <= away <= size for size, away in sizes(plan).values())


@given(have=st.integers(0, 8), more=st.integers(0, 8), replicas=st.integers(0, 30))
def test_pools_that_do_the_same_are_resized_within_bounds(
    have: int, more: int, replicas: int
) -> None:
    pools = [
        pool("decode", Role.MIXED, {Role.MIXED: have}),
        pool("more", Role.MIXED, {Role.MIXED: more}),
    ]
    planned = plan_pools(pools, BOUNDS)
    resize(planned, replicas)
    after = [planned_pool.replicas for planned_pool in planned]
    assert sum(after) == min(max(replicas, min(have, 1) + min(more, 1)), 16)
    assert all(size <= 8 for size in after)


# --------------------------------------------------------------------------- who gets the GPUs
claims = st.lists(
    st.builds(
        GpuClaim,
        pool=st.sampled_from("abcdef"),
        current_replicas=st.integers(0, 8),
        desired_replicas=st.integers(0, 8),
        min_replicas=st.integers(0, 2),
        gpus_per_replica=st.sampled_from((1.0, 2.0, 4.0, 8.0)),
        draining_replicas=st.integers(0, 2),
        is_overridden=st.booleans(),
    ),
    unique_by=lambda claim: claim.pool,
    max_size=6,
)


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100))
def test_the_budget_holds_but_for_replicas_that_are_not_stopped(
    claims: list[GpuClaim], budget: int
) -> None:
    granted = apply_gpu_budget(claims, budget)
    used = sum(granted[claim.pool] * claim.gpus_per_replica for claim in claims)
    least = sum(
        min(claim.min_replicas, claim.current_replicas, claim.desired_replicas)
        * claim.gpus_per_replica
        for claim in claims
    )
    assert used <= max(budget, least)
    for claim in claims:
        assert (
            min(claim.min_replicas, claim.current_replicas, claim.desired_replicas)
            <= granted[claim.pool]
            <= claim.desired_replicas
        )


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100), seed=st.integers(0, 99))
def test_the_order_of_pools_does_not_matter(claims: list[GpuClaim], budget: int, seed: int) -> None:
    mixed = Random(seed).sample(claims, len(claims))
    assert apply_gpu_budget(mixed, budget) == apply_gpu_budget(claims, budget)


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100))
def test_no_gpus_are_left_while_a_pool_could_use_them(claims: list[GpuClaim], budget: int) -> None:
    granted = apply_gpu_budget(claims, budget)
    used = sum(
        (granted[claim.pool] + claim.draining_replicas) * claim.gpus_per_replica for claim in claims
    )
    for claim in claims:
        assert (
            granted[claim.pool] == claim.desired_replicas or used + claim.gpus_per_replica > budget
        )


@settings(max_examples=40)
@given(claims=claims)
def test_enough_gpus_satisfy_every_pool(claims: list[GpuClaim]) -> None:
    wanted = {claim.pool: claim.desired_replicas for claim in claims}
    assert apply_gpu_budget(claims, None) == wanted
    assert apply_gpu_budget(claims, 1e6) == wanted


def test_an_operators_override_comes_first() -> None:
    claims = [
        GpuClaim(pool="a", current_replicas=1, desired_replicas=4),
        GpuClaim(pool="b", current_replicas=1, desired_replicas=4, is_overridden=True),
    ]
    assert apply_gpu_budget(claims, 6) == {"a": 2, "b": 4}


def test_an_operators_override_is_reduced_last() -> None:
    claims = [
        GpuClaim(pool="a", current_replicas=3, desired_replicas=3, min_replicas=1),
        GpuClaim(pool="b", current_replicas=3, desired_replicas=3, is_overridden=True),
    ]
    assert apply_gpu_budget(claims, 4) == {"a": 1, "b": 3}
    assert apply_gpu_budget(claims, 2) == {"a": 1, "b": 1}
