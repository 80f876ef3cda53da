"""Fleets: what they cost, what they should carry, and which of them are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.planner.problem import Offer
from baton.planner.shapes.fleets import (
    Fleet,
    Key,
    Kind,
    Pool,
    Stock,
    cell,
    estimate,
    key,
    largest,
    smallest,
)
from baton.planner.shapes.space import Duty, Instance
from tests.planner.shapes import GPU, instance

P, D, BOTH = instance(8192, tp=2), instance(2048), instance(512)
ENDLESS = Stock(gpus=None, by_name={})

rates = st.fixed_dictionaries(
    {
        key(Duty.PREFILL, P): st.floats(0.5, 50),
        key(Duty.DECODE, D): st.floats(0.5, 50),
        key(Duty.BOTH, D): st.floats(0.1, 20),
        key(Duty.BOTH, BOTH): st.floats(0.1, 20),
    }
)
PAIRS: dict[Kind, list[tuple[Instance, ...]]] = {
    Kind.COLOCATED: [(BOTH,)],
    Kind.DISAGGREGATED: [(P, D)],
    Kind.HYBRID: [(P, D)],
}


def fleet(kind: Kind, *counts: int) -> Fleet:
    roles = [Role.MIXED] if kind is Kind.COLOCATED else [Role.PREFILL, Role.DECODE]
    pools = zip(roles, PAIRS[kind][0], counts, strict=True)
    return Fleet(
        kind=kind, pools=tuple(Pool(role=role, instance=one, replicas=n) for role, one, n in pools)
    )


def test_a_fleet_takes_the_gpus_and_the_money_of_all_its_replicas() -> None:
    one = fleet(Kind.HYBRID, 3, 2)

    assert one.gpus == 3 * 2 + 2
    assert one.price_per_hour == 8 * 2.0
    assert one.replicas == 5


def test_a_disaggregated_fleet_carries_what_its_slower_pool_does() -> None:
    known = {key(Duty.PREFILL, P): 10.0, key(Duty.DECODE, D): 4.0, key(Duty.BOTH, D): 3.0}

    assert estimate(fleet(Kind.DISAGGREGATED, 1, 2), known) == 8
    assert estimate(fleet(Kind.DISAGGREGATED, 1, 9), known) == 10


def test_a_hybrids_idle_decode_replicas_take_whole_requests() -> None:
    known = {key(Duty.PREFILL, P): 10.0, key(Duty.DECODE, D): 5.0, key(Duty.BOTH, D): 3.0}

    # two of four decode what is handed over, the others carry 3 each
    assert estimate(fleet(Kind.HYBRID, 1, 4), known) == 10 + 2 * 3
    assert estimate(fleet(Kind.HYBRID, 1, 2), known) == 10


@given(rates, st.integers(1, 6), st.integers(1, 6))
def test_a_hybrid_should_carry_no_less_than_the_same_pools_kept_apart(
    known: dict[Key, float], first: int, second: int
) -> None:
    hybrid, split = (
        estimate(fleet(kind, first, second), known) for kind in (Kind.HYBRID, Kind.DISAGGREGATED)
    )
    assert hybrid >= split


@given(rates, st.sampled_from(list(Kind)), st.integers(3, 24))
def test_more_gpus_never_should_carry_less(known: dict[Key, float], kind: Kind, gpus: int) -> None:
    def most(count: int) -> float:
        ways = largest(kind, PAIRS[kind], Stock(gpus=count, by_name={}))
        return max((estimate(one, known) for one in ways), default=0.0)

    assert most(gpus) <= most(gpus + 1) * (1 + 1e-9)


@given(rates, st.sampled_from(list(Kind)), st.integers(3, 14))
def test_what_is_proposed_for_a_stock_is_the_best_of_all_fleets_in_it(
    known: dict[Key, float], kind: Kind, gpus: int
) -> None:
    stock = Stock(gpus=gpus, by_name={})
    pools = len(PAIRS[kind][0])
    everything = [
        one
        for counts in product(range(1, gpus + 1), repeat=pools)
        if stock.has(one := fleet(kind, *counts))
    ]
    best = max(estimate(one, known) for one in everything)
    proposed = list(largest(kind, PAIRS[kind], stock))

    assert all(stock.has(one) for one in proposed)
    assert max(estimate(one, known) for one in proposed) == pytest.approx(best)


@settings(max_examples=40)
@given(rates, st.sampled_from(list(Kind)), st.floats(1, 60))
def test_what_is_proposed_for_a_rate_is_the_cheapest_of_all_fleets_that_carry_it(
    known: dict[Key, float], kind: Kind, rate: float
) -> None:
    def enough(one: Fleet) -> bool:
        return estimate(one, known) >= rate

    stock = Stock(gpus=16, by_name={})
    pools = len(PAIRS[kind][0])
    everything = [
        one.gpus
        for counts in product(range(1, 17), repeat=pools)
        if stock.has(one := fleet(kind, *counts)) and enough(one)
    ]
    proposed = list(smallest(kind, PAIRS[kind], stock, enough))

    assert all(enough(one) and stock.has(one) for one in proposed)
    assert min((one.gpus for one in proposed), default=None) == min(everything, default=None)


@given(rates, st.sampled_from(list(Kind)), st.floats(1, 60))
def test_from_what_is_proposed_for_a_rate_no_replica_can_be_taken(
    known: dict[Key, float], kind: Kind, rate: float
) -> None:
    def enough(one: Fleet) -> bool:
        return estimate(one, known) >= rate

    for one in smallest(kind, PAIRS[kind], ENDLESS, enough):
        *rest, last = [pool.replicas for pool in one.pools]
        assert last == 1 or not enough(one.with_replicas([*rest, last - 1]))


def test_an_offers_own_limit_counts_as_the_whole_stocks_does() -> None:
    stock = Stock.of(16, (Offer(accelerator=GPU, available=5),))

    assert stock.has(fleet(Kind.HYBRID, 2, 1))
    assert not stock.has(fleet(Kind.HYBRID, 2, 2))
    assert [one.replicas for one in largest(Kind.COLOCATED, [(BOTH,)], stock)] == [5]


def evenness(part: Sequence[int], whole: Sequence[int]) -> float:
    shares = [some / every for some, every in zip(part, whole, strict=True)]
    return min(shares) / max(shares)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 10))
def test_a_part_of_a_fleet_has_its_proportions_and_is_no_larger_than_it_must_be(
    first: int, second: int, most: int
) -> None:
    whole = fleet(Kind.DISAGGREGATED, first, second)
    counts = [pool.replicas for pool in cell(whole, most).pools]

    assert evenness(counts, (first, second)) >= 0.8
    even_and_smaller = [
        part
        for part in product(range(1, first + 1), range(1, second + 1))
        if evenness(part, (first, second)) >= 0.8 and sum(part) < sum(counts)
    ]
    assert sum(counts) <= most or not even_and_smaller


def test_of_parts_that_are_even_the_largest_is_taken() -> None:
    part = cell(fleet(Kind.DISAGGREGATED, 20, 10), 8)

    assert [pool.replicas for pool in part.pools] == [4, 2]


def test_where_no_small_part_is_even_the_smallest_that_is_stands_for_the_fleet() -> None:
    part = cell(fleet(Kind.DISAGGREGATED, 19, 13), 3)

    assert [pool.replicas for pool in part.pools] == [3, 2]


def test_a_fleet_that_no_part_stands_for_is_left_whole() -> None:
    uneven = fleet(Kind.DISAGGREGATED, 3, 2)

    assert cell(uneven, 3) is uneven
