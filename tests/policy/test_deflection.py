"""Streams that stay where they were prefilled, prompts that stay away, and mixed replicas."""

from __future__ import annotations

from dataclasses import replace

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
from baton.policy.placement.replica_cost import replica_cost
from baton.policy.placement.slo_impact import SloImpact, broken_fraction
from tests.fakes.timings import FixedTimings, LinearTiming, placement_context, replica_view

FAST = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.0005)
TIMINGS = FixedTimings(timing=FAST, output_tokens=100.0)
QUERY = PlacementQuery(prompt_tokens=400, max_tokens=100)
AIMS = PredictedOptions(tpot_slo_s=0.02, ttft_slo_s=2.0)
FULL = Load(running_requests=40)
"""40 streams of half a millisecond each, on top of 10: half as much again as a TPOT of 20 ms."""


def placed(
    *views: ReplicaView,
    query: PlacementQuery = QUERY,
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
    decision = placed(prefill(), replica_view("d0", load=FULL))
    assert decision.route.mode is HandoffMode.LOCAL
    assert decision.route.decode_replica_id == "p0"
    assert decision.route.reason is RouteReason.DECODE_ON_PREFILL
    best, *others = decision.options
    assert best.expected_misses <= min(other.expected_misses for other in others) - 0.5


def test_a_stream_goes_to_the_decode_replica_that_keeps_its_pace() -> None:
    route = placed(prefill(), replica_view("d0", load=Load(running_requests=5))).route
    assert route.decode_replica_id == "d0"
    assert route.reason is not RouteReason.DECODE_ON_PREFILL


def test_a_stream_stays_where_decode_will_be_full_though_it_is_not_yet() -> None:
    fleet = prefill(), replica_view("d0", load=Load(running_requests=5))
    full = evolve(QUERY, is_decode_saturated=True)
    route = placed(*fleet, query=full).route
    assert (route.decode_replica_id, route.reason) == ("p0", RouteReason.DECODE_ON_PREFILL)
    slow = replace(TIMINGS, shares={"p0": 0.8})
    assert placed(*fleet, query=full, timings=slow).route.decode_replica_id == "d0"
    off = replace(AIMS, decode_on_prefill_fraction=0.0)
    assert placed(*fleet, query=full, options=off).route.decode_replica_id == "d0"


def test_no_stream_stays_where_prompts_take_the_time() -> None:
    timings = replace(TIMINGS, shares={"p0": 0.8})
    route = placed(prefill(), replica_view("d0", load=FULL), timings=timings).route
    assert route.decode_replica_id == "d0"


def test_a_stream_does_not_stay_to_save_less_than_half_a_miss() -> None:
    query = evolve(QUERY, prompt_tokens=700)
    decode = replica_view("d0", load=Load(running_requests=17, queued_tokens=500))
    timings = replace(TIMINGS, shares={"p0": 0.8})  # a stream would be too slow there
    streaming = prefill("p1", inflight_legs=14, inflight_streams=14)
    decision = placed(prefill("p0"), streaming, decode, query=query, timings=timings)
    assert decision.route.prefill_replica_id == "p0"
    assert 0.5 < decision.options[0].expected_misses < 1
    nobody = prefill("p1")  # to be held up by its prompt
    alone = placed(prefill("p0"), nobody, decode, query=query, timings=timings)
    assert (alone.route.decode_replica_id, alone.route.reason) == (
        "p1",
        RouteReason.DECODE_ON_PREFILL,
    )


def test_a_stream_stays_where_prompts_take_less_of_the_time() -> None:
    busier, quieter = prefill("p0"), prefill("p1", Load(queued_tokens=100, queued_requests=1))
    timings = replace(TIMINGS, shares={"p0": 0.3})
    route = placed(busier, quieter, replica_view("d0", load=FULL), timings=timings).route
    assert (route.decode_replica_id, route.reason) == ("p1", RouteReason.DECODE_ON_PREFILL)


@pytest.mark.parametrize(("streams", "stays"), [(15, True), (16, False), (40, False)])
def test_streams_take_no_more_than_their_share_of_a_prefill_replica(
    streams: int, *, stays: bool
) -> None:
    source = prefill(inflight_legs=streams, inflight_streams=streams)  # of 64 places
    timings = replace(TIMINGS, timing=replace(FAST, per_stream_s=0.0), shares={"d0": 0.9})
    decode = replica_view("d0", load=Load(running_requests=10))
    route = placed(source, decode, timings=timings).route
    assert (route.reason is RouteReason.DECODE_ON_PREFILL) is stays


def test_what_streams_may_take_is_an_option_and_none_is_nothing() -> None:
    full = replica_view("d0", load=FULL)
    closed = replace(AIMS, decode_on_prefill_fraction=0.0)
    assert placed(prefill(), full, options=closed).route.decode_replica_id == "d0"
    tight = replace(AIMS, decode_on_prefill_fraction=0.01)
    assert placed(prefill(), full, options=tight).route.decode_replica_id == "p0"
    taken = prefill(inflight_legs=1, inflight_streams=1)
    assert placed(taken, full, options=tight).route.decode_replica_id == "d0"


def test_others_have_as_many_streams_there_as_the_crowd_says() -> None:
    source = prefill(inflight_legs=4, inflight_streams=4)
    around = placement_context(source, replica_view("d0", load=FULL), timings=TIMINGS)
    crowded = evolve(around.fleet, peer_load_factor=4.0)
    found = [
        PredictedPlacer(AIMS).place(QUERY, evolve(around, fleet=fleet))
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
    route = placed(prefill(), replica_view("d0", load=FULL), options=options).route
    assert route.decode_replica_id == "d0"


@given(st.integers(0, 60), st.integers(1, 3000), st.integers(2, 500))
def test_without_a_pace_to_keep_no_stream_stays(running: int, prompt: int, most: int) -> None:
    query = PlacementQuery(prompt_tokens=prompt, max_tokens=most)
    decode = replica_view("d0", load=Load(running_requests=running))
    route = placed(prefill(), decode, query=query, options=PredictedOptions()).route
    assert route.decode_replica_id == "d0"


def test_a_request_that_brings_a_pace_may_stay_though_the_placer_has_none() -> None:
    query = evolve(QUERY, slo=Slo(ttft_s=2.0, tpot_s=0.02))
    views = prefill(), replica_view("d0", load=FULL)
    assert placed(*views, query=query, options=PredictedOptions()).route.reason is (
        RouteReason.DECODE_ON_PREFILL
    )


def test_one_token_is_not_worth_a_handoff() -> None:
    one = evolve(QUERY, prompt_tokens=1600, max_tokens=1)
    two = evolve(one, max_tokens=2)
    views = prefill(), replica_view("d0", load=Load(running_requests=20))
    assert placed(*views, query=one, options=PredictedOptions()).route.decode_replica_id == "p0"
    assert placed(*views, query=two, options=PredictedOptions()).route.decode_replica_id == "d0"


def test_what_cannot_be_split_does_not_go_to_the_prefill_pool() -> None:
    query = evolve(QUERY, avoid=frozenset({"p0"}))
    assert placed(prefill(), replica_view("d0", load=FULL), query=query).route.mode is (
        HandoffMode.LOCAL
    )
    assert placed(prefill(), replica_view("d0", load=FULL), query=query).route.reason is (
        RouteReason.NO_PREFILL_REPLICA
    )


# ------------------------------------------------------------------ streams are counted


def test_streams_of_a_prefill_replica_are_those_that_decode_there() -> None:
    load = Load(running_requests=7, kv_used_fraction=0.5)
    view = prefill(load=load, inflight_legs=7, inflight_streams=3)
    cost = replica_cost(QUERY, view, FAST, output_tokens=100.0, at_s=0.0)
    assert cost.running_streams == 3
    assert cost.step_s == pytest.approx(FAST.step_s(running=4))
    pure = prefill(load=load, inflight_legs=7)
    assert replica_cost(QUERY, pure, FAST, output_tokens=100.0, at_s=0.0).running_streams == 0


def test_a_prompt_counts_the_streams_that_it_breaks_on_a_flipped_replica() -> None:
    query = evolve(QUERY, prompt_tokens=1600)
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
        0.16, slack_s=0.02 - FAST.step_s(running=12), mean_output_tokens=100.0
    )
    assert over_streams.expected_misses - over_nobody.expected_misses == pytest.approx(
        wanted, rel=0.01
    )
    dearer_s = over_streams.cost_s - over_nobody.cost_s
    assert dearer_s > wanted * promises.miss_penalty_s(target[0])


# ------------------------------------------------------------------ prompts that stay away


def short_or_not(options: PredictedOptions, share: float) -> RouteReason:
    views = prefill(), replica_view("d0", load=Load(running_requests=4))
    query = evolve(QUERY, prompt_tokens=20)
    timings = replace(TIMINGS, shares={"d0": share})
    return placed(*views, query=query, options=options, timings=timings).route.reason


def test_prompts_take_no_more_than_their_share_of_a_decode_replica() -> None:
    bounded = replace(AIMS, prefill_on_decode_fraction=0.1)
    assert short_or_not(bounded, 0.1) is RouteReason.LOCAL_FASTER
    assert short_or_not(bounded, 0.11) is RouteReason.DISAGGREGATED
    assert short_or_not(AIMS, 0.11) is RouteReason.LOCAL_FASTER


def test_prompts_go_to_a_busy_decode_replica_all_the_same_when_nobody_else_can_take_them() -> None:
    bounded = replace(AIMS, prefill_on_decode_fraction=0.1)
    timings = replace(TIMINGS, shares={"d0": 0.9})
    route = placed(replica_view("d0"), options=bounded, timings=timings).route
    assert route.decode_replica_id == "d0"


@pytest.mark.parametrize("name", ["decode_on_prefill_fraction", "prefill_on_decode_fraction"])
@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_shares_must_be_shares(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=name):
        PredictedOptions(**{name: wrong})  # type: ignore[arg-type]


# ------------------------------------------------------------------ replicas that do both


def beside(*views: ReplicaView, prompt_tokens: int = 1600) -> PlacementDecision:
    query = evolve(QUERY, prompt_tokens=prompt_tokens)
    return placed(*views, query=query, options=PredictedOptions())


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
    timings = replace(TIMINGS, by_pool={"mixed": replace(FAST, per_step_s=0.05)})
    query = evolve(QUERY, prompt_tokens=1600, avoid=frozenset(avoid))
    return placed(*views, query=query, options=PredictedOptions(), timings=timings).route


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
    query = evolve(QUERY, prompt_tokens=1600, avoid=frozenset({"p0"}))
    decision = placed(*views, query=query, options=PredictedOptions())
    assert decision.route.reason is RouteReason.NO_PREFILL_REPLICA


def around_of(*views: ReplicaView) -> PlacementContext:
    return placement_context(*views, timings=TIMINGS)


def test_a_mixed_replica_does_not_hand_off_to_itself() -> None:
    source = replica_view("m0", Role.MIXED)
    placer = PredictedPlacer()
    assert placer.place_decode(QUERY, source, around_of(source)) is None
    assert placer.place_decode(QUERY, source, around_of(source, replica_view("d0"))) == "d0"
