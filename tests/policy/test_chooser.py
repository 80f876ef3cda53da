"""Placement around a chooser: who may run a leg, and what a chooser that fails costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, ReplicaView, Role
from baton.domain.handoff import HandoffMode, LegKind, PlacementDecision, Route, RouteReason
from baton.domain.request import LocalOnlyReason
from baton.domain.value import evolve
from baton.policy.placement.chooser import LEAST_LOADED, Candidate, Chooser, ChooserPlacer
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    NoRouteReason,
    PlacementQuery,
    choose_releaser,
)
from baton.policy.placement.simple import POLICIES, RoundRobin, choose_least_loaded
from tests.fakes.timings import FixedLinks, KnownHits, LinearTiming, placement_context, replica_view
from tests.policy.candidates import GROUPED, busier, candidate, choose, kinds, prompts, several

QUERY = PlacementQuery(prompt_tokens=100)
P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def placer(
    disaggregate: Disaggregate = Disaggregate.ALWAYS, chooser: Chooser = choose_least_loaded
) -> ChooserPlacer:
    return ChooserPlacer("mine", chooser, disaggregate=disaggregate, rng=Random(1))


def decide(
    views: Sequence[ReplicaView],
    query: PlacementQuery = QUERY,
    *,
    by: ChooserPlacer | None = None,
    links: FixedLinks | None = None,
) -> PlacementDecision:
    decision = (by or placer()).place(query, placement_context(*views, links=links or FixedLinks()))
    assert isinstance(decision, PlacementDecision)
    return decision


class RecordingChooser:
    """A chooser that remembers what it was asked and always takes the last candidate."""

    def __init__(self) -> None:
        self.questions: list[tuple[LegKind, list[str]]] = []

    def __call__(
        self, query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
    ) -> int:
        del query, rng
        self.questions.append((kind, [candidate.view.replica_id for candidate in candidates]))
        return len(candidates) - 1


def refuse(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
) -> None:
    """A chooser that declines everything."""
    del query, kind, candidates, rng


replicas = st.builds(
    replica_view,
    st.sampled_from("abcdefgh"),
    st.sampled_from(Role),
    layout=st.sampled_from(["x", "y"]),
    inflight_legs=st.integers(0, 3),
    inflight_tokens=st.integers(0, 300),
    draining=st.booleans(),
    load=st.builds(Load, running_requests=st.integers(0, 3), queued_tokens=st.integers(0, 300)),
)
fleets = st.lists(replicas, max_size=6, unique_by=lambda view: view.replica_id)
pairs = st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh"))
some_links = st.builds(FixedLinks, blocked_pairs=st.frozensets(pairs, max_size=30))
queries = st.builds(
    PlacementQuery,
    prompt_tokens=st.integers(1, 1000),
    local_only=st.sampled_from([None, LocalOnlyReason.FAN_OUT]),
    avoid=st.frozensets(st.sampled_from("abcdefgh"), max_size=4),
)
preferences = st.sampled_from(Disaggregate)
answers = st.sampled_from([0, 1, 7, -1, None, "0", 0.0, True])


# ------------------------------------------------------------------------------- who may run it


def test_prefill_and_decode_go_to_their_pools() -> None:
    decision = decide([replica_view("p", P), replica_view("d", D)])
    assert decision.route == Route(
        mode=HandoffMode.PULL,
        prefill_replica_id="p",
        decode_replica_id="d",
        reason=RouteReason.DISAGGREGATED,
    )
    assert (decision.policy, decision.options_considered, decision.at_s) == ("mine", 1, 0.0)


def test_an_empty_fleet_and_a_draining_fleet_are_distinguished() -> None:
    leaving = [replica_view("d", D, draining=True)]
    assert placer().place(QUERY, placement_context()) == NoRoute(reason=NoRouteReason.NO_REPLICA)
    assert placer().place(QUERY, placement_context(*leaving)) == NoRoute(
        reason=NoRouteReason.ALL_DRAINING
    )


@pytest.mark.parametrize(
    ("views", "query", "preference", "reason"),
    [
        (
            [replica_view("p", P), replica_view("m", M)],
            QUERY,
            Disaggregate.ALWAYS,
            RouteReason.MIXED_POOL,
        ),
        ([replica_view("p", P)], QUERY, Disaggregate.ALWAYS, RouteReason.NO_DECODE_REPLICA),
        ([replica_view("d", D)], QUERY, Disaggregate.ALWAYS, RouteReason.NO_PREFILL_REPLICA),
        (
            [replica_view("p", P), replica_view("d", D)],
            evolve(QUERY, local_only=LocalOnlyReason.FAN_OUT),
            Disaggregate.ALWAYS,
            RouteReason.LOCAL_ONLY,
        ),
        (
            [replica_view("p", P), replica_view("d", D)],
            QUERY,
            Disaggregate.NEVER,
            RouteReason.DISAGGREGATION_OFF,
        ),
        (
            [replica_view("p", P, layout="x"), replica_view("d", D, layout="y")],
            QUERY,
            Disaggregate.ALWAYS,
            RouteReason.INCOMPATIBLE,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, RouteReason) else "",
)
def test_an_unsplittable_request_runs_on_one_replica_with_the_reason(
    views: list[ReplicaView], query: PlacementQuery, preference: Disaggregate, reason: RouteReason
) -> None:
    route = decide(views, query, by=placer(preference)).route
    assert (route.mode, route.reason) == (HandoffMode.LOCAL, reason)


def test_a_pair_whose_link_is_out_of_order_hands_nothing_over() -> None:
    broken = FixedLinks(blocked_pairs=frozenset({("p1", "d")}))
    views = [replica_view("p1", P), replica_view("p2", P, inflight_legs=3), replica_view("d", D)]
    assert decide(views, links=broken).route.prefill_replica_id == "p2"
    only_broken = decide([views[0], views[2]], links=broken).route
    assert (only_broken.mode, only_broken.reason) == (HandoffMode.LOCAL, RouteReason.NO_LINK)
    assert placer().place_decode(QUERY, views[0], placement_context(*views, links=broken)) is None


def test_a_replica_that_failed_the_request_is_tried_last_for_decode() -> None:
    views = [replica_view("a", D), replica_view("b", D, inflight_legs=3)]
    avoiding_a = evolve(QUERY, avoid=frozenset("a"))
    assert decide(views, avoiding_a).route.decode_replica_id == "b"
    assert decide(views, evolve(QUERY, avoid=frozenset("ab"))).route.decode_replica_id == "a"
    source = replica_view("p", P)
    around = placement_context(*views, source)
    assert placer().place_decode(avoiding_a, source, around) == "b"
    assert placer().place_decode(evolve(QUERY, avoid=frozenset("ab")), source, around) == "a"


def test_a_replica_that_failed_the_request_never_prefills_it_again() -> None:
    views = [replica_view("p", P), replica_view("d", D)]
    route = decide(views, evolve(QUERY, avoid=frozenset("p"))).route
    assert (route.mode, route.reason) == (HandoffMode.LOCAL, RouteReason.NO_PREFILL_REPLICA)


@pytest.mark.parametrize("load", [Load(running_requests=2), Load(queued_requests=2)])
def test_the_reported_load_of_others_counts(load: Load) -> None:
    views = [replica_view("a", D, load=load), replica_view("b", D, inflight_legs=1)]
    assert decide(views).route.decode_replica_id == "b"


# --------------------------------------------------------------------------- what it is asked


def test_a_chooser_is_asked_once_for_each_leg_and_decode_is_chosen_at_the_handoff() -> None:
    asked = RecordingChooser()
    views = [replica_view(replica_id, P) for replica_id in ("p1", "p2")] + [
        replica_view(replica_id, D) for replica_id in ("d1", "d2")
    ]
    by = placer(chooser=asked)
    decision = decide(views, by=by)
    assert decision.route.prefill_replica_id == "p2"
    assert asked.questions == [(LegKind.PREFILL, ["p1", "p2"])]
    assert by.place_decode(QUERY, views[1], placement_context(*views)) == "d2"
    assert asked.questions[1:] == [(LegKind.DECODE, ["d1", "d2"])]


def test_a_mixed_fleet_is_asked_for_a_local_leg() -> None:
    asked = RecordingChooser()
    decision = decide([replica_view("a", M), replica_view("b", M)], by=placer(chooser=asked))
    assert decision.route.decode_replica_id == "b"
    assert asked.questions == [(LegKind.LOCAL, ["a", "b"])]


def test_of_mixed_and_decode_replicas_the_least_loaded_says_which_kind_is_chosen_from() -> None:
    asked = RecordingChooser()
    views = [
        replica_view("p", P),
        replica_view("d", D, inflight_legs=1),
        replica_view("m1", M),
        replica_view("m2", M, inflight_legs=2),
    ]
    assert decide(views, by=placer(chooser=asked)).route.decode_replica_id == "m2"
    assert asked.questions == [(LegKind.LOCAL, ["m1", "m2"])]


def test_a_chooser_sees_what_candidates_hold_and_how_fast_they_are() -> None:
    seen: list[Candidate] = []

    def look(
        query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
    ) -> int:
        del query, kind, rng
        seen.extend(candidates)
        return 0

    decide(
        [replica_view("a", M), replica_view("b", M)],
        evolve(QUERY, hits=KnownHits(blocks={"b": 3})),
        by=placer(chooser=look),
    )
    assert [candidate.hit.blocks for candidate in seen] == [0, 3]
    assert seen[0].timing.prefill_s(100) == LinearTiming().prefill_s(100)


def test_where_disaggregation_is_auto_a_chooser_may_decline_to_split() -> None:
    calls: list[LegKind] = []

    def decline(
        query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
    ) -> int | None:
        del query, candidates, rng
        calls.append(kind)
        return None if kind is LegKind.PREFILL else 0

    views = [replica_view("p", P), replica_view("d", D)]
    by = placer(Disaggregate.AUTO, decline)
    route = decide(views, by=by).route
    assert (route.mode, route.reason) == (HandoffMode.LOCAL, RouteReason.LOCAL_FASTER)
    assert calls == [LegKind.PREFILL, LegKind.LOCAL]
    assert by.failures == 0
    always = placer(Disaggregate.ALWAYS, decline)
    assert decide(views, by=always).route.mode is HandoffMode.PULL
    assert always.failures == 1


# ------------------------------------------------------------------------- choosers that fail


def raises(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
) -> int:
    """A chooser with a bug."""
    del query, kind, candidates, rng
    raise LookupError("no such thing")


def test_a_chooser_that_raises_loses_no_request_and_is_counted() -> None:
    by = placer(chooser=raises)
    decision = decide([replica_view("a", M, inflight_legs=1), replica_view("b", M)], by=by)
    assert (decision.route.decode_replica_id, decision.policy) == ("b", LEAST_LOADED)
    assert by.failures == 1
    assert by.last_failure == (
        "policy 'mine', asked for a local leg, raised LookupError: no such thing"
    )


@pytest.mark.parametrize("answer", [2, -1, None, "0", 0.0, True])
def test_an_answer_that_is_no_index_loses_no_request_and_is_counted(answer: object) -> None:
    by = placer(chooser=lambda *_: answer)  # type: ignore[arg-type]
    decision = decide([replica_view("a", M, inflight_legs=1), replica_view("b", M)], by=by)
    assert (decision.route.decode_replica_id, decision.policy) == ("b", LEAST_LOADED)
    assert by.last_failure == (
        f"policy 'mine', asked for a local leg, answered {answer!r}, expected an index from 0 to 1"
    )


def test_a_decision_after_a_failure_is_the_choosers_own_again() -> None:
    failing = [True, False]

    def sometimes(
        query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
    ) -> int:
        del query, kind, candidates, rng
        return 9 if failing.pop(0) else 0

    by = placer(chooser=sometimes)
    policies = [decide([replica_view("a", M)], by=by).policy for _ in range(2)]
    assert policies == [LEAST_LOADED, "mine"]


# ----------------------------------------------------------------------------------- properties


@given(fleets, queries, preferences, some_links, answers)
def test_a_route_names_only_replicas_that_take_work_for_every_chooser(
    views: list[ReplicaView],
    query: PlacementQuery,
    preference: Disaggregate,
    links: FixedLinks,
    answer: object,
) -> None:
    by = placer(preference, lambda *_: answer)  # type: ignore[arg-type]
    usable = {view.replica_id for view in views if not view.draining}
    placed = by.place(query, placement_context(*views, links=links))
    if isinstance(placed, NoRoute):
        assert not usable
        return
    route = placed.route
    assert route.decode_replica_id in usable
    assert route.prefill_replica_id is None or route.prefill_replica_id in usable
    assert route.prefill_replica_id != route.decode_replica_id


@given(fleets, queries, preferences, some_links, st.randoms(use_true_random=False))
def test_the_order_of_replicas_does_not_matter(
    views: list[ReplicaView],
    query: PlacementQuery,
    preference: Disaggregate,
    links: FixedLinks,
    shuffler: Random,
) -> None:
    shuffled = list(views)
    shuffler.shuffle(shuffled)
    here, there = placement_context(*views, links=links), placement_context(*shuffled, links=links)
    assert placer(preference).place(query, here) == placer(preference).place(query, there)


@given(fleets, queries, some_links)
def test_a_handoff_fits_both_replicas_and_their_link(
    views: list[ReplicaView], query: PlacementQuery, links: FixedLinks
) -> None:
    around = placement_context(*views, links=links)
    placed = placer().place(query, around)
    if isinstance(placed, PlacementDecision) and placed.route.prefill_replica_id is not None:
        source = around.fleet.replicas[placed.route.prefill_replica_id].facts
        target = around.fleet.replicas[placed.route.decode_replica_id].facts
        assert source.layout == target.layout
        assert (source.role, target.role) == (P, D)
        assert query.local_only is None
        assert source.replica_id not in query.avoid
        assert links.transfer_s(source.replica_id, target.replica_id, 0) is not None


@given(fleets)
def test_more_load_never_attracts_a_request(views: list[ReplicaView]) -> None:
    never = placer(Disaggregate.NEVER)
    before = never.place(QUERY, placement_context(*views))
    if isinstance(before, PlacementDecision):
        other = [
            evolve(view, inflight_legs=view.inflight_legs + 9, inflight_tokens=999)
            if view.replica_id != before.route.decode_replica_id
            else view
            for view in views
        ]
        assert never.place(QUERY, placement_context(*other)) == before


@given(fleets, some_links)
def test_blocks_are_decoded_and_released_by_another_replica_of_the_layout(
    views: list[ReplicaView], links: FixedLinks
) -> None:
    around = placement_context(*views, links=links)
    for source in views:
        for chosen in (
            placer().place_decode(QUERY, source, around),
            choose_releaser(source, around.fleet),
        ):
            if chosen is not None:
                assert chosen != source.replica_id
                assert around.fleet.replicas[chosen].facts.layout == source.facts.layout


@given(fleets, some_links)
def test_a_decode_replica_is_found_at_the_handoff_whenever_there_is_one(
    views: list[ReplicaView], links: FixedLinks
) -> None:
    around = placement_context(*views, links=links)
    for source in views:
        able = {
            view.replica_id
            for view in views
            if not view.draining
            and view.facts.role is not P
            and view.replica_id != source.replica_id
            and view.facts.layout == source.facts.layout
            and (source.replica_id, view.replica_id) not in links.blocked_pairs
        }
        chosen = placer().place_decode(QUERY, source, around)
        assert (chosen in able) if able else (chosen is None)


def test_the_same_seed_gives_the_same_routes() -> None:
    views = [replica_view(replica_id, M) for replica_id in "abcdefgh"]

    def draw(query: PlacementQuery, kind: LegKind, found: Sequence[Candidate], rng: Random) -> int:
        del query, kind
        return rng.randrange(len(found))

    def routes(seed: int) -> list[str]:
        by = ChooserPlacer("x", draw, disaggregate=Disaggregate.NEVER, rng=random.Random(seed))
        return [decide(views, by=by).route.decode_replica_id for _ in range(20)]

    assert routes(1) == routes(1) != routes(2)


# ---------- policies that know nothing of prompts
def test_round_robin_takes_each_replica_in_turn_for_each_kind_of_leg() -> None:
    chooser, all_three = RoundRobin(), [candidate(replica_id) for replica_id in "abc"]
    assert [choose(chooser, *all_three) for _ in range(5)] == list("abcab")
    assert choose(chooser, *all_three, kind=LegKind.PREFILL) == "a"
    without_c = all_three[:2]
    assert choose(chooser, *without_c) == "a"
    assert [choose(chooser, *all_three) for _ in range(3)] == list("bca")


def test_least_loaded_counts_requests_then_tokens_then_ids() -> None:
    one, two = candidate("a", running=2), candidate("b", legs=1, queued=1)
    assert choose(choose_least_loaded, one, two) == "b"
    tokens = candidate("a", running=1, queued_tokens=5), candidate("b", running=1)
    assert choose(choose_least_loaded, *tokens) == "b"
    assert choose(choose_least_loaded, candidate("b"), candidate("a")) == "a"


def test_random_gives_each_the_same_chance() -> None:
    chooser, views = POLICIES["random"](), [candidate("a", legs=99), candidate("b")]
    chosen = Counter(choose(chooser, *views, seed=seed) for seed in range(300))
    assert 110 < chosen["a"] < 190


@given(several, st.sampled_from(sorted(POLICIES)), kinds, prompts, st.integers(0, 9))
def test_every_policy_answers_with_an_index_and_the_same_one_for_the_same_seed(
    found: list[Candidate], name: str, kind: LegKind, query: PlacementQuery, seed: int
) -> None:
    first, again = (POLICIES[name]()(query, kind, found, Random(seed)) for _ in range(2))
    assert first == again
    assert first in range(len(found))


@given(several, kinds, st.integers(0, 9))
def test_load_on_the_others_never_drives_a_request_away(
    found: list[Candidate], kind: LegKind, seed: int
) -> None:
    index = choose_least_loaded(GROUPED, kind, found, Random(seed))
    others = [other if place == index else busier(other) for place, other in enumerate(found)]
    assert choose_least_loaded(GROUPED, kind, others, Random(seed)) == index


@pytest.mark.parametrize("name", POLICIES)
def test_the_views_that_candidates_are_made_of_are_not_changed(name: str) -> None:
    one = candidate("a", running=1)
    before: ReplicaView = evolve(one.view)
    choose(POLICIES[name](), one)
    assert one.view == before
