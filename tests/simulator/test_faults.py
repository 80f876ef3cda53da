"""Scale-downs in virtual time: however long the streams, nothing is lost and the replica goes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.engine.sim import expected_tokens
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.fleet.fleet import VirtualFleet
from baton.simulator.fleet.plans import limits_for, throttled_reporting
from baton.simulator.fleet.replica import ReportingOptions
from baton.simulator.scenario import SimulationResult, Stop, StopReplica, simulate
from benchmarks._arrivals import open_loop, poisson_times
from tests.chaos.case import Outcome
from tests.chaos.cases.virtual import FleetRun, fail_everything, freeze
from tests.simulator.fleets import ENGINE, JOINED_S, ReceivedTokens, fleet, requests
from tests.simulator.scenes import pool, scenario, simultaneous_trace, trace

SOON = CoordinatorLimits(drain_timeout_s=1.0, max_drain_migrations=4)


def stopped_at_s(run: SimulationResult, name: str, replicas: int) -> float:
    """When the replica that was stopped was gone, from what its pool cost."""
    return run.replica_seconds[name] - (replicas - 1) * run.ended_at_s


@pytest.mark.parametrize("disaggregate", [Disaggregate.NEVER, Disaggregate.ALWAYS])
def test_long_streams_leave_a_replica_that_is_stopped_and_all_of_them_end(
    disaggregate: Disaggregate,
) -> None:
    pools = (pool(Role.PREFILL, 1), pool(Role.DECODE, 2))
    made = scenario(
        *pools,
        disaggregate=disaggregate,
        limits=SOON,
        scheduled_events=(StopReplica(at_s=1.0, replica_id="decode-1"),),
    )
    run = simulate(made, simultaneous_trace(12, prompt_tokens=200, output_tokens=1000))
    assert [outcome.output_tokens for outcome in run.outcomes] == [1000] * 12
    assert all(outcome.ok for outcome in run.outcomes)
    assert 0 < run.resumes <= 12, "nobody is moved twice"
    assert stopped_at_s(run, "decode", 2) < 3.5 < run.ended_at_s - 1.0


def test_with_a_longer_timeout_than_streams_need_no_stream_moves() -> None:
    patient = replace(SOON, drain_timeout_s=60.0)
    stop = StopReplica(at_s=1.0, replica_id="mixed-1")
    made = scenario(pool(Role.MIXED, 2), limits=patient, scheduled_events=(stop,))
    run = simulate(made, simultaneous_trace(12, prompt_tokens=200, output_tokens=1000))
    assert (run.resumes, sum(outcome.ok for outcome in run.outcomes)) == (0, 12)
    assert stopped_at_s(run, "mixed", 2) > 5.0


def test_scale_downs_one_after_the_other_under_load_lose_nothing() -> None:
    stops = tuple(Stop(at_s=1.0 + 1.5 * number, pool="mixed") for number in range(4))
    made = scenario(pool(Role.MIXED, 6), limits=SOON, scheduled_events=stops, coordinators=2)
    run = simulate(made, trace(250, rate_per_s=30.0))
    assert sum(outcome.ok for outcome in run.outcomes) == 250


def test_streams_that_were_moved_have_the_tokens_that_they_would_have_had() -> None:
    def told(*stopped: str) -> tuple[dict[str, tuple[int, ...]], int]:
        tokens, resumes = ReceivedTokens(), Counter[str]()
        placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.NEVER))
        brain = Coordinator(limits=replace(SOON, drain_timeout_s=0.2), placer=placer)
        made = fleet(replicas={Role.MIXED: 2}, coordinators=[brain], tokens=tokens)
        made.add_end_listener(lambda record: resumes.update({record.request_id: record.resumes}))
        for request in requests(6, max_tokens=200):
            made.send(request)
        made.run(until_s=JOINED_S + 0.5)
        for replica_id in stopped:
            made.retire(replica_id)
        made.run(until_s=JOINED_S + 60.0)
        assert set(stopped).isdisjoint(brain.fleet(0.0).replicas)
        return dict(tokens.by_request), resumes.total()

    whole, _ = told()
    moved, resumes = told("mixed-0")
    assert resumes > 0
    assert moved == whole
    assert {len(tokens) for tokens in moved.values()} == {200}


# ---------- frozen replicas in virtual time, and what becomes of the requests that run there
SMALL = FleetRun(
    rate_per_s=20.0, requests=120, prefill=1, decode=2, coordinators=1, output_tokens=24
)


def two_mixed(tokens: ReceivedTokens) -> VirtualFleet:
    return fleet(replicas={Role.MIXED: 2}, tokens=tokens)


def check(outcome: Outcome) -> None:
    missed = [bound for bound in outcome.bounds if not bound.is_met]
    assert missed == [], outcome.figures


@pytest.mark.parametrize("for_s", [0.5, 1.9, 4.0])
def test_every_token_comes_once_however_long_a_replica_is_frozen(for_s: float) -> None:
    tokens = ReceivedTokens()
    made = two_mixed(tokens)
    sent = requests(20, max_tokens=60)
    open_loop(made, sent, poisson_times(40.0, 20, random.Random(1), start_s=JOINED_S))
    made.timeline.call_at(JOINED_S + 0.3, lambda: made.freeze("mixed-0", for_s))
    made.run(until_ended=20, until_s=60.0)
    assert {record.outcome for record in made.records} == {Phase.FINISHED}
    for request in sent:
        wanted = expected_tokens(
            request.prompt_token_ids, request.max_tokens, model="sim", settings=ENGINE
        )
        assert tokens.by_request[request.request_id] == wanted
    made.run(until_s=made.timeline.now_s + for_s + ENGINE.lease_s)
    made.check_idle()


def test_a_frozen_replica_says_and_computes_nothing() -> None:
    made = two_mixed(ReceivedTokens())
    steps = made.replicas["mixed-0"].load().steps.steps
    heard_at_s = made.ingresses[0].coordinator.fleet(0.0).replicas["mixed-0"].load_received_at_s
    made.freeze("mixed-0", 1.5)
    for request in requests(8, max_tokens=60):
        made.send(request)
    made.run(until_s=JOINED_S + 1.0)
    assert made.replicas["mixed-0"].load().steps.steps == steps
    view = made.ingresses[0].coordinator.fleet(0.0).replicas["mixed-0"]
    assert view.load_received_at_s <= heard_at_s + 0.01


def test_a_freeze_shorter_than_the_heartbeat_timeout_moves_no_stream() -> None:
    made = two_mixed(ReceivedTokens())
    for request in requests(8, max_tokens=100):
        made.send(request)
    made.timeline.call_at(JOINED_S + 0.3, lambda: made.freeze("mixed-0", 1.0))
    made.run(until_ended=8, until_s=60.0)
    assert [record.resumes for record in made.records] == [0] * 8


def test_after_a_long_freeze_there_is_a_new_session() -> None:
    made = two_mixed(ReceivedTokens())
    made.freeze("mixed-0", 5.0)
    made.run(until_s=JOINED_S + 3.0)
    coordinator = made.ingresses[0].coordinator
    assert set(coordinator.fleet(0.0).replicas) == {"mixed-1"}
    made.run(until_s=JOINED_S + 6.0)
    assert set(coordinator.fleet(0.0).replicas) == {"mixed-0", "mixed-1"}


def test_a_replica_that_dies_while_it_is_frozen_stays_dead() -> None:
    made = two_mixed(ReceivedTokens())
    made.freeze("mixed-0", 5.0)
    made.timeline.call_at(JOINED_S + 1.0, lambda: made.kill("mixed-0"))
    made.run(until_s=JOINED_S + 8.0)
    assert set(made.ingresses[0].coordinator.fleet(0.0).replicas) == {"mixed-1"}


def test_without_regular_reports_there_is_no_heartbeat_timeout() -> None:
    live = CoordinatorLimits()
    assert limits_for(ReportingOptions(), live) == live
    assert (
        limits_for(ReportingOptions(report_unchanged=False), live).recovery.heartbeat_timeout_s
        == inf
    )
    assert limits_for(throttled_reporting(1000, 1), live).recovery.heartbeat_timeout_s == inf


# ---------------------------------------------------------------------- the cases, in small


def test_a_frozen_replica_under_load_costs_a_pause() -> None:
    check(freeze(SMALL))


def test_a_fleet_in_which_everything_fails_sees_no_storm() -> None:
    check(fail_everything(SMALL, duration_s=2.0))


# ---------- a decode replica whose transfer agent breaks is replaced, and nobody's request fails
BOUND_S = 180.0
"""From the fault until its replica is told: its pairs' probes, and those that prove its sources."""


