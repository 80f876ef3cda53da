"""Frozen replicas in virtual time, and what becomes of the requests that run there."""

from __future__ import annotations

import random
from math import inf

import pytest

from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.engine.sim import expected_tokens
from baton.simulator.fleet.fleet import VirtualFleet
from baton.simulator.fleet.plans import limits_for, throttled_reporting
from baton.simulator.fleet.replica import ReportingOptions
from benchmarks._arrivals import open_loop, poisson_times
from tests.chaos.case import Outcome
from tests.chaos.cases.virtual import FleetRun, fail_everything, freeze
from tests.simulator.fleets import ENGINE, JOINED_S, ReceivedTokens, fleet, requests

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


def test_a_freeze_shorter_than_the_silence_moves_nobody() -> None:
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


def test_nobody_is_blamed_for_silence_where_replicas_report_less_than_live_ones() -> None:
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
