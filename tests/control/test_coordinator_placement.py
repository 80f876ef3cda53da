"""The coordinator with its own placement: caches, links, what was predicted and what came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.probing.notices import PairNoticeKind
from baton.control.probing.prober import ProbeOptions
from baton.control.state.request_state import RequestState
from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate
from baton.domain.commands import CheckSideChannel, SubmitLeg, SyncCache
from baton.domain.events import (
    CacheChanged,
    LegFailed,
    LinksReported,
    ReplicaJoined,
    SideChannelChecked,
    StepCompleted,
)
from baton.domain.fleet import LinkTotals, Load, Role
from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    LegFailure,
    LegKind,
    PlacementDecision,
    RouteReason,
)
from baton.domain.request import Phase, Request
from baton.domain.value import evolve
from baton.policy.links.estimates import LinkState
from baton.policy.placement.port import Disaggregate, NoRoute, PlacementContext, PlacementQuery
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import LIMITS, World, request
from tests.fakes.facts import replica_facts
from tests.fakes.timings import LinearTiming

BUSY = Load(running_requests=60)


def world(disaggregate: Disaggregate = Disaggregate.AUTO) -> World:
    return World(policy=PredictedPlacer(PredictedOptions(disaggregate=disaggregate)))


def mixed(count: int, fleet: World | None = None) -> World:
    fleet = fleet or world()
    for i in range(count):
        fleet.join(f"m{i}", Role.MIXED)
    return fleet


def where(fleet: World, item: Request) -> str:
    fleet.arrive(item)
    ((replica_id, _),) = [
        placed for placed in fleet.legs.values() if placed[1].request_id == item.request_id
    ]
    return replica_id


def finish(fleet: World) -> None:
    """Let everything run, also what waits a moment before it is tried again."""
    fleet.run_to_end()
    fleet.advance(LIMITS.retry_s)
    fleet.run_to_end()


# ------------------------------------------------------------------ caches


def test_a_prompt_goes_where_its_prefix_is_reported() -> None:
    fleet = mixed(8)
    item = request("a", prompt_tokens=1000)
    fleet.report_cached("m5", item)
    assert where(fleet, item) == "m5"


def test_a_prompt_goes_where_the_same_prefix_was_sent_before_any_report() -> None:
    fleet = mixed(8)
    first = where(fleet, request("a", prompt_tokens=1000))
    finish(fleet)
    for i in range(5):
        assert where(fleet, request(f"b{i}", prompt_tokens=1000)) == first
        finish(fleet)


def test_the_next_turn_goes_where_the_last_one_was_decoded() -> None:
    fleet = mixed(8)
    first = evolve(request("a", prompt_tokens=64), session_id="chat")
    place = where(fleet, first)
    finish(fleet)
    longer = evolve(request("b", prompt_tokens=66), session_id="chat")
    assert where(fleet, longer) == place


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_session_was_where_its_last_answer_came_to_a_stop_string_unless_none_began(
    tokens: int,
) -> None:
    fleet = mixed(8)
    place = where(fleet, evolve(request("a", prompt_tokens=64), session_id="chat"))
    (leg_id,) = fleet.legs
    for _ in range(tokens):
        fleet.step(leg_id)
    fleet.cancel("a")
    entry = RequestState(request=evolve(request("b"), session_id="chat"))
    known = fleet.coordinator.fleet_model.placement_query(entry, 0.0).session_replica_id
    assert known == (place if tokens else None)


def test_an_answer_up_to_a_stop_string_is_known_to_be_cached() -> None:
    fleet = world()
    fleet.alive["m0"] = Role.MIXED
    fleet.handle(ReplicaJoined(facts=replica_facts("m0", Role.MIXED, cache_events=False)))
    fleet.arrive(request("a", prompt_tokens=16, max_tokens=200))
    (leg_id,) = fleet.legs
    for _ in range(33):
        fleet.step(leg_id)
    fleet.cancel("a")
    finish(fleet)
    item = request("b", prompt_tokens=16)
    longer = evolve(item, prompt_token_ids=(*item.prompt_token_ids, *range(40)))
    fleet.arrive(longer)
    (leg_id,) = fleet.legs
    finish(fleet)
    assert fleet.records["b"].decisions[0].options[0].hit_tokens == 48


def test_prompts_of_other_tenants_are_other_prefixes() -> None:
    fleet = mixed(2)
    item = evolve(request("a", prompt_tokens=1000), cache_salt="one")
    fleet.report_cached("m1", item)
    other = evolve(item, request_id="b", cache_salt="two")
    fleet.arrive(other)
    finish(fleet)
    assert fleet.records["b"].decisions[0].options[0].hit_tokens == 0
    fleet.arrive(item)
    finish(fleet)
    assert fleet.records["a"].decisions[0].options[0].hit_source is HitSource.REPORTED


def test_a_replica_in_a_new_life_holds_nothing() -> None:
    fleet = mixed(2)
    item = request("a", prompt_tokens=1000)
    fleet.report_cached("m1", item)
    fleet.disconnect("m1")
    fleet.join("m1", Role.MIXED)
    fleet.arrive(item)
    finish(fleet)
    assert fleet.records["a"].decisions[0].options[0].hit_tokens == 0


def test_a_missing_update_is_asked_for() -> None:
    fleet = mixed(1)
    fleet.report_cached("m0", request("a"), sequence=1)
    fleet.commands.clear()
    fleet.report_cached("m0", request("b"), sequence=3)
    assert fleet.commands == [SyncCache(replica_id="m0")]


def test_a_load_report_reveals_that_the_last_update_was_lost() -> None:
    fleet = mixed(1)
    fleet.report_cached("m0", request("a"), sequence=1)
    fleet.commands.clear()
    fleet.load("m0", Load(cache_sequence=1))
    assert fleet.commands == []
    fleet.load("m0", Load(cache_sequence=2))
    assert fleet.commands == [SyncCache(replica_id="m0")]


def test_garbage_and_unknown_replicas_in_reports_lose_nothing() -> None:
    fleet = mixed(1)
    garbage = CacheUpdate(1, (CacheChange(CacheChangeKind.STORED, b"not hashes"),))
    fleet.handle(CacheChanged(replica_id="m0", update=garbage))
    fleet.report_cached("nobody", request("a"))
    fleet.load("nobody", Load())
    fleet.handle(LinksReported(replica_id="nobody", links=(LinkTotals("ghost", 1, 10, 1.0),)))
    fleet.arrive(request("a"))
    finish(fleet)
    assert fleet.records["a"].outcome is Phase.FINISHED


# ------------------------------------------------------------------ work that no report knows of


def test_a_burst_between_two_reports_is_spread() -> None:
    fleet = mixed(4)
    for i in range(40):
        fleet.arrive(evolve(request(f"r{i}", prompt_tokens=999), prompt_token_ids=(i + 1,) * 999))
    views = fleet.coordinator.fleet(0.0).replicas.values()
    assert [view.inflight_legs for view in views] == [10] * 4


def test_cached_tokens_are_not_charged() -> None:
    fleet = mixed(1)
    item = request("a", prompt_tokens=1000)
    fleet.report_cached("m0", item)
    fleet.arrive(item)
    (view,) = fleet.coordinator.fleet(0.0).replicas.values()
    assert view.inflight_tokens == 1000 - 62 * 16


def test_a_leg_that_could_not_be_sent_is_not_taken_for_one_that_was() -> None:
    fleet = mixed(1)
    fleet.arrive(request("a"))
    (leg_id,) = fleet.legs
    fleet.legs.clear()
    failed = LegFailed(
        replica_id="m0", leg_id=leg_id, failure=LegFailure.OVERLOADED, was_sent=False
    )
    fleet.handle(failed)
    fleet.advance(LIMITS.retry_s)
    fleet.load("m0", Load(), received_legs=1)
    (view,) = fleet.coordinator.fleet(0.0).replicas.values()
    assert (view.inflight_legs, view.unreported_legs) == (1, 0)


# ------------------------------------------------------------------ prefix fetch


def fetched(fleet: World | None = None) -> tuple[World, Request]:
    """A request whose prefix is on a busy replica, and fetched by an idle one."""
    fleet = mixed(2, fleet)
    item = request("a", prompt_tokens=1000, max_tokens=4)
    prefix = evolve(item, prompt_token_ids=item.prompt_token_ids[:800])
    fleet.report_cached("m0", prefix)
    fleet.load("m0", BUSY)
    fleet.arrive(item)
    return fleet, item


def test_a_fetched_prefix_is_asked_of_its_holder_and_the_rest_computed_elsewhere() -> None:
    fleet, item = fetched()
    ((holder, leg),) = fleet.legs.values()
    assert (holder, leg.kind) == ("m0", LegKind.PREFILL)
    assert leg.prompt_token_ids == item.prompt_token_ids[:801]
    fleet.step(leg.leg_id)
    ((target, decode),) = fleet.legs.values()
    assert (target, decode.kind) == ("m1", LegKind.DECODE)
    assert decode.prompt_token_ids == item.prompt_token_ids
    assert decode.source_id == "m0"
    view = fleet.coordinator.fleet(0.0).replicas["m1"]
    assert view.inflight_tokens == 199
    finish(fleet)
    record = fleet.records["a"]
    assert record.routes[0].reason is RouteReason.PREFIX_FETCH
    assert len(fleet.tokens["a"]) == 4


def fetched_before_much_else() -> World:
    """Like `fetched`, and the blocks are on their way; the 30,000 tokens of the rest take 3 s."""
    fleet = World(policy=PredictedPlacer(), priors={"mixed": LinearTiming()})
    for name in ("m0", "m1"):
        fleet.alive[name] = Role.MIXED
        facts = replica_facts(
            name,
            Role.MIXED,
            kv_blocks=9999,
            max_len_tokens=99_999,
            cache_events=True,
            supports_prefix_fetch=True,
        )
        fleet.handle(ReplicaJoined(facts=facts))
    hand_out_prefix(fleet, "a", first_token_id=0)
    return fleet


def hand_out_prefix(fleet: World, name: str, *, first_token_id: int) -> None:
    tokens = tuple(range(first_token_id, first_token_id + 50_000))
    item = evolve(request(name, max_tokens=4), prompt_token_ids=tokens)
    fleet.report_cached(
        "m0", evolve(item, prompt_token_ids=tokens[:20_000]), sequence=len(fleet.requests) + 1
    )
    fleet.load("m0", BUSY)
    fleet.arrive(item)
    (leg_id,) = [leg_id for leg_id in fleet.legs if leg_id.startswith(name)]
    holder, leg = fleet.legs[leg_id]
    assert (holder, leg.kind) == ("m0", LegKind.PREFILL)
    fleet.step(leg_id)


def beat(fleet: World, until_s: float) -> None:
    while fleet.now_s < until_s:
        fleet.load("m0", BUSY)
        fleet.load("m1", Load(running_requests=1))
        fleet.advance(0.25)


def test_computation_after_a_fetched_prefix_is_not_transfer_time() -> None:
    fleet = fetched_before_much_else()
    beat(fleet, LIMITS.transfer_deadline_s + 2.5)
    assert fleet.coordinator.phases() == {"a": Phase.TRANSFER}, "3 s are computed there"
    finish(fleet)
    assert fleet.records["a"].resumes == 0
    (row,) = fleet.coordinator.fleet_model.links.rows(fleet.now_s)
    assert row.handoff_failures == 0


def test_a_fetch_is_given_up_once_blocks_and_the_rest_have_had_their_time() -> None:
    fleet = fetched_before_much_else()
    beat(fleet, LIMITS.transfer_deadline_s + 3.5)
    (row,) = fleet.coordinator.fleet_model.links.rows(fleet.now_s)
    assert row.handoff_failures == 1
    finish(fleet)
    assert fleet.records["a"].resumes == 1


def test_a_fetch_behind_another_has_the_time_that_both_take() -> None:
    fleet = fetched_before_much_else()
    fleet.load("m1", Load(running_requests=1), received_legs=1)
    hand_out_prefix(fleet, "b", first_token_id=100_000)
    beat(fleet, LIMITS.transfer_deadline_s + 5.5)
    assert fleet.coordinator.phases()["b"] is Phase.TRANSFER, "6 s of prompts are computed"
    beat(fleet, LIMITS.transfer_deadline_s + 6.5)
    assert fleet.coordinator.phases()["b"] is not Phase.TRANSFER


# ------------------------------------------------------------------ links


def handed_off(limits_of: World | None = None) -> World:
    fleet = limits_of or world(Disaggregate.ALWAYS)
    fleet.join_prefill_decode()
    return fleet


def break_transfer(fleet: World, request_id: str) -> None:
    fleet.arrive(request(request_id, prompt_tokens=1000))
    (prefill,) = fleet.legs
    fleet.step(prefill)
    (decode,) = fleet.legs
    fleet.fail_leg(decode, LegFailure.KV_LOAD_FAILED)


def test_no_prompt_is_computed_for_a_pool_that_is_mostly_rolled_out() -> None:
    fleet = world(Disaggregate.ALWAYS)
    fleet.join("p0", Role.PREFILL, layout="old")
    for number in range(20):
        fleet.join(f"d{number:02}", Role.DECODE, layout="old" if number < 3 else "new")
    for number in range(20):
        fleet.arrive(request(f"r{number}", prompt_tokens=400))
        fleet.run_to_end()
    assert {record.resumes for record in fleet.records.values()} == {0}
    assert all(record.prefill_done_at_s is not None for record in fleet.records.values())


def test_a_failed_transfer_is_recomputed_and_its_link_pays() -> None:
    fleet = handed_off()
    links = fleet.coordinator.fleet_model.links
    before = links.transfer_s("p0", "d0", 10_000_000)
    break_transfer(fleet, "a")
    finish(fleet)
    assert fleet.records["a"].outcome is Phase.FINISHED
    assert fleet.records["a"].routes[-1].mode is HandoffMode.LOCAL
    after = links.transfer_s("p0", "d0", 10_000_000)
    assert before is not None
    assert after is not None
    assert after > before


def test_a_link_that_fails_in_a_row_is_not_used() -> None:
    fleet = handed_off()
    for i in range(10):
        break_transfer(fleet, f"r{i}")
        finish(fleet)
        if fleet.coordinator.fleet_model.links.state("p0", "d0") is LinkState.QUARANTINED:
            break
    fleet.arrive(request("last", prompt_tokens=1000))
    finish(fleet)
    assert fleet.records["last"].routes[0].reason is RouteReason.NO_LINK


def test_a_transfer_over_its_deadline_counts_against_its_link() -> None:
    fleet = handed_off()
    fleet.arrive(request("a", prompt_tokens=1000))
    (prefill,) = fleet.legs
    fleet.step(prefill)
    fleet.advance(LIMITS.transfer_deadline_s)
    (row,) = fleet.coordinator.fleet_model.links.rows(fleet.now_s)
    assert row.handoff_failures == 1
    finish(fleet)
    assert fleet.records["a"].outcome is Phase.FINISHED


def test_an_overloaded_decode_replica_is_not_its_links_fault() -> None:
    fleet = handed_off()
    fleet.arrive(request("a", prompt_tokens=1000))
    (prefill,) = fleet.legs
    fleet.step(prefill)
    (decode,) = fleet.legs
    fleet.fail_leg(decode, LegFailure.OVERLOADED)
    rows = list(fleet.coordinator.fleet_model.links.rows(fleet.now_s))
    assert sum(row.handoff_failures for row in rows) == 0


def probed() -> World:
    """A pair that is probed, and was found in order."""
    fleet = World(policy=PredictedPlacer(), probing=ProbeOptions())
    fleet.join_prefill_decode()
    fleet.handle(
        SideChannelChecked(replica_id="d0", source_id="p0", is_reachable=True, elapsed_s=0.01)
    )
    fleet.run_to_end()
    assert fleet.coordinator.fleet_model.links.state("p0", "d0") is LinkState.OK
    fleet.commands.clear()
    return fleet


def test_a_pair_is_probed_with_legs_of_its_own_when_it_joins() -> None:
    fleet = probed()
    assert fleet.leased == {}
    assert fleet.records == {}
    views = fleet.coordinator.fleet(0.0).replicas.values()
    assert [view.inflight_legs for view in views] == [0, 0]


def test_a_side_channel_that_does_not_answer_keeps_requests_local() -> None:
    fleet = World(
        policy=PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS)),
        probing=ProbeOptions(),
    )
    fleet.join_prefill_decode()
    gone = SideChannelChecked(
        replica_id="d0", source_id="p0", is_reachable=False, elapsed_s=2.0, reason="nobody listens"
    )
    fleet.handle(gone)
    kinds = [notice.kind for notice in fleet.coordinator.pop_notices()]
    assert PairNoticeKind.QUARANTINED in kinds
    fleet.arrive(request("a", prompt_tokens=1000))
    fleet.run_to_end()
    assert fleet.records["a"].routes[0].reason is RouteReason.NO_LINK


def test_a_failed_transfer_has_its_pair_probed_before_the_next_round() -> None:
    fleet = probed()
    fleet.now_s += 2.0  # the next round is at five seconds
    fleet.coordinator.fleet_model.links.record_probe_success("p0", "d0", fleet.now_s)
    fleet.load("d0", BUSY)
    break_transfer(fleet, "a")
    checks = [command for command in fleet.commands if isinstance(command, CheckSideChannel)]
    assert [(check.replica_id, check.source_id) for check in checks] == [("d0", "p0")]


def test_leases_are_counted_by_the_replica_that_keeps_the_blocks() -> None:
    fleet = handed_off()
    fleet.arrive(request("a", prompt_tokens=1000))
    assert fleet.coordinator.lease_counts() == {}
    (prefill,) = fleet.legs
    fleet.step(prefill)
    assert fleet.coordinator.lease_counts() == {"p0": 1}
    finish(fleet)
    assert fleet.coordinator.lease_counts() == {}


# ------------------------------------------------------------------ the story


def test_a_record_keeps_what_was_predicted() -> None:
    fleet = mixed(4)
    fleet.arrive(request("a", prompt_tokens=1000))
    finish(fleet)
    record = fleet.records["a"]
    (decision,) = record.decisions
    assert decision.route == record.routes[0]
    assert decision.policy == "predicted"
    assert len(decision.options) == 3
    assert decision.options[0].ttft_s > 0


def test_predictions_are_compared_with_measured_latencies() -> None:
    fleet = mixed(1)
    fleet.arrive(request("a", prompt_tokens=1000))
    fleet.now_s += 5.0
    finish(fleet)
    (quality,) = fleet.coordinator.fleet_model.timings.quality()
    assert quality.ttft_count == 1
    assert quality.ttft_bias == pytest.approx(-1, abs=0.2)


def test_cached_tokens_of_an_engine_count_from_its_own_prefill_only() -> None:
    fleet = world(Disaggregate.ALWAYS)
    fleet.join_prefill_decode()
    fleet.arrive(request("a", prompt_tokens=1000))
    (prefill,) = fleet.legs
    output = fleet.output(prefill)._replace(cached_tokens=320)
    fleet.handle(StepCompleted(replica_id="p0", outputs=(output,)))
    (decode,) = fleet.legs
    output = fleet.output(decode)._replace(cached_tokens=999)
    fleet.handle(StepCompleted(replica_id="d0", outputs=(output,)))
    finish(fleet)
    assert fleet.records["a"].cached_tokens == 320


def test_a_route_that_was_submitted_names_replicas_of_the_fleet() -> None:
    fleet = mixed(3)
    fleet.arrive(request("a"))
    (submitted,) = [command for command in fleet.commands if isinstance(command, SubmitLeg)]
    assert submitted.replica_id in fleet.alive


class Unpredicting(PredictedPlacer):
    """Says where, and not why."""

    def place(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementDecision | NoRoute:
        decision = super().place(query, context)
        return evolve(decision, options=()) if isinstance(decision, PlacementDecision) else decision


@pytest.mark.parametrize("policy", [PredictedPlacer, Unpredicting])
def test_a_prefix_source_gives_no_token(policy: type[PredictedPlacer]) -> None:
    limits = replace(LIMITS, early_first_token=True)
    fleet, _ = fetched(World(limits, policy=policy()))
    ((_, leg),) = fleet.legs.values()
    assert (leg.kind, leg.emits_first_token) == (LegKind.PREFILL, False)
    fleet.step(leg.leg_id)
    assert fleet.tokens["a"] == []
    finish(fleet)
    assert fleet.tokens["a"] == [0, 1, 2, 3]
