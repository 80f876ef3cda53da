from __future__ import annotations

import random
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, ReplicaView, Role
from baton.domain.handoff import HandoffMode, PlacementDecision, Route, RouteReason
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.placement.candidates import PlacementOptions
from baton.policy.placement.port import Disaggregate, PlacementContext, PlacementQuery
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.placement.replica_cost import ReplicaCost, replica_cost
from baton.policy.placement.slo_impact import SloImpact, broken_fraction
from tests.fakes.timings import (
    FixedTimings,
    KnownHits,
    LinearTiming,
    placement_context,
    replica_view,
)

QUERY = PlacementQuery(prompt_tokens=1600, max_tokens=100)
FAST = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.0)


def cost(
    *, running: int = 20, queued_tokens: int = 0, share: float = 0.0, output_tokens: float = 100.0
) -> ReplicaCost:
    load = Load(running_requests=running, queued_tokens=queued_tokens)
    view = replica_view("d0", load=load)
    found = replica_cost(QUERY, view, FAST, output_tokens=output_tokens, at_s=0.0)
    found.prefill_time_fraction = share
    return found


def placed(
    options: PredictedOptions, *, share: float = 0.0, queued_tokens: int = 0
) -> PlacementDecision:
    decode = replica_view("d0", load=Load(running_requests=20))
    prefill = replica_view("p0", Role.PREFILL, Load(queued_tokens=queued_tokens))
    timings = FixedTimings(timing=FAST, output_tokens=100.0, shares={"d0": share})
    decision = PredictedPlacer(options).place(
        QUERY, placement_context(prefill, decode, timings=timings)
    )
    assert isinstance(decision, PlacementDecision)
    return decision


# ------------------------------------------------------------------ what a stall breaks


def test_the_share_of_broken_streams_is_that_of_lives_drawn_by_chance() -> None:
    rng = random.Random(1)
    lives = [rng.expovariate(1 / 50) for _ in range(20_000)]
    slack_s, stall_s = 0.004, 0.2
    short = sum(life for life in lives if life * slack_s < stall_s)  # met as often as long
    assert broken_fraction(stall_s, slack_s=slack_s, mean_output_tokens=50) == pytest.approx(
        short / sum(lives), abs=0.02
    )


def test_a_stall_of_zero_breaks_no_stream_and_an_endless_one_breaks_all() -> None:
    assert broken_fraction(0.0, slack_s=0.01, mean_output_tokens=10) == 0
    assert broken_fraction(1e9, slack_s=0.01, mean_output_tokens=10) == 1


@given(
    tight=st.floats(0.001, 0.2),
    looser=st.floats(1.0, 10.0),
    stall=st.floats(0.0, 5.0),
    life=st.floats(1.0, 1000.0),
)
def test_a_looser_objective_breaks_no_more_streams(
    tight: float, looser: float, stall: float, life: float
) -> None:
    strict = broken_fraction(stall, slack_s=tight, mean_output_tokens=life)
    assert broken_fraction(stall, slack_s=tight * looser, mean_output_tokens=life) <= strict + 1e-12


@given(
    slo=st.floats(0.005, 0.2),
    looser=st.floats(1.0, 10.0),
    running=st.integers(0, 60),
    share=st.floats(0.0, 0.9),
)
def test_a_looser_tpot_never_makes_a_feasible_option_infeasible(
    slo: float, looser: float, running: int, share: float
) -> None:
    one = cost(running=running, share=share)
    kept = SloImpact(slo).expected_misses(one) < 1
    assert not kept or SloImpact(slo * looser).expected_misses(one) < 1
    assert (
        SloImpact(slo * looser).expected_misses(one, 1600)
        <= SloImpact(slo).expected_misses(one, 1600) + 1e-9
    )


# ------------------------------------------------------------------ what one more request breaks


def test_a_prompt_breaks_the_streams_that_cannot_make_up_for_it() -> None:
    # 1,600 tokens take 0.16 s; streams gain 10 ms with each of 100 tokens.
    lives = 0.16 / (0.01 * 100)
    wanted = 20 * (1 - exp(-lives) * (1 + lives))
    assert SloImpact(0.02).expected_misses(cost(), 1600) == pytest.approx(wanted)
    assert SloImpact(0.02).expected_misses(cost()) == 0
    assert SloImpact(0.02).expected_misses(cost(running=0), 1600) == 0


