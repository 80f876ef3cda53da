"""Placement: who runs a request's phases."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import FleetView, Load, ReplicaView, Role
from baton.domain.handoff import HandoffMode, Route, RouteReason
from baton.domain.request import LocalOnly
from baton.domain.value import evolve
from baton.policy.placement import (
    Disaggregate,
    NoRoute,
    NoRouteReason,
    PlacementQuery,
    Surroundings,
    place_release,
)
from tests.fakes.facts import replica_facts
from tests.fakes.placers import placer
from tests.fakes.timings import FixedLinks, FixedTimings

QUERY = PlacementQuery(prompt_tokens=100)


def replica(  # noqa: PLR0913 - each is one aspect that some test varies
    replica_id: str,
    role: Role,
    *,
    layout: str = "same",
    legs: int = 0,
    tokens: int = 0,
    draining: bool = False,
    load: Load | None = None,
) -> ReplicaView:
    return ReplicaView(
        facts=replica_facts(replica_id, role, layout=layout),
        load=load or Load(),
        load_at_s=0.0,
        draining=draining,
        inflight_legs=legs,
        inflight_tokens=tokens,
    )


def fleet(*views: ReplicaView) -> FleetView:
    return FleetView(at_s=0.0, replicas={view.replica_id: view for view in views})


def around(view: FleetView) -> Surroundings:
    return Surroundings(fleet=view, timings=FixedTimings(), links=FixedLinks(), due_at_s={})


def place(query: PlacementQuery, view: FleetView, *, disaggregate: Disaggregate) -> Route | NoRoute:
    decision = placer(disaggregate).place(query, around(view))
    return decision if isinstance(decision, NoRoute) else decision.route


def place_decode(
    source: ReplicaView, view: FleetView, *, avoid: frozenset[str] = frozenset()
) -> str | None:
    query = evolve(QUERY, avoid=avoid)
    return placer().place_decode(query, source, around(view))


def route(query: PlacementQuery, view: FleetView) -> Route:
    placed = place(query, view, disaggregate=Disaggregate.ALWAYS)
    assert isinstance(placed, Route)
    return placed


replicas = st.builds(
    replica,
    st.sampled_from("abcdefgh"),
    st.sampled_from(Role),
    layout=st.sampled_from(["x", "y"]),
    legs=st.integers(0, 3),
    tokens=st.integers(0, 300),
    draining=st.booleans(),
    load=st.builds(Load, running_requests=st.integers(0, 3), queued_tokens=st.integers(0, 300)),
)
fleets = st.lists(replicas, max_size=8, unique_by=lambda view: view.replica_id)
queries = st.builds(
    PlacementQuery,
    prompt_tokens=st.integers(1, 1000),
    local_only=st.sampled_from([None, LocalOnly.FAN_OUT]),
    avoid=st.frozensets(st.sampled_from("abcdefgh"), max_size=4),
)
preferences = st.sampled_from(Disaggregate)


def test_prefill_and_decode_go_to_their_pools() -> None:
    placed = route(QUERY, fleet(replica("p", Role.PREFILL), replica("d", Role.DECODE)))
    assert placed == Route(
        mode=HandoffMode.PULL,
        prefill_replica_id="p",
        decode_replica_id="d",
        reason=RouteReason.DISAGGREGATED,
    )


def test_an_empty_fleet_and_a_draining_fleet_are_told_apart() -> None:
    nobody = place(QUERY, fleet(), disaggregate=Disaggregate.ALWAYS)
    leaving = fleet(replica("d", Role.DECODE, draining=True))
    assert nobody == NoRoute(reason=NoRouteReason.NO_REPLICA)
    assert place(QUERY, leaving, disaggregate=Disaggregate.ALWAYS) == NoRoute(
        reason=NoRouteReason.ALL_DRAINING
    )


def test_a_mixed_replica_runs_both_phases() -> None:
    placed = route(QUERY, fleet(replica("p", Role.PREFILL), replica("m", Role.MIXED)))
    assert (placed.mode, placed.reason) == (HandoffMode.LOCAL, RouteReason.MIXED_POOL)


@pytest.mark.parametrize("load", [Load(running_requests=2), Load(queued_requests=2)])
def test_the_reported_load_of_others_counts(load: Load) -> None:
    view = fleet(replica("a", Role.DECODE, load=load), replica("b", Role.DECODE, legs=1))
    assert route(QUERY, view).decode_replica_id == "b"


def test_a_replica_that_failed_the_request_is_tried_last_for_decode() -> None:
    view = fleet(replica("a", Role.DECODE), replica("b", Role.DECODE, legs=3))
    avoiding_a = evolve(QUERY, avoid=frozenset("a"))
    assert route(avoiding_a, view).decode_replica_id == "b"
    assert route(evolve(QUERY, avoid=frozenset("ab")), view).decode_replica_id == "a"


def test_a_replica_that_failed_the_request_never_prefills_it_again() -> None:
    view = fleet(replica("p", Role.PREFILL), replica("d", Role.DECODE))
    placed = route(evolve(QUERY, avoid=frozenset("p")), view)
    assert (placed.mode, placed.reason) == (HandoffMode.LOCAL, RouteReason.NO_PREFILL_REPLICA)


@given(fleets, queries, preferences)
def test_a_route_names_only_replicas_that_take_work(
    views: list[ReplicaView], query: PlacementQuery, preference: Disaggregate
) -> None:
    usable = {view.replica_id for view in views if not view.draining}
    placed = place(query, fleet(*views), disaggregate=preference)
    if isinstance(placed, NoRoute):
        assert not usable
    else:
        assert placed.decode_replica_id in usable
        assert placed.prefill_replica_id is None or placed.prefill_replica_id in usable
        assert placed.prefill_replica_id != placed.decode_replica_id


@given(fleets, queries, preferences, st.randoms(use_true_random=False))
def test_the_order_of_replicas_does_not_matter(
    views: list[ReplicaView], query: PlacementQuery, preference: Disaggregate, random: Random
) -> None:
    shuffled = list(views)
    random.shuffle(shuffled)
    assert place(query, fleet(*views), disaggregate=preference) == place(
        query, fleet(*shuffled), disaggregate=preference
    )


@given(fleets, queries)
def test_what_is_handed_off_fits_both_replicas(
    views: list[ReplicaView], query: PlacementQuery
) -> None:
    view = fleet(*views)
    placed = place(query, view, disaggregate=Disaggregate.ALWAYS)
    if isinstance(placed, Route) and placed.prefill_replica_id is not None:
        source = view.replicas[placed.prefill_replica_id].facts
        target = view.replicas[placed.decode_replica_id].facts
        assert source.layout == target.layout
        assert source.role is Role.PREFILL
        assert query.local_only is None


@given(fleets)
def test_more_load_never_attracts_a_request(views: list[ReplicaView]) -> None:
    before = place(QUERY, fleet(*views), disaggregate=Disaggregate.NEVER)
    if isinstance(before, Route):
        other = [
            evolve(view, inflight_legs=view.inflight_legs + 9, inflight_tokens=999)
            if view.replica_id != before.decode_replica_id
            else view
            for view in views
        ]
        assert place(QUERY, fleet(*other), disaggregate=Disaggregate.NEVER) == before


@given(fleets)
def test_blocks_are_decoded_and_released_by_somebody_else_of_the_same_layout(
    views: list[ReplicaView],
) -> None:
    view = fleet(*views)
    for source in views:
        for chosen in (place_decode(source, view), place_release(source, view)):
            if chosen is not None:
                assert chosen != source.replica_id
                assert view.replicas[chosen].facts.layout == source.facts.layout
