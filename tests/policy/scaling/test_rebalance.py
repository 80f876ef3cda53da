"""Who flips where nothing can be started, and how soon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.domain.fleet import Role
from baton.policy.scaling.observation import PoolObservation, ServiceLevel
from baton.policy.scaling.options import PoolBounds
from baton.policy.scaling.pools.pool_assignment import PoolAssignment
from baton.policy.scaling.pools.role_flips import RoleNeeds, RoleRebalancer
from baton.policy.scaling.slo import SloPolicy
from tests.policy.scaling.simulated_pools import decode_pool, demand, observe, options, prefill_pool

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
        roster = PoolAssignment(pools, dict.fromkeys(("prefill", "decode"), bounds))
        found = rebalance.flip(observe(at_s, demand(1.0, 1.0), *pools), roster, split, lacking)
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


def test_what_is_only_foreseen_holds_nobody_back_where_others_suffer_now() -> None:
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


def test_what_is_gained_is_counted_in_what_replicas_can_do_not_in_their_number() -> None:
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


def test_streams_that_hardly_become_more_or_become_fewer_move_nobody() -> None:
    assert rising(0.5) == []
    assert rising(-1.0) == []


def test_what_becomes_known_of_decode_is_no_rise() -> None:
    """Fifty streams all the while; until the third tick it is not known what a replica can do."""
    policy = SloPolicy(FULL)
    for tick in range(10):
        busy = replace(decode_pool(1), running_requests=50.0)
        if tick < 3:
            busy = replace(busy, decode_tokens_per_s=None, decode_streams=None)
        wants = policy.desired(observe(tick * TICK_S, demand(3.5, 0.3), prefill_pool(5), busy))
        assert not wants["prefill"].role_flips
    assert wants["decode"].inputs["need_rising"] == 0.5


def test_what_rises_starts_nobody() -> None:
    """It is known for seconds, and a start takes minutes."""
    policy = SloPolicy(options())
    for tick in range(5):
        busy = replace(decode_pool(1), running_requests=30.0 + 10.0 * tick)
        wants = policy.desired(observe(tick * TICK_S, demand(1.0, 0.3), prefill_pool(1), busy))
    assert wants["decode"].inputs["need_rising"] > 1.0
    assert wants["decode"].replicas == 1


def test_a_roster_stays_as_it_is_when_a_flip_is_only_tried() -> None:
    roster = PoolAssignment(
        [prefill_pool(3), decode_pool(3)],
        {name: PoolBounds(max=6) for name in ("prefill", "decode")},
    )
    there = roster.with_flip(Role.PREFILL, 2)
    assert (there.effective_replicas(Role.PREFILL), there.effective_replicas(Role.DECODE)) == (
        5.0,
        1.0,
    )
    assert (roster.effective_replicas(Role.PREFILL), roster.effective_replicas(Role.DECODE)) == (
        3.0,
        3.0,
    )