def test_queued_prompts_are_no_miss_but_increase_it() -> None:
    alone, behind = cost(), cost(queued_tokens=1600)
    assert SloImpact(0.02).expected_misses(behind) == 0
    assert SloImpact(0.02).expected_misses(behind, 1600) > SloImpact(0.02).expected_misses(
        alone, 1600
    )


def test_the_time_that_prompts_take_slows_every_token() -> None:
    assert SloImpact(0.02).expected_misses(cost(running=0, share=0.45)) == 0
    assert SloImpact(0.02).expected_misses(cost(running=0, share=0.55)) == 1
    slowed = SloImpact(0.02).expected_misses(cost(share=0.3), 1600)
    assert slowed > SloImpact(0.02).expected_misses(cost(), 1600)


def test_streams_that_seem_lost_are_not_given_up() -> None:
    lost = cost(share=0.6)  # a token every 25 ms, expected every 20
    more = SloImpact(0.02).expected_misses(lost, 1600) - SloImpact(0.02).expected_misses(lost)
    assert more > 9


def test_a_stream_more_counts_where_it_makes_steps_too_long() -> None:
    crowded = evolve(cost(), step_s=0.021, step_increase_s=0.002)
    assert SloImpact(0.02).expected_misses(crowded) == 1
    queueing = evolve(cost(queued_tokens=1600), step_s=0.014, step_increase_s=0.004)
    assert (
        SloImpact(0.02).expected_misses(queueing) > 0.1
    )  # they have less slack for what queues there
    assert SloImpact(0.02).expected_misses(evolve(queueing, step_increase_s=0.0)) == 0


def test_a_miss_costs_more_than_all_that_a_request_may_take() -> None:
    one = cost()
    assert SloImpact(0.02, 0.5).miss_penalty_s(one) == pytest.approx(4 * (0.5 + 100 * 0.02))
    assert SloImpact(0.02).miss_penalty_s(one) == pytest.approx(4 * 100 * 0.02)


# ------------------------------------------------------------------ what is chosen


def test_a_strict_tpot_leaves_a_prompt_to_the_prefill_pool_though_it_queues_there() -> None:
    queued = 60_000  # 6 s, far more than the 3.2 s that 20 streams lose by 0.16 s
    free = placed(PredictedOptions(), queued_tokens=queued)
    strict = placed(PredictedOptions(tpot_slo_s=0.0105), queued_tokens=queued)
    loose = placed(PredictedOptions(tpot_slo_s=0.5), queued_tokens=queued)
    assert free.route.mode is loose.route.mode is HandoffMode.LOCAL
    assert strict.route.mode is HandoffMode.PULL
    assert strict.options[0].expected_misses == 0
    assert strict.options[1].expected_misses > 1


def test_a_first_token_that_would_be_late_is_a_miss_like_any_other() -> None:
    # One miss for certain behind the queue, or a small part of one beside the streams.
    aims = PredictedOptions(tpot_slo_s=0.1, ttft_slo_s=1.0)
    late = placed(aims, queued_tokens=60_000)
    assert late.route.mode is HandoffMode.LOCAL
    assert late.options[0].expected_misses < 0.01
    assert late.options[1].expected_misses == 1


def test_without_a_tpot_objective_nothing_is_counted_and_no_share_is_asked_for() -> None:
    decision = placed(PredictedOptions(ttft_slo_s=0.1), share=0.9, queued_tokens=60_000)
    assert [option.expected_misses for option in decision.options] == [0, 0]
    assert decision == placed(PredictedOptions(ttft_slo_s=0.1), queued_tokens=60_000)


@given(prompts=st.lists(st.integers(1, 30_000), min_size=1, max_size=4), replicas=st.integers(1, 3))
def test_an_objective_that_is_kept_changes_nothing_in_an_idle_fleet(
    prompts: list[int], replicas: int
) -> None:
    views = [replica_view(f"d{index}") for index in range(replicas)]
    around = placement_context(*views, replica_view("p0", Role.PREFILL))
    for tokens in prompts:
        query = PlacementQuery(prompt_tokens=tokens, max_tokens=100)
        plain = PredictedPlacer().place(query, around)
        aiming = PredictedPlacer(PredictedOptions(tpot_slo_s=0.1)).place(query, around)
        assert aiming == plain


