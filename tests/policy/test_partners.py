"""Handoffs in pools too large to look at each, where not everyone can hand over to everyone."""

from __future__ import annotations

import pytest

from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import HandoffMode, PlacementDecision, RouteReason
from baton.policy.placement.port import Disaggregate, PlacementContext, PlacementQuery
from baton.policy.placement.predicted import (
    PredictedOptions,
    PredictedPlacer,
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
def test_who_can_pull_is_found_among_many_who_cannot(around: PlacementContext) -> None:
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
def test_who_can_hand_over_is_found_among_many_who_cannot(around: PlacementContext) -> None:
    for seed in SEEDS:
        route = placed(around, seed).route
        assert (route.mode, route.decode_replica_id) == (HandoffMode.PULL, "d00")
        assert route.prefill_replica_id in {"old00", "old01"}


def test_who_has_failed_the_request_is_not_found_again_by_looking_further() -> None:
    around = mostly_of_another_layout()
    source, failed = around.fleet.replicas["p00"], frozenset({"old00"})
    for seed in SEEDS:
        item = query(avoid=failed)
        assert PredictedPlacer(seed=seed).place_decode(item, source, around) == "old01"
        assert placed(around, seed, item).route.decode_replica_id == "old01"


def test_where_nobody_can_do_it_that_is_said() -> None:
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


def test_where_all_are_alike_nobody_is_looked_up() -> None:
    prefill, decode = pool("p", 20, Role.PREFILL), pool("d", 20, Role.DECODE)
    around = placement_context(*prefill, *decode, links=Untouched())
    for seed in SEEDS:
        assert placed(around, seed).route.mode is HandoffMode.PULL
        assert PredictedPlacer(seed=seed).place_decode(query(), prefill[0], around)


def test_takers_and_givers_are_those_with_a_partner() -> None:
    sources = [*pool("p", 3, Role.PREFILL), *pool("q", 1, Role.PREFILL, layout="other")]
    targets = pool("d", 3, Role.DECODE)
    links = FixedLinks(blocked_pairs=frozenset({("p00", "d00"), ("p00", "d01"), ("p00", "d02")}))
    around = placement_context(*sources, *targets, links=links)
    ids = [view.replica_id for view in targets]
    assert can_send([view.replica_id for view in sources], ids, around) == ["p01", "p02"]
    assert can_receive(sources[:1], ids, around) == []
    assert can_receive(sources[:2], ids, around) == ids
    assert can_receive(sources[1:2], ["p01"], around) == [], "nobody pulls from itself"
