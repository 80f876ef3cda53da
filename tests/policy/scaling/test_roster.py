"""Who is where: flips, growth and shrinking on paper."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.policy.scaling.options import PoolBounds
from baton.policy.scaling.pools.pool_assignment import PoolAssignment, plan_pools, resize
from tests.policy.scaling.simulated_pools import decode_pool, pool, prefill_pool

BOUNDS = {name: PoolBounds(min=1, initial=1, max=8) for name in ("prefill", "decode", "more")}


def roster(prefill: int, decode: int, *, away: int = 0, back: int = 0) -> PoolAssignment:
    return PoolAssignment(
        [prefill_pool(prefill, flipped=back), decode_pool(decode, flipped=away)], BOUNDS
    )


def sizes(of: PoolAssignment) -> dict[str, tuple[int, int]]:
    seats = (*of.planned[Role.PREFILL], *of.planned[Role.DECODE])
    return {seat.pool.name: (seat.replicas, seat.flipped) for seat in seats}


def test_players_are_a_roles_own_but_for_those_away_and_the_others_guests() -> None:
    plan = roster(4, 5, away=2, back=1)
    assert (plan.whole_replicas(Role.PREFILL), plan.whole_replicas(Role.DECODE)) == (5, 4)


def test_who_is_away_comes_home_before_others_leave() -> None:
    plan = roster(4, 5, back=2)
    assert plan.flip(Role.PREFILL, 3) == 3
    assert sizes(plan) == {"prefill": (4, 0), "decode": (5, 1)}


def test_a_role_is_not_left_without_anybody() -> None:
    plan = roster(1, 3)
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


def test_nobody_is_sent_to_a_role_of_which_nothing_is_known() -> None:
    unseen = [
        replace(observation, prefill_tokens_per_s=None)
        for observation in (prefill_pool(1), decode_pool(4))
    ]
    assert PoolAssignment(unseen, BOUNDS).flip(Role.PREFILL, 2) == 0


def test_growth_fills_a_roles_own_pools_and_then_the_others() -> None:
    plan = roster(6, 2)
    assert plan.grow(Role.PREFILL, 5) == 0
    assert sizes(plan) == {"prefill": (8, 0), "decode": (5, 0)}
    assert roster(6, 7).grow(Role.PREFILL, 9) == 6


def test_own_replicas_are_stopped_before_guests_and_none_below_the_least() -> None:
    plan = roster(3, 5, away=2)
    plan.shrink(Role.PREFILL, 3)
    assert sizes(plan) == {"prefill": (1, 0), "decode": (4, 1)}


def test_pools_of_other_strength_count_for_what_they_do() -> None:
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
def test_flips_keep_everybody(prefill: int, decode: int, flips: int, to: str) -> None:
    plan = roster(prefill, decode, away=decode // 3, back=prefill // 4)
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
    seated = plan_pools(pools, BOUNDS)
    resize(seated, replicas)
    after = [seat.replicas for seat in seated]
    assert sum(after) == min(max(replicas, min(have, 1) + min(more, 1)), 16)
    assert all(size <= 8 for size in after)