def test_computation_after_a_fetched_prefix_breaks_streams_too() -> None:
    holder, target = (
        replica_view(name, load=Load(running_requests=20), supports_prefix_fetch=True)
        for name in ("h", "t")
    )
    query = evolve(QUERY, hits=KnownHits({"h": 50}))  # 800 of 1,600 tokens are left
    around = placement_context(
        holder, target, timings=FixedTimings(timing=FAST, output_tokens=100.0)
    )
    ways = PlacementOptions(query, around, slo=Slo(), slo_impact=SloImpact(0.02))
    costs = ways.costs(["h", "t"])
    (fetch,) = ways.prefix_fetches(
        costs, {cost.view.replica_id: cost for cost in costs}, best_hit_tokens=0
    )
    assert fetch.option.decode_replica_id == "t"
    assert fetch.expected_misses == pytest.approx(SloImpact(0.02).expected_misses(costs[1], 800))
    assert fetch.expected_misses > 0


@pytest.mark.parametrize(("slowed", "other"), [("a", "b"), ("b", "a")])
def test_the_decode_replica_that_keeps_the_pace_is_chosen_at_handoff(
    slowed: str, other: str
) -> None:
    few = replica_view(slowed, load=Load(running_requests=2))
    many = replica_view(other, load=Load(running_requests=12))
    timings = FixedTimings(timing=FAST, shares={slowed: 0.6})
    around = placement_context(few, many, timings=timings)
    source = replica_view("p0", Role.PREFILL)
    aiming = PredictedPlacer(PredictedOptions(tpot_slo_s=0.02))
    assert aiming.place_decode(QUERY, source, around) == other


# --------------------------------------------------------------------------- request objectives
objectives = st.none() | st.floats(0.001, 3.0)


def pair(queued_tokens: int = 0) -> PlacementContext:
    decode = replica_view("d0", load=Load(running_requests=20))
    prefill = replica_view("p0", Role.PREFILL, Load(queued_tokens=queued_tokens))
    timings = FixedTimings(timing=FAST, output_tokens=100.0)
    return placement_context(prefill, decode, timings=timings)


def request_objectives_placed(
    slo: Slo | None, around: PlacementContext, **options: float
) -> PlacementDecision:
    placer = PredictedPlacer(PredictedOptions(**options))  # type: ignore[arg-type]
    decision = placer.place(evolve(QUERY, slo=slo), around)
    assert isinstance(decision, PlacementDecision)
    return decision


def request_objectives_cost(running: int) -> ReplicaCost:
    view = replica_view("d0", load=Load(running_requests=running))
    return replica_cost(QUERY, view, FAST, output_tokens=100.0, at_s=0.0)


@given(ttft=objectives, tpot=objectives, queued=st.integers(0, 60_000))
def test_a_requests_objectives_count_as_if_the_placer_had_been_made_with_them(
    ttft: float | None, tpot: float | None, queued: int
) -> None:
    around = pair(queued)
    made_with = PredictedPlacer(PredictedOptions(ttft_slo_s=ttft, tpot_slo_s=tpot))
    brought = Slo(ttft_s=ttft, tpot_s=tpot)
    assert request_objectives_placed(brought, around) == made_with.place(QUERY, around)


def test_a_request_that_brings_none_is_served_for_the_placers_own() -> None:
    around = pair(queued_tokens=3000)
    assert request_objectives_placed(None, around, ttft_slo_s=0.2).route.mode is HandoffMode.LOCAL
    assert (
        request_objectives_placed(Slo(ttft_s=5.0), around, ttft_slo_s=0.2).route.mode
        is HandoffMode.PULL
    )
    assert request_objectives_placed(Slo(), around, ttft_slo_s=0.2).route.mode is HandoffMode.PULL


def test_a_request_with_lax_objectives_does_not_break_streams_with_a_tpot_objective() -> None:
    around = pair(queued_tokens=2000)
    patient = Slo(tpot_s=30.0, ttft_s=60.0)
    alone = request_objectives_placed(patient, around)
    beside = request_objectives_placed(patient, around, tpot_slo_s=0.0105)
    assert alone.route.mode is HandoffMode.LOCAL  # nobody there is promised anything better
    assert beside.route.mode is HandoffMode.PULL


