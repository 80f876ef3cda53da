"""Placement of requests that need a LoRA adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.fleet import AdapterStatus, Load, ReplicaView, Role
from baton.domain.handoff import HandoffMode, PlacementDecision
from baton.domain.value import evolve
from baton.policy.placement.port import PlacementContext, PlacementQuery
from baton.policy.placement.predicted import PredictedPlacer
from tests.fakes.timings import placement_context, replica_view

HALF_A_SECOND = AdapterStatus(loads=4, loading_s=2.0)
QUERY = PlacementQuery(prompt_tokens=100, max_tokens=100, adapter="ada")


def having(
    name: str,
    *adapters: str,
    role: Role = Role.MIXED,
    queued_tokens: int = 0,
    running_requests: int = 0,
) -> ReplicaView:
    """A replica with room for two adapters, that loads one in half a second."""
    held = HALF_A_SECOND._replace(loaded=adapters)
    load = Load(adapters=held, queued_tokens=queued_tokens, running_requests=running_requests)
    view = replica_view(name, role, load)
    return evolve(view, facts=replace(view.facts, adapter_slots=2))


def placed(around: PlacementContext, query: PlacementQuery = QUERY) -> PlacementDecision:
    decision = PredictedPlacer().place(query, around)
    assert isinstance(decision, PlacementDecision)
    return decision


def where(*views: ReplicaView, query: PlacementQuery = QUERY) -> str:
    return placed(placement_context(*views), query).route.decode_replica_id


def test_a_request_goes_where_its_adapter_is() -> None:
    assert where(having("a"), having("b", "ada"), having("c")) == "b"


def test_an_adapter_is_worth_the_seconds_to_load_it_and_no_more() -> None:
    # A prompt token takes 0.1 ms here: the queue takes 0.4 s, then 0.6 s.
    for queued, winner in ((4000, "held"), (6000, "free")):
        assert where(having("held", "ada", queued_tokens=queued), having("free")) == winner


def test_an_adapter_that_is_on_its_way_somewhere_is_not_loaded_a_second_time() -> None:
    sent = evolve(having("b"), unreported_adapters=frozenset({"ada"}), unreported_legs=1)
    assert where(having("a"), sent) == "b"


def test_an_adapter_is_loaded_where_none_has_to_go_for_it() -> None:
    assert where(having("a", "x", "y"), having("b", "x")) == "b"


def test_a_request_for_the_model_itself_does_not_mind_adapters() -> None:
    busy = having("a", "ada", queued_tokens=100)
    assert where(busy, having("b"), query=evolve(QUERY, adapter=None)) == "b"


def test_loading_is_predicted_beside_the_wait_and_is_no_part_of_it() -> None:
    (option,) = placed(placement_context(having("a"))).options
    (held,) = placed(placement_context(having("a", "ada"))).options
    assert (option.adapter_load_s, held.adapter_load_s) == (0.5, 0.0)
    assert option.queue_s == held.queue_s
    assert option.ttft_s - held.ttft_s == pytest.approx(0.5)


def test_a_second_copy_goes_before_the_last_one_of_another_adapter() -> None:
    last = having("a", "w", "x")
    assert where(last, having("b", "x", "y"), having("c", "y", "x")) == "b"


def test_an_adapter_that_a_leg_needs_is_not_taken_to_go() -> None:
    view = evolve(having("a", "x", "y"), inflight_adapters=frozenset({"x"}))
    assert view.adapter_to_evict == "y"
    coming = evolve(view, unreported_adapters=frozenset({"z"}), inflight_adapters=frozenset("xz"))
    assert coming.expected_adapters == ("x", "z")
    assert [coming.has_adapter(name) for name in "xyz"] == [True, False, True]


def test_a_leg_waits_for_the_streams_of_other_adapters_where_too_many_run() -> None:
    around = placement_context(_running("a", "x"), _running("b", "y"))
    (option, _) = placed(around).options
    assert option.queue_s > 0.05
    assert (
        placed(placement_context(_running("a", "ada"), _running("b", "y"))).options[0].queue_s == 0
    )


def test_where_an_adapter_is_being_loaded_it_is_waited_for() -> None:
    comes = evolve(having("b"), unreported_adapters=frozenset({"ada"}), unreported_tokens=6000)
    assert where(having("a"), comes) == "b"
    late = evolve(comes, unreported_tokens=20_000)
    assert where(having("a"), late) == "a"


def _running(name: str, adapter: str) -> ReplicaView:
    """A replica that runs one adapter at a time, and has legs with this one."""
    view = evolve(having(name, adapter), inflight_adapters=frozenset({adapter}))
    return evolve(view, facts=replace(view.facts, adapters_per_batch=1))


def test_streams_that_would_stand_still_meanwhile_are_counted() -> None:
    (option,) = placed(placement_context(having("a", running_requests=6))).options
    (held,) = placed(placement_context(having("a", "ada", running_requests=6))).options
    assert option.interference_s - held.interference_s == pytest.approx(6 * 0.5)


def test_both_replicas_of_a_handoff_are_chosen_by_their_adapters() -> None:
    views = [
        having("p0", role=Role.PREFILL),
        having("p1", "ada", role=Role.PREFILL),
        having("d0", role=Role.DECODE, running_requests=20),
        having("d1", "ada", role=Role.DECODE, running_requests=20),
    ]
    around = placement_context(*views)
    query = evolve(QUERY, prompt_tokens=6000)
    route = placed(around, query).route
    assert (route.mode, route.prefill_replica_id, route.decode_replica_id) == (
        HandoffMode.PULL,
        "p1",
        "d1",
    )
    assert PredictedPlacer().place_decode(query, views[1], around) == "d1"


def test_in_a_large_pool_those_that_have_the_adapter_are_looked_at() -> None:
    views = [having(f"r{n:03}") for n in range(200)]
    views[137] = having("r137", "ada")
    assert where(*views) == "r137"
