"""Fleets: what they cost, what they should carry, and which of them are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.planner.problem import AcceleratorOffer
from baton.planner.shapes.fleets import (
    FleetKind,
    GpuBudget,
    PlannedFleet,
    PlannedPool,
    RateKey,
    estimate_rate,
    largest_fleets,
    rate_key,
    representative_part,
    smallest_fleets,
)
from baton.planner.shapes.space import Duty, EngineShape
from tests.planner.shapes import GPU, instance

P, D, BOTH = instance(8192, tp=2), instance(2048), instance(512)
ENDLESS = GpuBudget(gpus=None, limit_by_accelerator={})

rates = st.fixed_dictionaries(
    {
        rate_key(Duty.PREFILL, P): st.floats(0.5, 50),
        rate_key(Duty.DECODE, D): st.floats(0.5, 50),
        rate_key(Duty.BOTH, D): st.floats(0.1, 20),
        rate_key(Duty.BOTH, BOTH): st.floats(0.1, 20),
    }
)
PAIRS: dict[FleetKind, list[tuple[EngineShape, ...]]] = {
    FleetKind.COLOCATED: [(BOTH,)],
    FleetKind.DISAGGREGATED: [(P, D)],
    FleetKind.HYBRID: [(P, D)],
}


def fleet(kind: FleetKind, *counts: int) -> PlannedFleet:
    roles = [Role.MIXED] if kind is FleetKind.COLOCATED else [Role.PREFILL, Role.DECODE]
    pools = zip(roles, PAIRS[kind][0], counts, strict=True)
    return PlannedFleet(
        kind=kind,
        pools=tuple(
            PlannedPool(role=role, engine_shape=shape, replicas=n) for role, shape, n in pools
        ),
    )


def test_a_fleet_takes_the_gpus_and_the_money_of_all_its_replicas() -> None:
    one = fleet(FleetKind.HYBRID, 3, 2)

    assert one.gpus == 3 * 2 + 2
    assert one.price_per_hour == 8 * 2.0
    assert one.replicas == 5


def test_a_disaggregated_fleet_carries_what_its_slower_pool_does() -> None:
    known = {
        rate_key(Duty.PREFILL, P): 10.0,
        rate_key(Duty.DECODE, D): 4.0,
        rate_key(Duty.BOTH, D): 3.0,
    }

    assert estimate_rate(fleet(FleetKind.DISAGGREGATED, 1, 2), known) == 8
    assert estimate_rate(fleet(FleetKind.DISAGGREGATED, 1, 9), known) == 10


def test_a_hybrids_idle_decode_replicas_take_whole_requests() -> None:
    known = {
        rate_key(Duty.PREFILL, P): 10.0,
        rate_key(Duty.DECODE, D): 5.0,
        rate_key(Duty.BOTH, D): 3.0,
    }

    # two of four decode what is handed over, the others carry 3 each
    assert estimate_rate(fleet(FleetKind.HYBRID, 1, 4), known) == 10 + 2 * 3
    assert estimate_rate(fleet(FleetKind.HYBRID, 1, 2), known) == 10


@given(rates, st.integers(1, 6), st.integers(1, 6))
def test_a_hybrid_should_carry_no_less_than_the_same_pools_kept_apart(
    known: dict[RateKey, float], first: int, second: int
) -> None:
    hybrid, split = (
        estimate_rate(fleet(kind, first, second), known)
        for kind in (FleetKind.HYBRID, FleetKind.DISAGGREGATED)
    )
    assert hybrid >= split


@given(rates, st.sampled_from(list(FleetKind)), st.integers(3, 24))
def test_more_gpus_never_should_carry_less(
    known: dict[RateKey, float], kind: FleetKind, gpus: int
) -> None:
    def most(count: int) -> float:
        ways = largest_fleets(kind, PAIRS[kind], GpuBudget(gpus=count, limit_by_accelerator={}))
        return max((estimate_rate(way, known) for way in ways), default=0.0)

    assert most(gpus) <= most(gpus + 1) * (1 + 1e-9)


@given(rates, st.sampled_from(list(FleetKind)), st.integers(3, 14))
def test_the_proposal_for_a_stock_is_the_best_of_all_fleets_in_it(
    known: dict[RateKey, float], kind: FleetKind, gpus: int
) -> None:
    stock = GpuBudget(gpus=gpus, limit_by_accelerator={})
    pools = len(PAIRS[kind][0])
    everything = [
        one
        for counts in product(range(1, gpus + 1), repeat=pools)
        if stock.fits(one := fleet(kind, *counts))
    ]
    best = max(estimate_rate(other, known) for other in everything)
    proposed = list(largest_fleets(kind, PAIRS[kind], stock))

    assert all(stock.fits(other) for other in proposed)
    assert max(estimate_rate(other, known) for other in proposed) == pytest.approx(best)


@settings(max_examples=40)
@given(rates, st.sampled_from(list(FleetKind)), st.floats(1, 60))
def test_the_proposal_for_a_rate_is_the_cheapest_of_all_fleets_that_carry_it(
    known: dict[RateKey, float], kind: FleetKind, rate: float
) -> None:
    def enough(one: PlannedFleet) -> bool:
        return estimate_rate(one, known) >= rate

    stock = GpuBudget(gpus=16, limit_by_accelerator={})
    pools = len(PAIRS[kind][0])
    everything = [
        one.gpus
        for counts in product(range(1, 17), repeat=pools)
        if stock.fits(one := fleet(kind, *counts)) and enough(one)
    ]
    proposed = list(smallest_fleets(kind, PAIRS[kind], stock, enough))

    assert all(enough(other) and stock.fits(other) for other in proposed)
    assert min((other.gpus for other in proposed), default=None) == min(everything, default=None)


@given(rates, st.sampled_from(list(FleetKind)), st.floats(1, 60))
def test_no_replica_can_be_removed_from_the_proposal_for_a_rate(
    known: dict[RateKey, float], kind: FleetKind, rate: float
) -> None:
    def enough(one: PlannedFleet) -> bool:
        return estimate_rate(one, known) >= rate

    for smallest_fleet in smallest_fleets(kind, PAIRS[kind], ENDLESS, enough):
        *rest, last = [pool.replicas for pool in smallest_fleet.pools]
        assert last == 1 or not enough(smallest_fleet.with_replicas([*rest, last - 1]))


def test_an_offers_own_limit_counts_as_the_whole_stocks_does() -> None:
    stock = GpuBudget.from_offers(16, (AcceleratorOffer(accelerator=GPU, available=5),))

    assert stock.fits(fleet(FleetKind.HYBRID, 2, 1))
    assert not stock.fits(fleet(FleetKind.HYBRID, 2, 2))
    assert [
        largest_fleet.replicas
        for largest_fleet in largest_fleets(FleetKind.COLOCATED, [(BOTH,)], stock)
    ] == [5]


def evenness(part: Sequence[int], whole: Sequence[int]) -> float:
    shares = [some / every for some, every in zip(part, whole, strict=True)]
    return min(shares) / max(shares)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 10))
def test_a_part_of_a_fleet_has_its_proportions_and_is_no_larger_than_it_must_be(
    first: int, second: int, most: int
) -> None:
    whole = fleet(FleetKind.DISAGGREGATED, first, second)
    counts = [pool.replicas for pool in representative_part(whole, most).pools]

    assert evenness(counts, (first, second)) >= 0.8
    even_and_smaller = [
        part
        for part in product(range(1, first + 1), range(1, second + 1))
        if evenness(part, (first, second)) >= 0.8 and sum(part) < sum(counts)
    ]
    assert sum(counts) <= most or not even_and_smaller


def test_of_parts_that_are_even_the_largest_is_taken() -> None:
    part = representative_part(fleet(FleetKind.DISAGGREGATED, 20, 10), 8)

    assert [pool.replicas for pool in part.pools] == [4, 2]


def test_where_no_small_part_is_even_the_smallest_that_is_stands_for_the_fleet() -> None:
    part = representative_part(fleet(FleetKind.DISAGGREGATED, 19, 13), 3)

    assert [pool.replicas for pool in part.pools] == [3, 2]


def test_a_fleet_that_no_part_stands_for_is_left_whole() -> None:
    uneven = fleet(FleetKind.DISAGGREGATED, 3, 2)

    assert representative_part(uneven, 3) is uneven