def test_the_pace_of_a_request_without_a_tpot_objective_breaks_nothing() -> None:
    slow = SloImpact(None, None, 0.005)
    assert slow.expected_misses(request_objectives_cost(running=0)) == 0
    assert SloImpact(0.005, None, 1.0).expected_misses(request_objectives_cost(running=0)) == 1
    assert SloImpact(1.0, None, 0.005).expected_misses(request_objectives_cost(running=0)) == 0


def test_running_streams_are_evaluated_by_their_objectives() -> None:
    stalled = SloImpact(1.0, None, 0.0105).expected_misses(
        request_objectives_cost(running=20), 1600
    )
    assert stalled > 1
    assert (
        SloImpact(0.0105, None, 1.0).expected_misses(request_objectives_cost(running=20), 1600) < 1
    )
    assert SloImpact(0.0105).expected_misses(
        request_objectives_cost(running=20), 1600
    ) == pytest.approx(stalled)


def test_the_price_of_a_miss_is_what_the_request_itself_may_take() -> None:
    assert SloImpact(0.02, 1.0, 0.5).miss_penalty_s(request_objectives_cost(1)) == pytest.approx(
        4 * (1.0 + 100 * 0.02)
    )
    assert SloImpact(None, None, 0.5).miss_penalty_s(request_objectives_cost(1)) == pytest.approx(
        4 * 100 * 0.5
    )


def test_an_impact_without_a_tpot_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="got no TPOT objective"):
        SloImpact(None, 1.0, None)


# ---------- streams that stay where they were prefilled, prompts that stay away, and mixed replicas
DEFLECTION_FAST = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.0005)
TIMINGS = FixedTimings(timing=DEFLECTION_FAST, output_tokens=100.0)
DEFLECTION_QUERY = PlacementQuery(prompt_tokens=400, max_tokens=100)
AIMS = PredictedOptions(tpot_slo_s=0.02, ttft_slo_s=2.0)
FULL = Load(running_requests=40)
"""40 streams of half a millisecond each, on top of 10: half as much again as a TPOT of 20 ms."""


def deflection_placed(
    *views: ReplicaView,
    query: PlacementQuery = DEFLECTION_QUERY,
    options: PredictedOptions = AIMS,
    timings: FixedTimings = TIMINGS,
) -> PlacementDecision:
    decision = PredictedPlacer(options).place(query, placement_context(*views, timings=timings))
    assert isinstance(decision, PlacementDecision)
    return decision


def prefill(name: str = "p0", load: Load = Load(), **changes: object) -> ReplicaView:
    return replica_view(name, Role.PREFILL, load, **changes)


# ------------------------------------------------------------------ streams that stay


def test_a_stream_stays_at_its_prefill_replica_when_decode_replicas_cannot_keep_its_pace() -> None:
    decision = deflection_placed(prefill(), replica_view("d0", load=FULL))
    assert decision.route.mode is HandoffMode.LOCAL
    assert decision.route.decode_replica_id == "p0"
    assert decision.route.reason is RouteReason.DECODE_ON_PREFILL
    best, *others = decision.options
    assert best.expected_misses <= min(other.expected_misses for other in others) - 0.5


def test_a_stream_goes_to_the_decode_replica_that_keeps_its_pace() -> None:
    route = deflection_placed(prefill(), replica_view("d0", load=Load(running_requests=5))).route
    assert route.decode_replica_id == "d0"
    assert route.reason is not RouteReason.DECODE_ON_PREFILL


def test_a_stream_stays_where_decode_will_be_full_though_it_is_not_yet() -> None:
    fleet = prefill(), replica_view("d0", load=Load(running_requests=5))
    full = evolve(DEFLECTION_QUERY, is_decode_saturated=True)
    route = deflection_placed(*fleet, query=full).route
    assert (route.decode_replica_id, route.reason) == ("p0", RouteReason.DECODE_ON_PREFILL)
    slow = replace(TIMINGS, shares={"p0": 0.8})
    assert deflection_placed(*fleet, query=full, timings=slow).route.decode_replica_id == "d0"
    off = replace(AIMS, decode_on_prefill_fraction=0.0)
    assert deflection_placed(*fleet, query=full, options=off).route.decode_replica_id == "d0"


