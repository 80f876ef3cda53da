"""Handoffs in pools too large to look at each, where not everyone can hand over to everyone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.fleet import AdapterStatus, FleetView, Load, ReplicaView, Role
from baton.domain.handoff import HandoffMode, PlacementDecision, RouteReason
from baton.domain.value import evolve
from baton.policy.placement.port import Disaggregate, PlacementContext, PlacementQuery
from baton.policy.placement.predicted import (
    PredictedOptions,
    PredictedPlacer,
    Shortlist,
    can_receive,
    can_send,
)
from tests.fakes.timings import FixedLinks, placement_context, replica_view

ALWAYS = PredictedOptions(disaggregate=Disaggregate.ALWAYS)
SEEDS = range(40)


def pool(prefix: str, count: int, role: Role, *, layout: str = "same") -> list[ReplicaView]:
    return [replica_view(f"{prefix}{n:02}", role, layout=layout) for n in range(count)]


def query(**changes: frozenset[str]) -> PlacementQuery:
    return PlacementQuery(prompt_tokens=2000, max_tokens=100, **changes)  # type: ignore[arg-type]


def cut_off(sources: list[ReplicaView], targets: list[ReplicaView]) -> FixedLinks:
    """No source can hand anything to any of the targets."""
    return FixedLinks(
        blocked_pairs=frozenset((s.replica_id, t.replica_id) for s in sources for t in targets)
    )


def placed(
    around: PlacementContext, seed: int, item: PlacementQuery | None = None
) -> PlacementDecision:
    decision = PredictedPlacer(ALWAYS, seed=seed).place(item or query(), around)
    assert isinstance(decision, PlacementDecision)
    return decision


def mostly_of_another_layout() -> PlacementContext:
    return placement_context(
        *pool("p", 1, Role.PREFILL, layout="old"),
        *pool("old", 2, Role.DECODE, layout="old"),
        *pool("new", 30, Role.DECODE, layout="new"),
    )


def mostly_cut_off() -> PlacementContext:
    prefill, well = pool("p", 1, Role.PREFILL), pool("old", 2, Role.DECODE)
    cut = pool("new", 30, Role.DECODE)
    return placement_context(*prefill, *well, *cut, links=cut_off(prefill, cut))


@pytest.mark.parametrize("around", [mostly_of_another_layout(), mostly_cut_off()])
def test_a_target_that_can_receive_is_found_among_many_that_cannot(
    around: PlacementContext,
) -> None:
    source = around.fleet.replicas["p00"]
    for seed in SEEDS:
        target = PredictedPlacer(seed=seed).place_decode(query(), source, around)
        assert target in {"old00", "old01"}
        assert placed(around, seed).route.decode_replica_id in {"old00", "old01"}


@pytest.mark.parametrize(
    "around",
    [
        placement_context(
            *pool("new", 30, Role.PREFILL, layout="new"),
            *pool("old", 2, Role.PREFILL, layout="old"),
            *pool("d", 1, Role.DECODE, layout="old"),
        ),
        placement_context(
            *pool("new", 30, Role.PREFILL),
            *pool("old", 2, Role.PREFILL),
            *pool("d", 1, Role.DECODE),
            links=cut_off(pool("new", 30, Role.PREFILL), pool("d", 1, Role.DECODE)),
        ),
    ],
)
def test_a_source_that_can_send_is_found_among_many_that_cannot(around: PlacementContext) -> None:
    for seed in SEEDS:
        route = placed(around, seed).route
        assert (route.mode, route.decode_replica_id) == (HandoffMode.PULL, "d00")
        assert route.prefill_replica_id in {"old00", "old01"}


def test_a_replica_that_failed_the_request_is_not_found_by_a_longer_search() -> None:
    around = mostly_of_another_layout()
    source, failed = around.fleet.replicas["p00"], frozenset({"old00"})
    for seed in SEEDS:
        item = query(avoid=failed)
        assert PredictedPlacer(seed=seed).place_decode(item, source, around) == "old01"
        assert placed(around, seed, item).route.decode_replica_id == "old01"


def test_where_no_pair_exists_that_is_said() -> None:
    prefill, decode = pool("p", 20, Role.PREFILL), pool("d", 20, Role.DECODE)
    others = pool("e", 20, Role.DECODE, layout="other")
    apart = placement_context(*prefill, *others)
    assert placed(apart, 1).route.reason is RouteReason.INCOMPATIBLE
    assert PredictedPlacer().place_decode(query(), prefill[0], apart) is None
    severed = placement_context(*prefill, *decode, links=cut_off(prefill, decode))
    assert placed(severed, 1).route.reason is RouteReason.NO_LINK
    assert PredictedPlacer().place_decode(query(), prefill[0], severed) is None


class Untouched(FixedLinks):
    """Links that nobody asks of but for what a handoff would take."""

    def transfer_s(self, source_id: str, target_id: str, moved_bytes: int) -> float | None:
        assert moved_bytes, f"{source_id} and {target_id} are looked up, and the first would do"
        return super().transfer_s(source_id, target_id, moved_bytes)


def test_where_all_are_alike_no_partner_is_looked_up() -> None:
    prefill, decode = pool("p", 20, Role.PREFILL), pool("d", 20, Role.DECODE)
    around = placement_context(*prefill, *decode, links=Untouched())
    for seed in SEEDS:
        assert placed(around, seed).route.mode is HandoffMode.PULL
        assert PredictedPlacer(seed=seed).place_decode(query(), prefill[0], around)


def test_senders_and_receivers_are_those_with_a_partner() -> None:
    sources = [*pool("p", 3, Role.PREFILL), *pool("q", 1, Role.PREFILL, layout="other")]
    targets = pool("d", 3, Role.DECODE)
    links = FixedLinks(blocked_pairs=frozenset({("p00", "d00"), ("p00", "d01"), ("p00", "d02")}))
    around = placement_context(*sources, *targets, links=links)
    ids = [view.replica_id for view in targets]
    assert can_send([view.replica_id for view in sources], ids, around) == ["p01", "p02"]
    assert can_receive(sources[:1], ids, around) == []
    assert can_receive(sources[:2], ids, around) == ids
    assert can_receive(sources[1:2], ["p01"], around) == [], "nobody pulls from itself"


# --------------------------------------------------------------------------- shortlist
MANY = 40


def chosen(first: ReplicaView, second: ReplicaView, *, seed: int) -> set[str]:
    """Who is looked at where the halves of a pool are like these two, so that pairs are of both."""
    views = [first] * (MANY // 2) + [second] * (MANY // 2)
    ids = [f"d{number:02}" for number in range(MANY)]
    replicas = {
        name: replica_view(name, load=view.load, unreported_legs=view.unreported_legs)
        for name, view in zip(ids, views, strict=True)
    }
    shortlist = Shortlist(MANY // 4, seed=seed)
    fleet = FleetView(at_s=0.0, replicas=replicas)
    return set(shortlist.select(PlacementQuery(prompt_tokens=1), fleet, ids))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "busier",
    [
        replica_view("x", load=Load(queued_tokens=10)),
        replica_view("x", load=Load(running_requests=3)),
        replica_view("x", unreported_legs=1),
    ],
)
def test_the_idler_one_of_each_pair_is_looked_at(busier: ReplicaView, seed: int) -> None:
    idle = replica_view("x", load=Load(queued_tokens=0))
    lower, upper = chosen(idle, busier, seed=seed), chosen(busier, idle, seed=seed)
    assert len(lower) == len(upper) == MANY // 4
    assert max(lower) < f"d{MANY // 2:02}" <= min(upper)


def test_tokens_to_compute_weigh_more_than_streams() -> None:
    streams = replica_view("x", load=Load(running_requests=9))
    prompt = replica_view("x", load=Load(queued_tokens=1))
    assert max(chosen(streams, prompt, seed=1)) < f"d{MANY // 2:02}"


# ---------- placement of requests that need a LoRA adapter
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


def adapter_locality_placed(
    around: PlacementContext, query: PlacementQuery = QUERY
) -> PlacementDecision:
    decision = PredictedPlacer().place(query, around)
    assert isinstance(decision, PlacementDecision)
    return decision


def where(*views: ReplicaView, query: PlacementQuery = QUERY) -> str:
    return adapter_locality_placed(placement_context(*views), query).route.decode_replica_id


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
    (option,) = adapter_locality_placed(placement_context(having("a"))).options
    (held,) = adapter_locality_placed(placement_context(having("a", "ada"))).options
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
    (option, _) = adapter_locality_placed(around).options
    assert option.queue_s > 0.05
    assert (
        adapter_locality_placed(placement_context(_running("a", "ada"), _running("b", "y")))
        .options[0]
        .queue_s
        == 0
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
    (option,) = adapter_locality_placed(placement_context(having("a", running_requests=6))).options
    (held,) = adapter_locality_placed(
        placement_context(having("a", "ada", running_requests=6))
    ).options
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
    route = adapter_locality_placed(around, query).route
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