def probing(seed: int) -> Coordinator:
    options = PredictedOptions(disaggregate=Disaggregate.ALWAYS)
    return Coordinator(
        limits=CoordinatorLimits(),
        placer=PredictedPlacer(options, seed=seed),
        probing=ProbeOptions(),
        seed=seed,
    )


class Replacing:
    """Does what Ray Serve does with a replica that says that it is broken."""

    def __init__(self, virtual: VirtualFleet) -> None:
        self._virtual = virtual
        self.replaced: list[tuple[float, str]] = []

    def __call__(self, replica_id: str) -> None:
        self.replaced.append((self._virtual.timeline.now_s, replica_id))
        self._virtual.retire(replica_id)
        self._virtual.add_replica(f"{replica_id}-next", ENGINE, role=Role.DECODE, pool="decode")


@pytest.mark.parametrize("busy", [True, False])
def test_one_broken_agent_among_well_ones_is_replaced_and_no_request_fails(*, busy: bool) -> None:
    virtual = fleet(
        replicas={Role.PREFILL: 2, Role.DECODE: 4}, coordinators=[probing(0), probing(1)]
    )
    virtual.on_replica_broken = replacing = Replacing(virtual)
    virtual.run(until_s=20.0)
    broken_at_s = virtual.timeline.now_s
    virtual.replicas["decode-2"].break_agent()
    sent = requests(400 if busy else 10)
    spacing_s = 400.0 / len(sent)
    for number, request in enumerate(sent):
        virtual.timeline.call_later(number * spacing_s, partial(virtual.send, request, number % 2))
    virtual.run(until_s=broken_at_s + 500.0)
    assert [replica_id for _, replica_id in replacing.replaced] == ["decode-2"]
    assert replacing.replaced[0][0] - broken_at_s < BOUND_S
    assert len(virtual.records) == len(sent)
    assert {record.outcome for record in virtual.records} == {Phase.FINISHED}
    assert "decode-2" not in virtual.replicas
    virtual.check_idle()


def test_where_every_agent_breaks_none_is_replaced() -> None:
    virtual = fleet(replicas={Role.PREFILL: 2, Role.DECODE: 4}, coordinators=[probing(0)])
    virtual.on_replica_broken = replacing = Replacing(virtual)
    virtual.run(until_s=20.0)
    for number in range(4):
        virtual.replicas[f"decode-{number}"].break_agent()
    virtual.run(until_s=600.0)
    assert not replacing.replaced