def test_no_stream_stays_where_prompts_take_the_time() -> None:
    timings = replace(TIMINGS, shares={"p0": 0.8})
    route = deflection_placed(prefill(), replica_view("d0", load=FULL), timings=timings).route
    assert route.decode_replica_id == "d0"


def test_a_stream_does_not_stay_to_save_less_than_half_a_miss() -> None:
    query = evolve(DEFLECTION_QUERY, prompt_tokens=700)
    decode = replica_view("d0", load=Load(running_requests=17, queued_tokens=500))
    timings = replace(TIMINGS, shares={"p0": 0.8})  # a stream would be too slow there
    streaming = prefill("p1", inflight_legs=14, inflight_streams=14)
    decision = deflection_placed(prefill("p0"), streaming, decode, query=query, timings=timings)
    assert decision.route.prefill_replica_id == "p0"
    assert 0.5 < decision.options[0].expected_misses < 1
    nobody = prefill("p1")  # to be held up by its prompt
    alone = deflection_placed(prefill("p0"), nobody, decode, query=query, timings=timings)
    assert (alone.route.decode_replica_id, alone.route.reason) == (
        "p1",
        RouteReason.DECODE_ON_PREFILL,
    )


def test_a_stream_stays_where_prompts_take_less_of_the_time() -> None:
    busier, quieter = prefill("p0"), prefill("p1", Load(queued_tokens=100, queued_requests=1))
    timings = replace(TIMINGS, shares={"p0": 0.3})
    route = deflection_placed(busier, quieter, replica_view("d0", load=FULL), timings=timings).route
    assert (route.decode_replica_id, route.reason) == ("p1", RouteReason.DECODE_ON_PREFILL)


@pytest.mark.parametrize(("streams", "stays"), [(15, True), (16, False), (40, False)])
def test_streams_take_no_more_than_their_share_of_a_prefill_replica(
    streams: int, *, stays: bool
) -> None:
    source = prefill(inflight_legs=streams, inflight_streams=streams)  # of 64 places
    timings = replace(
        TIMINGS, timing=replace(DEFLECTION_FAST, per_stream_s=0.0), shares={"d0": 0.9}
    )
    decode = replica_view("d0", load=Load(running_requests=10))
    route = deflection_placed(source, decode, timings=timings).route
    assert (route.reason is RouteReason.DECODE_ON_PREFILL) is stays


def test_the_share_of_streams_on_prefill_is_an_option_and_zero_disables_it() -> None:
    full = replica_view("d0", load=FULL)
    closed = replace(AIMS, decode_on_prefill_fraction=0.0)
    assert deflection_placed(prefill(), full, options=closed).route.decode_replica_id == "d0"
    tight = replace(AIMS, decode_on_prefill_fraction=0.01)
    assert deflection_placed(prefill(), full, options=tight).route.decode_replica_id == "p0"
    taken = prefill(inflight_legs=1, inflight_streams=1)
    assert deflection_placed(taken, full, options=tight).route.decode_replica_id == "d0"


def test_streams_of_other_coordinators_count_by_the_peer_load_factor() -> None:
    source = prefill(inflight_legs=4, inflight_streams=4)
    around = placement_context(source, replica_view("d0", load=FULL), timings=TIMINGS)
    crowded = evolve(around.fleet, peer_load_factor=4.0)
    found = [
        PredictedPlacer(AIMS).place(DEFLECTION_QUERY, evolve(around, fleet=fleet))
        for fleet in (around.fleet, crowded)
    ]
    reasons = [
        decision.route.reason for decision in found if isinstance(decision, PlacementDecision)
    ]
    assert (
        reasons[0] is RouteReason.DECODE_ON_PREFILL,
        reasons[1] is RouteReason.DECODE_ON_PREFILL,
    ) == (
        True,
        False,
    )


@pytest.mark.parametrize("disaggregate", [Disaggregate.ALWAYS, Disaggregate.NEVER])
def test_nothing_stays_unless_disaggregation_is_auto(disaggregate: Disaggregate) -> None:
    options = replace(AIMS, disaggregate=disaggregate)
    route = deflection_placed(prefill(), replica_view("d0", load=FULL), options=options).route
    assert route.decode_replica_id == "d0"


