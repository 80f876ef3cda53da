"""What is made of simulated fleets: costs, trades, what binds, and what is taken."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Role
from baton.perf.hardware.accelerators import Accelerator
from baton.perf.model.speculative import speedup
from baton.planner.explore import cost, rank_candidates
from baton.planner.plan import find_bottleneck, verdict_of
from baton.planner.problem import AcceleratorOffer, PlanningProblem, SloClass
from baton.planner.rates.closed_form import MeanRequest
from baton.planner.rates.measure import RateSearchResult
from baton.planner.rates.trials import LatencyQuantiles, Trial
from baton.planner.result import Candidate, Constraint, Speculation, Tradeoff
from baton.planner.shapes.fleets import FleetKind, PlannedFleet, PlannedPool
from baton.planner.tradeoffs import (
    Drafting,
    closed_form_tradeoffs,
    pareto_front,
    simulated_tradeoffs,
    speculation_of,
)
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.arrivals import UserLoad
from tests.planner.shapes import GPU, TIMING, evenly_spaced, instance, question, shapes
from tests.simulator.v1_cores import LinearStepTiming

MIX = MeanRequest(prompt_tokens=600, output_tokens=50)
ASKED = question(evenly_spaced(10.0, 600, 50))


def trial(rate: float, *, holds: bool = True, **changed: float) -> Trial:
    made = Trial(
        rate_per_s=rate,
        attainment=0.95 if holds else 0.7,
        margin=0.05 if holds else -0.2,
        late_first_token_fraction=0.0,
        slow_stream_fraction=0.0 if holds else 0.3,
        requests=100,
        ttft=LatencyQuantiles(p50_s=0.1, p90_s=0.2, p99_s=0.3),
        tpot=LatencyQuantiles(p50_s=0.02, p90_s=0.025, p99_s=0.03),
        e2e_s=1.0,
        output_tokens=50.0,
        cached_fraction=0.0,
    )
    return replace(made, **changed)  # type: ignore[arg-type]  # all of them are floats


def candidate(
    kind: FleetKind,
    rate: float,
    *,
    over: Trial | None = None,
    replicas: int = 1,
    accelerator: Accelerator = GPU,
) -> Candidate:
    roles = (Role.MIXED,) if kind is FleetKind.COLOCATED else (Role.PREFILL, Role.DECODE)
    fleet = PlannedFleet(
        kind=kind,
        pools=tuple(
            PlannedPool(
                role=role, engine_shape=instance(accelerator=accelerator), replicas=replicas
            )
            for role in roles
        ),
    )
    trials = tuple(other for other in (trial(rate) if rate else None, over) if other is not None)
    return Candidate(
        fleet=fleet,
        simulated_fleet=fleet,
        scale_factor=1.0,
        estimate_per_s=rate,
        search_result=RateSearchResult(rate_per_s=rate, trials=trials),
    )


# ------------------------------------------------------------------- costs


def test_a_million_tokens_cost_what_the_fleet_costs_while_it_makes_them() -> None:
    one = candidate(FleetKind.COLOCATED, 10.0)  # 500 tokens/s for $2 an hour

    assert one.cost_per_million_tokens() == pytest.approx(2 / 3600 / 500 * 1e6)
    assert one.cost_per_million_tokens(5.0) == pytest.approx(2 * 2 / 3600 / 500 * 1e6)
    assert one.cost_per_million_tokens(99.0) == one.cost_per_million_tokens()


def test_both_pools_gpus_count() -> None:
    split = candidate(FleetKind.DISAGGREGATED, 10.0)

    assert split.rate_per_gpu == 5.0
    assert split.tokens_per_s_per_gpu(trial(10.0)) == 250.0


# ------------------------------------------------------------------- what is taken


def test_the_fleet_that_carries_most_is_chosen_and_the_simplest_of_equals() -> None:
    alone, split = candidate(FleetKind.COLOCATED, 9.7), candidate(FleetKind.DISAGGREGATED, 10.0)
    clearly = candidate(FleetKind.DISAGGREGATED, 20.0)

    assert rank_candidates([split, alone], ASKED)[0] is alone
    assert rank_candidates([alone, clearly], ASKED) == (clearly, [clearly, alone])


def test_for_a_rate_the_cheapest_that_carries_it_is_taken() -> None:
    asked = replace(ASKED, rate_per_s=8.0)
    large, small = (
        candidate(FleetKind.COLOCATED, 30.0, replicas=3),
        candidate(FleetKind.HYBRID, 8.5),
    )

    assert rank_candidates([large, small], asked)[0] is small
    assert rank_candidates([large, small], replace(asked, rate_per_s=9.0))[0] is large
    assert rank_candidates([large, small], replace(asked, rate_per_s=99.0))[0] is large


def test_dollars_are_never_compared_with_numbers_of_gpus() -> None:
    bare = replace(GPU, name="bare", price_per_hour=None)
    offers = (AcceleratorOffer(accelerator=GPU), AcceleratorOffer(accelerator=bare))
    priced = candidate(FleetKind.COLOCATED, 9.0, replicas=3)  # $6 an hour
    unpriced = candidate(FleetKind.COLOCATED, 9.0, replicas=4, accelerator=bare)
    asked = replace(ASKED, rate_per_s=8.0, offers=offers)
    known = replace(asked, offers=(offers[0], replace(offers[1], price_per_hour=1.0)))

    assert rank_candidates([unpriced, priced], asked)[0] is priced
    assert cost(priced.fleet, asked) == 3
    assert cost(priced.fleet, known) == 6


def test_fleets_for_nothing_are_compared_by_their_gpus() -> None:
    free = replace(ASKED, offers=(AcceleratorOffer(accelerator=GPU, price_per_hour=0.0),))

    assert cost(candidate(FleetKind.COLOCATED, 9.0, replicas=3).fleet, free) == 3


def test_a_fleet_that_carries_nothing_is_never_taken() -> None:
    nothing = candidate(FleetKind.COLOCATED, 0.0, over=trial(1.0, holds=False))

    assert rank_candidates([nothing], ASKED) == (None, [nothing])


# ------------------------------------------------------------------- why it is taken


def verdict(*fleets: Candidate, asked: PlanningProblem = ASKED) -> str:
    """What is said of the fleet that is taken of these."""
    best, ranked = rank_candidates(fleets, asked)
    return verdict_of(best, ranked, asked)


def test_a_fleet_that_carries_less_than_another_says_why_it_is_taken_and_by_how_much() -> None:
    alone = candidate(FleetKind.COLOCATED, 79.9, replicas=2)
    split = candidate(FleetKind.HYBRID, 83.0)

    assert verdict(alone, split) == (
        "do not disaggregate, although hybrid carries more: equal within the tolerance of 15%, and"
        " colocated is the simpler to run: colocated carries 79.9 requests/s on 2 GPUs, hybrid 83"
        " requests/s on 2 GPUs: 0.96 times as much per dollar"
    )


def test_a_split_is_also_compared_with_one_that_carries_more() -> None:
    alone = candidate(FleetKind.COLOCATED, 50.0, replicas=2)
    hybrid, split = candidate(FleetKind.HYBRID, 79.9), candidate(FleetKind.DISAGGREGATED, 83.0)
    beside_one_pool = "colocated 50 requests/s on 2 GPUs: 1.60 times as much per dollar"

    assert verdict(alone, hybrid).endswith(beside_one_pool)
    assert beside_one_pool in verdict(alone, hybrid, split)
    assert verdict(alone, hybrid, split).endswith(
        "against disaggregated (83 requests/s on 2 GPUs) 0.96 times as much per dollar"
    )


def test_a_fleet_that_carries_more_in_all_and_less_for_its_price_says_so() -> None:
    small, large = candidate(FleetKind.COLOCATED, 50.0), candidate(FleetKind.HYBRID, 80.0)

    assert verdict(small, large).endswith(
        "0.80 times as much per dollar: hybrid carries more in all"
    )


def test_of_fleets_that_carry_a_rate_the_dearer_one_is_said_to_be_so() -> None:
    asked = replace(ASKED, rate_per_s=40.0)
    small, large = candidate(FleetKind.COLOCATED, 50.0), candidate(FleetKind.HYBRID, 80.0)
    same = candidate(FleetKind.COLOCATED, 50.0, replicas=2)

    dearer = "hybrid costs 2.00 times as much for the rate"
    assert verdict(small, large, asked=asked).endswith(dearer)
    assert verdict(same, large, asked=asked).endswith(
        "hybrid costs the same, and is the more complicated"
    )


BARE = replace(GPU, name="bare", price_per_hour=None)
USERS = UserLoad(users=60, think_s=2.0)


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    made = []
    for _ in range(draw(st.integers(1, 7))):
        rate = draw(st.sampled_from((0.0, 8.0, 9.5, 10.0, 10.4, 20.0, 40.0)))
        one = candidate(
            draw(st.sampled_from(list(FleetKind))),
            rate,
            over=trial(rate + 1, holds=False),
            replicas=draw(st.integers(1, 4)),
            accelerator=draw(st.sampled_from((GPU, BARE))),
        )
        seconds = draw(st.sampled_from((1.0, 2.0, 5.0)))
        trials = tuple(replace(other, e2e_s=seconds) for other in one.search_result.trials)
        made.append(replace(one, search_result=replace(one.search_result, trials=trials)))
    return made


QUESTIONS = [
    replace(ASKED, rate_per_s=rate, users=users, gpus=8, offers=offers)
    for rate, users in ((None, None), (9.0, None), (10.0, None), (39.0, None), (None, USERS))
    for offers in (
        (AcceleratorOffer(accelerator=GPU), AcceleratorOffer(accelerator=BARE)),
        (
            AcceleratorOffer(accelerator=GPU),
            AcceleratorOffer(accelerator=BARE, price_per_hour=1.5),
        ),
    )
]
SIMPLEST_FIRST = (FleetKind.COLOCATED, FleetKind.HYBRID, FleetKind.DISAGGREGATED)


@given(fleets(), st.sampled_from(QUESTIONS))
def test_a_fleet_that_carries_less_than_another_is_never_taken_without_its_true_reason_first(
    offered: list[Candidate], asked: PlanningProblem
) -> None:
    best, ranked = rank_candidates(offered, asked)
    said = verdict_of(best, ranked, asked)
    if best is None:
        assert not any(other.rate_per_s for other in offered)
        return
    head = said.split(" requests/s")[0].rsplit(": ", 1)[0]  # all before the first figure
    stronger = [other for other in offered if other.load(asked) > best.load(asked)]
    if best.meets_demand(asked):
        cheaper = [other for other in offered if other.meets_demand(asked)]
        assert cost(best.fleet, asked) == min(cost(other.fleet, asked) for other in cheaper)
        rivals = [x for x in stronger if cost(x.fleet, asked) == cost(best.fleet, asked)]
        assert ("the cheapest fleet that is enough" in head) is bool(stronger)
        assert ("costs the same, and is the more complicated" in head) is bool(rivals)
    else:
        rivals = stronger
        most = max(other.load(asked) for other in offered)
        assert best.load(asked) >= (1 - asked.effort.precision) * most
        assert ("equal within the tolerance" in head) is bool(rivals)
        assert ("no fleet is enough" in head) is (asked.demand is not None)
    assert ("although" in head) is (bool(rivals) or "no fleet is enough" in head)
    simple = SIMPLEST_FIRST.index(best.fleet.kind)
    assert all(SIMPLEST_FIRST.index(other.fleet.kind) > simple for other in rivals)


def test_users_are_carried_by_a_fleet_that_answers_them() -> None:
    asked = replace(ASKED, rate_per_s=None, users=USERS)
    slow, fast = candidate(FleetKind.COLOCATED, 18.0), candidate(FleetKind.COLOCATED, 18.0)
    trials = (trial(18.0, e2e_s=2.0),)
    slow = replace(slow, search_result=replace(slow.search_result, trials=trials))

    # 60 users send 20 requests/s if an answer takes 1 s, and 15 if it takes 2 s
    assert USERS.rate_per_s(1.0) == 20.0
    assert (slow.load(asked), fast.load(asked)) == (72.0, 54.0)
    assert slow.meets_demand(asked)
    assert not fast.meets_demand(asked)
    assert rank_candidates([fast, slow], asked)[0] is slow


# ------------------------------------------------------------------- trades

trades = st.builds(
    Tradeoff,
    kind=st.sampled_from(list(FleetKind)),
    label=st.just(""),
    tokens_per_s_per_gpu=st.integers(1, 20).map(float),
    tokens_per_s_per_user=st.integers(1, 20).map(float),
    simulated=st.booleans(),
)


def beats(one: Tradeoff, other: Tradeoff) -> bool:
    mine = (one.tokens_per_s_per_gpu, one.tokens_per_s_per_user)
    others = (other.tokens_per_s_per_gpu, other.tokens_per_s_per_user)
    return mine != others and all(a >= b for a, b in zip(mine, others, strict=True))


@given(st.lists(trades, max_size=25))
def test_the_front_is_what_nothing_beats(offered: list[Tradeoff]) -> None:
    def points(some: object) -> set[tuple[float, float]]:
        assert isinstance(some, list | tuple)
        return {(item.tokens_per_s_per_gpu, item.tokens_per_s_per_user) for item in some}

    twin = [
        tradeoff for tradeoff in offered if not any(beats(other, tradeoff) for other in offered)
    ]
    assert points(pareto_front(offered)) == points(twin)


def test_the_closed_form_trades_speed_for_throughput() -> None:
    found = pareto_front(closed_form_tradeoffs(shapes().shapes_by_duty, MIX))

    assert len(found) > 3
    assert found[0].tokens_per_s_per_user > found[-1].tokens_per_s_per_user
    assert found[0].tokens_per_s_per_gpu < found[-1].tokens_per_s_per_gpu
    assert not any(tradeoff.simulated for tradeoff in found)


def test_a_disaggregated_trade_pays_for_its_prefill() -> None:
    split = [
        closed_form_tradeoff
        for closed_form_tradeoff in closed_form_tradeoffs(shapes().shapes_by_duty, MIX)
        if closed_form_tradeoff.kind is FleetKind.DISAGGREGATED
    ]

    # a prompt takes 33 ms of a GPU in a step with others, before any of its 50 tokens is decoded
    assert 0 < max(tradeoff.tokens_per_s_per_gpu for tradeoff in split) < 50 / 0.033


def test_only_rates_that_were_carried_are_traded() -> None:
    one = candidate(FleetKind.COLOCATED, 10.0, over=trial(12.0, holds=False))

    assert [trade.tokens_per_s_per_gpu for trade in simulated_tradeoffs([one])] == [500.0]


# ------------------------------------------------------------------- speculative decoding


def speculation(timing: LinearStepTiming, drafting: Drafting, rate: float = 10.0) -> Speculation:
    one = candidate(FleetKind.COLOCATED, rate)
    pool = one.fleet.pools[0]
    changed = replace(pool, engine_shape=instance(timing=timing))
    return speculation_of(replace(one, fleet=replace(one.fleet, pools=(changed,))), MIX, drafting)


FREE = LinearStepTiming(
    per_step_s=0.01, per_prefill_token_s=0.0, per_decode_s=0.0, per_context_token_s=0.0
)
"""Steps that take the same time, however many tokens they compute."""
DRAFTS = Drafting(acceptance=0.5, drafted=3, draft_cost=0.1)


def test_where_tokens_of_a_step_are_free_the_gain_is_the_closed_form() -> None:
    found = speculation(FREE, DRAFTS)

    assert found.expected_tokens == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert [point.gain for point in found.points] == pytest.approx([1.875 / 1.3] * 5)
    assert found.break_even_streams is None
    gains = {drafted: speedup(0.5, drafted, draft_cost=0.1) for drafted in range(8)}
    assert found.best_drafted == max(gains, key=gains.__getitem__)


def test_the_gain_turns_negative_where_a_step_is_bound_by_its_tokens() -> None:
    found = speculation(TIMING, DRAFTS)
    # 8 ms, 62 us for a stream, 50 us for each of 3 drafted tokens: 1.875 tokens cost
    # 1 + 0.3 + 0.15 b / (8 + 0.0625 b) steps, which is more from 40.3 streams on
    assert found.break_even_streams == 41
    by_streams = {point.streams: point.gain for point in found.points}
    assert by_streams[1] > 1.4
    assert by_streams[256] < 1
    assert all((point.gain > 1) is (point.streams < 41) for point in found.points)


def test_the_load_of_a_plan_is_in_the_answer() -> None:
    # 10 requests/s of 50 tokens, 20 ms each: 10 streams; 100 requests/s: 100
    few, many = (speculation(TIMING, DRAFTS, rate) for rate in (10.0, 100.0))

    assert (few.at_load.streams, many.at_load.streams) == (10, 100)
    assert few.at_load.gain > 1 > many.at_load.gain
    # 3 drafted tokens are too many for 100 streams: 1 gives 1.5 tokens for 1.45 steps
    assert few.best_drafted > many.best_drafted == 1


@pytest.mark.parametrize(
    ("acceptance", "drafted", "cost"),
    [(0.0, 3, 0.1), (1.0, 3, 0.1), (1.1, 3, 0.1), (0.5, 0, 0.1), (0.5, 17, 0.1), (0.5, 3, -0.1)],
)
def test_a_draft_that_there_cannot_be_is_refused(
    acceptance: float, drafted: int, cost: float
) -> None:
    with pytest.raises(ValueError, match="expected"):
        Drafting(acceptance=acceptance, drafted=drafted, draft_cost=cost)


# ------------------------------------------------------------------- what binds


def bound(kind: FleetKind, over: Trial, mix: MeanRequest = MIX) -> Constraint:
    return find_bottleneck(candidate(kind, 10.0, over=over), mix).constraint


def test_slow_streams_of_a_decode_pool_are_for_its_bandwidth() -> None:
    over = trial(12.0, holds=False)

    assert bound(FleetKind.DISAGGREGATED, over) is Constraint.DECODE_BANDWIDTH
    assert bound(FleetKind.COLOCATED, over) is Constraint.SHARED_STEPS


def test_late_first_tokens_are_for_prefill_when_it_is_busy_and_for_bursts_when_not() -> None:
    late = trial(
        25.0, holds=False, late_first_token_fraction=0.3, slow_stream_fraction=0.0
    )  # 25 x 38 ms: 95 % busy
    early = replace(late, rate_per_s=10.5)

    assert bound(FleetKind.DISAGGREGATED, late) is Constraint.PREFILL_COMPUTE
    assert bound(FleetKind.DISAGGREGATED, early) is Constraint.BURSTS


def test_a_rate_at_which_waits_grow_is_named_so_and_prompts_share_steps() -> None:
    growing = replace(trial(25.0, holds=True), wait_grows=True)
    growing = replace(growing, late_first_token_fraction=0.0, slow_stream_fraction=0.0)
    short = replace(MIX, prompt_tokens=100)
    found = find_bottleneck(candidate(FleetKind.DISAGGREGATED, 10.0, over=growing), short)
    assert "at 25 requests/s the wait for first tokens grows" in found.reason
    alone = find_bottleneck(candidate(FleetKind.DISAGGREGATED, 10.0, over=growing), MIX)
    share, longer_share = (
        int(re.search(r"takes (\d+)%", answer.reason)[1])  # type: ignore[index]
        for answer in (found, alone)
    )
    assert share < 0.3 * longer_share


def test_more_streams_than_a_group_can_have_are_named_by_their_limit() -> None:
    growing = replace(trial(1000.0), wait_grows=True)
    plain = candidate(FleetKind.DISAGGREGATED, 10.0, over=growing)
    prefill, decode = plain.fleet.pools
    shape = replace(
        decode.engine_shape, dp=4, ep=True, settings=decode.engine_shape.settings.for_ranks(4)
    )
    fleet = replace(plain.fleet, pools=(prefill, replace(decode, engine_shape=shape)))
    groups = replace(plain, fleet=fleet, simulated_fleet=fleet)
    loose, strict = (
        find_bottleneck(groups, MIX, (SloClass(objectives=Objectives(tpot_s=tpot_s)),))
        for tpot_s in (1.0, 0.02)
    )

    assert loose.constraint is Constraint.BATCH_LIMIT
    assert "than its ranks have places: 1024" in loose.reason
    assert strict.constraint is Constraint.DECODE_BANDWIDTH
    assert "than a step can have within 20 ms" in strict.reason


def test_late_first_tokens_are_for_the_network_when_that_is_full() -> None:
    # 6,000 tokens of 131 kB are 0.79 GB; 60 of them a second nearly fill 50 GB/s
    over = trial(60.0, holds=False, late_first_token_fraction=0.3, slow_stream_fraction=0.0)
    mix = replace(MIX, prompt_tokens=6000, output_tokens=2)

    assert bound(FleetKind.DISAGGREGATED, over, mix) is Constraint.NETWORK
    assert bound(FleetKind.COLOCATED, over, mix) is not Constraint.NETWORK


def test_streams_that_fill_the_cache_or_the_batch_are_distinguished() -> None:
    # 20,000 blocks of 16 are 320,000 tokens; 200 streams of 2,000 fill them
    long = MeanRequest(prompt_tokens=1900, output_tokens=200)
    many = trial(50.0, holds=False, late_first_token_fraction=0.3)

    assert bound(FleetKind.DISAGGREGATED, many, long) is Constraint.KV_MEMORY
    short = MeanRequest(prompt_tokens=10, output_tokens=250)
    assert bound(FleetKind.DISAGGREGATED, many, short) is Constraint.BATCH_LIMIT


def test_a_run_without_requests_shows_nothing_that_binds() -> None:
    empty = replace(trial(12.0, holds=False), requests=0)

    assert bound(FleetKind.COLOCATED, empty) is Constraint.NONE


def test_nothing_binds_that_was_not_seen() -> None:
    assert find_bottleneck(candidate(FleetKind.COLOCATED, 10.0), MIX).constraint is Constraint.NONE
