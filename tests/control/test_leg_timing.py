"""What is kept of each leg of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.events import StepCompleted
from baton.domain.fleet import Role
from baton.domain.handoff import LegFailure, LegKind, LegTimes
from baton.domain.leg_record import LegOutcome
from tests.control.world import World, request

TIMES = LegTimes(0.25, 0.5, 1)


def world_with(prefill: int = 1, decode: int = 1) -> World:
    world = World()
    world.join_prefill_decode(prefill, decode)
    return world


def say(world: World, leg_id: str, times: LegTimes) -> None:
    """One engine step for a leg whose engine says how it spent its time."""
    replica_id, _ = world.legs[leg_id]
    output = world.output(leg_id)._replace(times=times)
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))


def test_each_leg_has_its_replica_and_its_engines_report() -> None:
    world = world_with()
    world.arrive(request("r", max_tokens=2))
    world.now_s = 1.0
    say(world, "r~1", TIMES)
    world.now_s = 1.5
    say(world, "r~2", TIMES)
    world.now_s = 1.75
    world.step("r~2")
    first, second = world.records["r"].legs
    assert (first.kind, first.replica_id, first.engine_times) == (LegKind.PREFILL, "p0", TIMES)
    assert (first.started_at_s, first.first_output_at_s, first.ended_at_s) == (0.0, 1.0, 1.0)
    assert (first.output_tokens, first.last_output_at_s, first.fetched_tokens) == (0, None, 0)
    assert (second.kind, second.replica_id, second.outcome) == (
        LegKind.DECODE,
        "d0",
        LegOutcome.COMPLETED,
    )
    assert (second.started_at_s, second.first_output_at_s, second.ended_at_s) == (1.0, 1.5, 1.75)
    assert (second.output_tokens, second.last_output_at_s, second.fetched_tokens) == (2, 1.75, 40)


def test_the_last_report_of_an_engine_replaces_its_first() -> None:
    world = World()
    world.join("m", Role.MIXED)
    world.arrive(request("r", max_tokens=2))
    say(world, "r~1", TIMES)
    say(world, "r~1", TIMES._replace(preemptions=3))
    assert [leg.engine_times for leg in world.records["r"].legs] == [LegTimes(0.25, 0.5, 3)]


@pytest.mark.parametrize(
    "times",
    [
        LegTimes(float("nan"), 1.0),
        LegTimes(1.0, float("inf")),
        LegTimes(-1.0, 0.0),
        LegTimes(0, 0, -1),
    ],
)
def test_times_that_make_no_sense_were_not_said(times: LegTimes) -> None:
    world = world_with()
    world.arrive(request("r", max_tokens=1))
    say(world, "r~1", times)
    world.step("r~2")
    assert [leg.engine_times for leg in world.records["r"].legs] == [None, None]


def test_a_lost_leg_is_distinguished_from_its_successor() -> None:
    world = world_with(decode=2)
    world.arrive(request("r", max_tokens=3))
    world.step("r~1")
    world.now_s = 2.0
    world.step("r~2")
    world.now_s = 5.0
    world.disconnect(world.legs["r~2"][0])
    world.run_to_end()
    told = [
        (leg.route_index, leg.kind, leg.outcome, leg.output_tokens)
        for leg in world.records["r"].legs
    ]
    assert told == [
        (0, LegKind.PREFILL, LegOutcome.COMPLETED, 0),
        (0, LegKind.DECODE, LegOutcome.FAILED, 1),
        (1, LegKind.PREFILL, LegOutcome.COMPLETED, 0),
        (1, LegKind.DECODE, LegOutcome.COMPLETED, 2),
    ]
    assert world.records["r"].legs[1].last_output_at_s == 2.0


def test_a_leg_that_a_client_left_was_cancelled() -> None:
    world = world_with()
    world.arrive(request("r"))
    world.cancel("r")
    assert [leg.outcome for leg in world.records["r"].legs] == [LegOutcome.CANCELLED]


def test_a_leg_that_took_too_long_was_given_up() -> None:
    world = World(replace(World().limits, first_token_timeout_s=1.0, max_failures=0))
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.advance(2.0)
    assert [leg.outcome for leg in world.records["r"].legs] == [LegOutcome.TIMED_OUT]


def test_a_leg_that_its_engine_refused_is_broken() -> None:
    world = world_with()
    world.arrive(request("r"))
    world.fail_leg("r~1", LegFailure.REJECTED)
    assert [leg.outcome for leg in world.records["r"].legs] == [LegOutcome.FAILED]


def test_a_request_that_was_never_placed_has_no_legs() -> None:
    world = World()
    world.arrive(request("r"))
    world.cancel("r")
    assert world.records["r"].legs == ()