@given(st.integers(0, 60), st.integers(1, 3000), st.integers(2, 500))
def test_without_a_pace_to_keep_no_stream_stays(running: int, prompt: int, most: int) -> None:
    query = PlacementQuery(prompt_tokens=prompt, max_tokens=most)
    decode = replica_view("d0", load=Load(running_requests=running))
    route = deflection_placed(prefill(), decode, query=query, options=PredictedOptions()).route
    assert route.decode_replica_id == "d0"


def test_a_request_that_brings_a_pace_may_stay_though_the_placer_has_none() -> None:
    query = evolve(DEFLECTION_QUERY, slo=Slo(ttft_s=2.0, tpot_s=0.02))
    views = prefill(), replica_view("d0", load=FULL)
    assert deflection_placed(*views, query=query, options=PredictedOptions()).route.reason is (
        RouteReason.DECODE_ON_PREFILL
    )


def test_one_token_is_not_worth_a_handoff() -> None:
    one = evolve(DEFLECTION_QUERY, prompt_tokens=1600, max_tokens=1)
    two = evolve(one, max_tokens=2)
    views = prefill(), replica_view("d0", load=Load(running_requests=20))
    assert (
        deflection_placed(*views, query=one, options=PredictedOptions()).route.decode_replica_id
        == "p0"
    )
    assert (
        deflection_placed(*views, query=two, options=PredictedOptions()).route.decode_replica_id
        == "d0"
    )


def test_an_unsplittable_request_does_not_go_to_the_prefill_pool() -> None:
    query = evolve(DEFLECTION_QUERY, avoid=frozenset({"p0"}))
    assert deflection_placed(prefill(), replica_view("d0", load=FULL), query=query).route.mode is (
        HandoffMode.LOCAL
    )
    assert deflection_placed(
        prefill(), replica_view("d0", load=FULL), query=query
    ).route.reason is (RouteReason.NO_PREFILL_REPLICA)


# ------------------------------------------------------------------ streams are counted


def test_streams_of_a_prefill_replica_are_those_that_decode_there() -> None:
    load = Load(running_requests=7, kv_used_fraction=0.5)
    view = prefill(load=load, inflight_legs=7, inflight_streams=3)
    cost = replica_cost(DEFLECTION_QUERY, view, DEFLECTION_FAST, output_tokens=100.0, at_s=0.0)
    assert cost.running_streams == 3
    assert cost.step_s == pytest.approx(DEFLECTION_FAST.step_s(running=4))
    pure = prefill(load=load, inflight_legs=7)
    assert (
        replica_cost(
            DEFLECTION_QUERY, pure, DEFLECTION_FAST, output_tokens=100.0, at_s=0.0
        ).running_streams
        == 0
    )


def test_a_prompt_counts_the_streams_that_it_breaks_on_a_flipped_replica() -> None:
    query = evolve(DEFLECTION_QUERY, prompt_tokens=1600)
    flipped = prefill("p0", inflight_legs=12, inflight_streams=12)
    around = placement_context(flipped, prefill("p1"), replica_view("d0"), timings=TIMINGS)
    promises = SloImpact(0.02)
    ways = PlacementOptions(query, around, slo=Slo(), slo_impact=promises)
    streaming, free = ways.costs(["p0", "p1"])
    target = ways.costs(["d0"])
    (over_streams,) = ways.disaggregated([streaming], target)
    (over_nobody,) = ways.disaggregated([free], target)
    # Each of the twelve has gained 4 ms a token when a prompt of 160 ms comes.
    wanted = 12 * broken_fraction(
        0.16, slack_s=0.02 - DEFLECTION_FAST.step_s(running=12), mean_output_tokens=100.0
    )
    assert over_streams.expected_misses - over_nobody.expected_misses == pytest.approx(
        wanted, rel=0.01
    )
    dearer_s = over_streams.cost_s - over_nobody.cost_s
    assert dearer_s > wanted * promises.miss_penalty_s(target[0])


# ------------------------------------------------------------------ prompts that stay away


def short_or_not(options: PredictedOptions, share: float) -> RouteReason:
    views = prefill(), replica_view("d0", load=Load(running_requests=4))
    query = evolve(DEFLECTION_QUERY, prompt_tokens=20)
    timings = replace(TIMINGS, shares={"d0": share})
    return deflection_placed(*views, query=query, options=options, timings=timings).route.reason


