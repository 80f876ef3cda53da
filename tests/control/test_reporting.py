"""What a coordinator reports of its pools and of those that wait."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.accounting.accounts import OTHER, Accounts, SloTotals
from baton.control.accounting.reporter import CoordinatorReporter, least_slack_s
from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.request_state import RequestState
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import RequestRecord
from baton.domain.demand import (
    LATENCY_BUCKET_BOUNDS_S,
    CoordinatorReport,
    DemandTotals,
    PoolReport,
    Tally,
)
from baton.domain.fleet import Load, LossReason, Role, StepTotals
from baton.domain.request import Phase
from baton.domain.slo import ALL_MET, Slo, SloResult
from baton.domain.value import evolve
from baton.perf.capacity.capacity import prefill_tokens_per_s
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import LIMITS, World, request
from tests.fakes.facts import replica_facts


def report(world: World) -> CoordinatorReport:
    return world.coordinator.report("c", world.now_s)


def pool(world: World, name: str = "decode") -> PoolReport:
    (found,) = [other for other in report(world).pools if other.pool == name]
    return found


def busy(busy_s: float, **load: float) -> Load:
    steps = StepTotals(steps=max(1, round(busy_s * 100)), busy_s=busy_s)
    return Load(steps=steps, **load)  # type: ignore[arg-type]  # tests name them right


def set_ttft_objective(world: World, ttft_s: float) -> None:
    slos = SloClasses(classes={"default": Slo(ttft_s=ttft_s)})
    world.coordinator.reconfigure(rules=ServiceRules(slos=slos))


# ------------------------------------------------------------------------------ pools


def test_a_pool_is_told_with_its_replicas_by_present_role() -> None:
    world = World()
    world.join_prefill_decode(prefill=1, decode=3)
    world.drain("d2")
    told = pool(world)
    assert (told.prefill, told.decode, told.mixed, told.draining) == (0, 2, 0, 1)
    assert told.roles == (("d0", Role.DECODE), ("d1", Role.DECODE))


def test_loads_are_added_up_over_replicas_that_take_work() -> None:
    world = World()
    world.join_prefill_decode(prefill=0, decode=3)
    world.load("d0", busy(1.0, running_requests=3, queued_requests=1, pulling_requests=2))
    world.load("d1", busy(1.0, running_requests=4, queued_tokens=70, kv_used_fraction=0.5))
    world.load("d2", busy(1.0, running_requests=9))
    world.drain("d2")
    told = pool(world)
    assert (told.running_requests, told.queued_requests, told.queued_tokens) == (7.0, 3.0, 70.0)
    assert told.kv_used_fraction == 0.25


def test_time_in_steps_is_counted_from_when_a_replica_first_said_it() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    assert pool(world).busy_s == 0.0
    world.load("d0", busy(1000.0))
    assert pool(world).busy_s == 0.0, "what it did before is others' or was long ago"
    world.load("d0", busy(1002.5))
    assert pool(world).busy_s == 2.5


def test_time_in_steps_never_goes_back_when_replicas_leave_or_begin_again() -> None:
    world = World()
    world.join_prefill_decode(prefill=0, decode=2)
    for replica_id in ("d0", "d1"):
        world.load(replica_id, busy(10.0))
    report(world)
    world.load("d0", busy(13.0))
    world.disconnect("d0", LossReason.UNRESPONSIVE)
    assert pool(world).busy_s == 3.0
    world.join("d0", Role.DECODE)
    world.load("d0", busy(1.0))
    assert pool(world).busy_s == 3.0
    world.load("d0", busy(1.5))
    assert pool(world).busy_s == 3.5
    world.load("d0", busy(0.25))  # the engine was restarted, the replica was not
    assert pool(world).busy_s == 3.75


def test_a_replica_that_rejoins_has_its_last_work_counted() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.load("d0", busy(10.0))
    report(world)
    world.load("d0", busy(11.0))
    world.join("d0", Role.DECODE)
    assert pool(world).busy_s == 1.0


def test_a_pool_whose_replicas_are_gone_is_told_still() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.load("d0", busy(10.0))
    report(world)
    world.disconnect("d0")
    assert (pool(world).decode, pool(world).oldest_report_age_s) == (0, 0.0)


def test_the_oldest_load_report_that_counts_says_how_stale_a_pool_is() -> None:
    world = World()
    world.join_prefill_decode(prefill=0, decode=3)
    world.advance(4.0)
    world.load("d0", busy(1.0))
    world.advance(1.0)
    world.load("d1", busy(1.0))
    world.drain("d2")
    assert pool(world).oldest_report_age_s == 1.0


# ------------------------------------------------------------------------------ capacity


def served(
    world: World, *, prompts: bool = True, decoding: bool = True, request_at_end: bool = True
) -> None:
    """Enough reports for the timing to be known, and a request that says what they are like."""
    for number in range(12):
        done = 10 * (number + 1)
        steps = StepTotals(
            steps=done,
            busy_s=0.02 * done,
            prefill_tokens=40 * done * prompts,
            prefill_steps=done * prompts,
            decode_steps=done * decoding,
            decode_tokens=8 * done * decoding,
            context_tokens=400 * done * decoding,
        )
        world.load("d0", Load(steps=steps))
        world.advance(0.25)
    if request_at_end:
        world.arrive(request("r", prompt_tokens=40, max_tokens=4))
        world.run_to_end()


def test_capacities_are_unknown_until_engines_and_requests_are_known() -> None:
    world = World(replace(LIMITS, stall_timeout_s=1e6))
    world.join("d0", Role.DECODE)
    assert pool(world).prefill_tokens_per_s is None
    world.arrive(request("r0"))
    world.run_to_end()
    assert pool(world).decode_tokens_per_s is None
    served(world)
    told = pool(world)
    view = world.coordinator.fleet(0.0).replicas["d0"]
    timing = world.coordinator.fleet_model.timings.of(view)
    assert told.prefill_tokens_per_s == pytest.approx(
        prefill_tokens_per_s(
            timing,
            mean_uncached_tokens=40,
            max_batched_tokens=view.facts.max_batched_tokens,
            max_running=view.facts.max_running_requests,
        )
    )
    assert told.decode_streams is not None
    assert told.decode_streams <= view.facts.max_running_requests
    assert told.decode_tokens_per_s is not None


def test_pulls_at_a_time_bound_the_streams_of_a_replica_that_decodes() -> None:
    def reported(role: Role, max_pulls: int | None) -> float:
        world = World(replace(LIMITS, stall_timeout_s=1e6, max_pulls=max_pulls))
        world.join("d0", role)
        served(world)
        streams = pool(world, str(role)).decode_streams
        assert streams is not None
        return streams

    assert reported(Role.DECODE, 2) == 2 * reported(Role.DECODE, 1)
    assert reported(Role.DECODE, None) > reported(Role.DECODE, 2)
    assert reported(Role.MIXED, 1) == reported(Role.MIXED, None), "no pull comes before its streams"


def test_requests_that_end_on_stop_strings_say_what_requests_are_like() -> None:
    world = World(replace(LIMITS, stall_timeout_s=1e6))
    world.join("d0", Role.DECODE)
    served(world, request_at_end=False)
    world.arrive(request("a", prompt_tokens=40, max_tokens=900))
    world.cancel("a")
    assert pool(world).decode_streams is None, "it left before it had anything"
    world.confirm_aborts()
    world.arrive(request("b", prompt_tokens=40, max_tokens=900))
    (leg_id,) = world.legs
    world.step(leg_id)
    world.cancel("b")
    told = pool(world)
    assert told.prefill_tokens_per_s is not None
    assert told.decode_streams is not None


def test_an_unobserved_capacity_is_not_guessed() -> None:
    decodes, prefills = (
        World(replace(LIMITS, stall_timeout_s=1e6)),
        World(replace(LIMITS, stall_timeout_s=1e6)),
    )
    for world in (decodes, prefills):
        world.join("d0", Role.DECODE)
    served(decodes, prompts=False)
    served(prefills, decoding=False)
    assert pool(decodes).prefill_tokens_per_s is None
    assert pool(decodes).decode_tokens_per_s is not None
    assert pool(prefills).prefill_tokens_per_s is not None
    assert (pool(prefills).decode_tokens_per_s, pool(prefills).decode_streams) == (None, None)


def test_a_strict_pace_leaves_room_for_fewer_streams() -> None:
    world = World(replace(LIMITS, stall_timeout_s=1e6))
    world.join("d0", Role.DECODE)
    view = world.coordinator.fleet(0.0).replicas["d0"]
    served(world)
    timing = world.coordinator.fleet_model.timings.of(view)
    tight_s = timing.step_s(running=5, context_tokens=5 * 42)
    slos = SloClasses(classes={"default": Slo(tpot_s=tight_s)})
    world.coordinator.reconfigure(rules=ServiceRules(slos=slos))
    world.arrive(request("again", prompt_tokens=40, max_tokens=4))
    world.run_to_end()
    assert pool(world).decode_streams == 5


# ------------------------------------------------------------------------------ who waits


def test_an_empty_queue_has_no_slack() -> None:
    world = World()
    set_ttft_objective(world, 2.0)
    assert report(world).slack_s is None


def test_slack_is_the_rest_of_the_objective_of_the_worst_request() -> None:
    world = World()
    set_ttft_objective(world, 2.0)
    world.arrive(request("old"))
    world.advance(0.5)
    world.arrive(evolve(request("new"), arrived_at_s=0.5))
    told = report(world)
    assert (told.slack_s, told.queued, told.in_flight) == (1.5, 2, 2)
    world.advance(1.0)
    assert report(world).slack_s == 0.5


def test_a_request_with_a_token_waits_no_more() -> None:
    world = World()
    set_ttft_objective(world, 2.0)
    world.join("d0", Role.DECODE)
    world.arrive(request("r", max_tokens=50))
    assert report(world).slack_s == 2.0
    (leg_id,) = world.legs
    world.step(leg_id)
    assert report(world).slack_s is None


def test_predicted_time_of_a_placement_is_no_slack() -> None:
    world = World(policy=PredictedPlacer(PredictedOptions()))
    set_ttft_objective(world, 2.0)
    world.join("d0", Role.DECODE)
    world.arrive(request("r"))
    view = world.coordinator.fleet(0.0).replicas["d0"]
    ttft_s = world.coordinator.fleet_model.timings.of(view).prefill_s(40)
    assert report(world).slack_s == pytest.approx(2.0 - ttft_s, abs=1e-6)
    world.advance(1.0)
    assert report(world).slack_s == pytest.approx(1.0), "what was predicted is over"


def test_queued_requests_are_admitted_one_after_the_other() -> None:
    slo = Slo(ttft_s=2.0)
    waiting = [
        RequestState(request=evolve(request(f"r{number}"), arrived_at_s=0.1 * number), slo=slo)
        for number in range(4)
    ]
    ids = [entry.request_id for entry in waiting]
    # At 1 s the first has 1 s left and the last 1.3 s; the last goes after all 2 s.
    assert least_slack_s(waiting, 1.0, queued_ids=ids, drain_s=2.0) == pytest.approx(1.3 - 2.0)
    assert least_slack_s(waiting, 1.0, queued_ids=ids) == pytest.approx(1.0)
    assert least_slack_s(waiting, 1.0, queued_ids=ids[:1], drain_s=0.5) == pytest.approx(0.5)


def test_queued_work_is_reported_in_device_seconds_of_prefill() -> None:
    world = World()
    slos = SloClasses(classes={"default": Slo()})
    world.coordinator.reconfigure(rules=ServiceRules(slos=slos))
    world.arrive(request("r", prompt_tokens=40))
    assert (report(world).queued, report(world).queued_gpu_s) == (1, 0.0), "nobody could do it"
    machine = world.coordinator
    reporter = CoordinatorReporter(
        FleetTable(), machine.fleet_model, Accounts(FleetTable(), machine.fleet_model)
    )
    assert reporter.report("c", 0.0, requests={}, queued_ids=()).queued_gpu_s == 0.0
    fleet = FleetTable()
    fleet.add(replica_facts("p", Role.PREFILL, devices=2.0), 0.0)
    reporter = CoordinatorReporter(fleet, machine.fleet_model, Accounts(fleet, machine.fleet_model))
    entries = {
        name: RequestState(request=request(name, prompt_tokens=40)) for name in ("a", "b", "c")
    }
    told = reporter.report("c", 0.0, requests=entries, queued_ids=("a", "b"))
    view = fleet.get("p")
    assert view is not None
    alone_s = machine.fleet_model.timings.of(view).prefill_s(40)
    assert told.queued == 2
    assert told.queued_gpu_s == pytest.approx(2 * 2.0 * alone_s)


# ---------- totals of ended requests: everyone once, in a bounded number of rows
RECORD = RequestRecord(
    request_id="r",
    outcome=Phase.FINISHED,
    reason="",
    routes=(),
    decisions=(),
    prompt_tokens=100,
    cached_tokens=40,
    output_tokens=11,
    resumes=0,
    arrived_at_s=10.0,
    first_token_at_s=10.5,
    last_token_at_s=11.5,
    ended_at_s=11.5,
    prefill_done_at_s=None,
    handed_off_blocks=0,
    tenant="acme",
    slo=Slo(name="chat"),
    gpu_s=0.25,
)
NOT_SERVED = SloResult(was_served=False, ttft_met=True, tpot_met=True, itl_met=True)
LATE = ALL_MET._replace(ttft_met=False)


def refused(outcome: Phase) -> RequestRecord:
    return evolve(
        RECORD,
        outcome=outcome,
        slo_result=NOT_SERVED,
        first_token_at_s=None,
        last_token_at_s=None,
        output_tokens=0,
        cached_tokens=None,
    )


def test_a_request_is_counted_with_its_class_tenant_model_and_pool() -> None:
    board = SloTotals()
    board.record_request(RECORD, "decode", "tiny")
    assert board.tallies() == (
        Tally(
            "chat",
            "acme",
            "tiny",
            "decode",
            evaluated=1,
            good=1,
            ttft_met=1,
            tpot_met=1,
            itl_met=1,
            prompt_tokens=100,
            cached_tokens=40,
            output_tokens=11,
            gpu_s=0.25,
        ),
    )


def test_misses_are_evaluated_and_not_good() -> None:
    board = SloTotals()
    for record in (
        evolve(RECORD, slo_result=LATE),
        refused(Phase.SHED),
        refused(Phase.EVICTED),
        refused(Phase.FAILED),
    ):
        board.record_request(record, "", "")
    (row,) = board.tallies()
    assert (row.evaluated, row.good, row.excluded, row.client_errors) == (4, 0, 0, 0)
    assert (row.shed, row.evicted, row.failed, row.ttft_met) == (1, 1, 1, 3)


def test_a_client_error_is_neither_good_nor_a_miss() -> None:
    board = SloTotals()
    board.record_request(refused(Phase.SHED), "", "", is_client_error=True)
    (row,) = board.tallies()
    assert (row.client_errors, row.evaluated, row.shed, row.excluded) == (1, 0, 0, 0)


def test_a_disconnect_before_output_was_due_is_excluded() -> None:
    board = SloTotals()
    left = evolve(refused(Phase.CANCELLED), slo_result=ALL_MET)
    board.record_request(left, "", "")
    board.record_request(evolve(left, output_tokens=3), "", "")
    (row,) = board.tallies()
    assert (row.excluded, row.evaluated, row.good, row.cancelled) == (1, 1, 1, 2)


def test_a_prompt_that_no_replica_was_given_is_nothing_that_was_used() -> None:
    board = SloTotals()
    board.record_request(refused(Phase.SHED), "", "")
    (row,) = board.tallies()
    assert (row.evaluated, row.prompt_tokens) == (1, 0)


def test_latencies_fall_into_the_bucket_that_ends_at_or_above_them() -> None:
    board = SloTotals()
    for after_s in (LATENCY_BUCKET_BOUNDS_S[3], LATENCY_BUCKET_BOUNDS_S[3] * 1.01, 1e9):
        board.record_request(
            evolve(RECORD, first_token_at_s=10.0 + after_s, output_tokens=1), "", ""
        )
    seen = board.ttft_totals()
    assert [number for number, count in enumerate(seen.buckets) if count] == [
        3,
        4,
        len(LATENCY_BUCKET_BOUNDS_S),
    ]
    assert (seen.requests, len(seen.buckets)) == (3, len(LATENCY_BUCKET_BOUNDS_S) + 1)
    assert board.tpot_totals().requests == 0


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    board = SloTotals(max_rows=2)
    for number in range(10):
        board.record_request(evolve(RECORD, tenant=f"t{number}"), "decode", "tiny")
        board.add_gpu_s(f"t{number}", "decode", 1.0)
    by_tenant = {row.tenant: row.evaluated for row in board.tallies()}
    assert by_tenant == {"t0": 1, "t1": 1, OTHER: 8}
    assert {row.tenant: row.gpu_s for row in board.gpu_usage()} == {
        "t0": 1.0,
        "t1": 1.0,
        OTHER: 8.0,
    }
    board.add_gpu_s("t1", "decode", 0.5)
    assert {row.tenant: row.gpu_s for row in board.gpu_usage()}["t1"] == 1.5
    board.record_request(evolve(RECORD, tenant="t1"), "decode", "tiny")
    assert {row.tenant: row.evaluated for row in board.tallies()}["t1"] == 2


def test_demand_adds_up() -> None:
    board = SloTotals()
    board.record_request(RECORD, "", "", demand=DemandTotals(1, 100, 60.0, 11.0))
    board.record_request(RECORD, "", "", demand=DemandTotals(1, 50, 25.0, 4.5))
    assert board.demand == DemandTotals(2, 150, 85.0, 15.5)


JUDGEMENTS = st.builds(
    SloResult,
    was_served=st.booleans(),
    ttft_met=st.booleans(),
    tpot_met=st.booleans(),
    itl_met=st.booleans(),
)
ENDED = st.builds(
    lambda outcome, judgement, tenant, name, first_s, tokens: evolve(
        RECORD,
        outcome=outcome,
        slo_result=judgement,
        tenant=tenant,
        slo=Slo(name=name),
        first_token_at_s=None if first_s is None else 10.0 + first_s,
        output_tokens=0 if first_s is None else tokens,
    ),
    st.sampled_from([Phase.FINISHED, Phase.SHED, Phase.EVICTED, Phase.FAILED, Phase.CANCELLED]),
    JUDGEMENTS,
    st.sampled_from("abcdef"),
    st.sampled_from(["chat", "batch"]),
    st.none() | st.floats(0.0, 2000.0),
    st.integers(1, 9),
)


@given(st.lists(st.tuples(ENDED, st.booleans()), max_size=40), st.integers(1, 8))
def test_every_request_is_in_exactly_one_row_and_counted_one_way(
    ends: list[tuple[RequestRecord, bool]], most_rows: int
) -> None:
    board = SloTotals(max_rows=most_rows)
    for record, own_doing in ends:
        board.record_request(record, "d", "m", is_client_error=own_doing)
        board.check_integrity()
    rows = board.tallies()
    assert len(rows) <= most_rows + 2  # one more for each class, of everybody else
    assert sum(row.evaluated + row.excluded + row.client_errors for row in rows) == len(ends)
    assert all(row.good <= row.evaluated for row in rows)
    assert sum(row.client_errors for row in rows) == sum(own for _, own in ends)
    assert sum(row.prompt_tokens for row in rows) == 100 * sum(not own for _, own in ends)
    by_class = Counter(record.slo.name for record, _ in ends)
    told = Counter[str]()
    for row in rows:
        told[row.slo_class] += row.evaluated + row.excluded + row.client_errors
    assert +told == by_class
    took_s = [r.first_token_at_s - 10.0 for r, _ in ends if r.first_token_at_s is not None]
    wanted = Counter(bisect_left(LATENCY_BUCKET_BOUNDS_S, one_s) for one_s in took_s)
    assert {n: count for n, count in enumerate(board.ttft_totals().buckets) if count} == wanted
    assert board.ttft_totals().sum_s == pytest.approx(sum(took_s))