def test_prompts_take_no_more_than_their_share_of_a_decode_replica() -> None:
    bounded = replace(AIMS, prefill_on_decode_fraction=0.1)
    assert short_or_not(bounded, 0.1) is RouteReason.LOCAL_FASTER
    assert short_or_not(bounded, 0.11) is RouteReason.DISAGGREGATED
    assert short_or_not(AIMS, 0.11) is RouteReason.LOCAL_FASTER


def test_prompts_go_to_a_busy_decode_replica_when_no_other_can_take_them() -> None:
    bounded = replace(AIMS, prefill_on_decode_fraction=0.1)
    timings = replace(TIMINGS, shares={"d0": 0.9})
    route = deflection_placed(replica_view("d0"), options=bounded, timings=timings).route
    assert route.decode_replica_id == "d0"


@pytest.mark.parametrize("name", ["decode_on_prefill_fraction", "prefill_on_decode_fraction"])
@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_shares_must_be_shares(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=name):
        PredictedOptions(**{name: wrong})  # type: ignore[arg-type]


# ------------------------------------------------------------------ replicas that do both


def beside(*views: ReplicaView, prompt_tokens: int = 1600) -> PlacementDecision:
    query = evolve(DEFLECTION_QUERY, prompt_tokens=prompt_tokens)
    return deflection_placed(*views, query=query, options=PredictedOptions())


BUSY = Load(running_requests=30)


def test_a_busy_mixed_replica_has_its_prompts_computed_by_the_prefill_pool() -> None:
    route = beside(prefill(), replica_view("m0", Role.MIXED, BUSY)).route
    assert (route.prefill_replica_id, route.decode_replica_id) == ("p0", "m0")


def test_mixed_replicas_alone_keep_what_they_prefill() -> None:
    views = [replica_view(replica_id, Role.MIXED, BUSY) for replica_id in ("m0", "m1")]
    route = beside(*views).route
    assert route.mode is HandoffMode.LOCAL
    assert route.reason is RouteReason.MIXED_POOL


def beside_a_faster_one(*avoid: str) -> Route:
    """A mixed replica is idle, a decode replica is busy and decodes much faster."""
    views = replica_view("m0", Role.MIXED, Load(running_requests=1)), replica_view("d0", load=BUSY)
    timings = replace(TIMINGS, by_pool={"mixed": replace(DEFLECTION_FAST, per_step_s=0.05)})
    query = evolve(DEFLECTION_QUERY, prompt_tokens=1600, avoid=frozenset(avoid))
    return deflection_placed(*views, query=query, options=PredictedOptions(), timings=timings).route


def test_a_mixed_replica_prefills_for_a_decode_replica_that_decodes_much_faster() -> None:
    route = beside_a_faster_one()
    assert (route.prefill_replica_id, route.decode_replica_id) == ("m0", "d0")
    assert route.reason is RouteReason.DISAGGREGATED


def test_a_mixed_replica_on_which_a_request_has_failed_does_not_prefill_it() -> None:
    route = beside_a_faster_one("m0")
    assert route.mode is HandoffMode.LOCAL
    assert route.decode_replica_id == "d0"


def test_a_request_that_has_failed_everywhere_is_not_split_again() -> None:
    assert beside_a_faster_one("m0", "d0").reason is RouteReason.NO_PREFILL_REPLICA


def test_where_all_do_both_none_prefills_for_another_though_the_prefill_pool_has_failed() -> None:
    views = prefill(), *(replica_view(replica_id, Role.MIXED, BUSY) for replica_id in ("m0", "m1"))
    query = evolve(DEFLECTION_QUERY, prompt_tokens=1600, avoid=frozenset({"p0"}))
    decision = deflection_placed(*views, query=query, options=PredictedOptions())
    assert decision.route.reason is RouteReason.NO_PREFILL_REPLICA


def context_of(*views: ReplicaView) -> PlacementContext:
    return placement_context(*views, timings=TIMINGS)


def test_a_mixed_replica_does_not_hand_off_to_itself() -> None:
    source = replica_view("m0", Role.MIXED)
    placer = PredictedPlacer()
    assert placer.place_decode(DEFLECTION_QUERY, source, context_of(source)) is None
    assert (
        placer.place_decode(DEFLECTION_QUERY, source, context_of(source, replica_view("d0")))
        == "d0"
    )
