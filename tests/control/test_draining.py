"""Replicas that drain: streams end there or are moved, few at a time, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.control.state.limits import CoordinatorLimits, RecoveryOptions
from baton.domain.fleet import Load, Role
from baton.domain.handoff import LegFailure, LegKind
from baton.domain.leg_record import LegOutcome
from baton.domain.request import Phase
from tests.control.world import LIMITS, World, request

PATIENT = replace(
    LIMITS,
    drain_timeout_s=5.0,
    max_drain_migrations=2,
    stall_timeout_s=1e4,
    first_token_timeout_s=1e4,
    total_timeout_s=1e5,
    recovery=RecoveryOptions(heartbeat_timeout_s=inf),  # replicas say nothing here
)


def streams(count: int, limits: CoordinatorLimits = PATIENT, *, max_tokens: int = 50) -> World:
    """So many streams that have begun on d0, which drains from now on; d1 has joined since."""
    world = World(limits)
    world.join("d0", Role.DECODE)
    for number in range(count):
        world.arrive(request(f"r{number}", max_tokens=max_tokens))
    for leg_id in list(world.legs):
        world.step(leg_id)
    world.join("d1", Role.DECODE)
    world.drain("d0")
    return world


def on(world: World, replica_id: str) -> list[str]:
    """Requests that run there, as the machine has it: those whose abort is asked for do not."""
    aborting = {leg_id for _, leg_id in world.aborting}
    return sorted(
        leg.request_id
        for leg_id, (where, leg) in world.legs.items()
        if where == replica_id and leg_id not in aborting
    )


def step_all(world: World, replica_id: str) -> None:
    aborting = {leg_id for _, leg_id in world.aborting}
    for leg_id, (where, _) in list(world.legs.items()):
        if where == replica_id and leg_id not in aborting:
            world.step(leg_id)


def test_streams_may_end_where_they_are_within_the_drain_timeout() -> None:
    world = streams(3, max_tokens=5)
    world.advance(4.9)
    assert len(on(world, "d0")) == 3
    world.run_to_end()
    assert {record.resumes for record in world.records.values()} == {0}
    world.advance(100.0)
    assert world.coordinator.next_deadline_at_s() is None


def test_streams_that_take_longer_are_moved_with_their_tokens() -> None:
    world = streams(2)
    world.advance(5.0)
    assert (on(world, "d0"), on(world, "d1")) == ([], ["r0", "r1"])
    world.run_to_end()
    assert world.tokens == {"r0": list(range(50)), "r1": list(range(50))}
    for record in world.records.values():
        assert (record.outcome, record.resumes) == (Phase.FINISHED, 1)
        assert record.resume_reasons == ("d0: it drains",)
        assert [leg.outcome for leg in record.legs] == [LegOutcome.MIGRATED, LegOutcome.COMPLETED]


def test_no_more_are_under_way_at_a_time_than_allowed() -> None:
    world = streams(5)
    world.advance(5.0)
    assert on(world, "d1") == ["r0", "r1"]
    world.advance(10.0)
    assert on(world, "d1") == ["r0", "r1"], "neither has a token there yet"
    world.step("r0~2")
    world.advance(0.25)
    assert on(world, "d1") == ["r0", "r1", "r2"]
    world.cancel("r1")
    world.advance(0.25)
    assert on(world, "d1") == ["r0", "r2", "r3"]


def test_the_bound_holds_over_all_replicas_that_drain() -> None:
    world = streams(2)
    world.join("d2", Role.DECODE)
    world.arrive(request("x", max_tokens=50))
    step_all(world, "d1")
    step_all(world, "d2")
    world.drain("d1")
    world.advance(5.0)
    assert len(on(world, "d2")) == 2


def test_no_request_moves_while_no_other_replica_takes_work() -> None:
    world = streams(1)
    world.disconnect("d1")
    world.advance(60.0)
    assert on(world, "d0") == ["r0"]
    world.join("d2", Role.DECODE)
    world.advance(0.25)
    assert on(world, "d2") == ["r0"]


@pytest.mark.parametrize(
    "full",
    [
        Load(running_requests=64),
        Load(running_requests=60, queued_requests=4),
        Load(kv_used_fraction=0.95),
    ],
)
def test_no_request_moves_to_a_replica_without_room(full: Load) -> None:
    world = streams(1)
    world.load("d1", full)
    world.advance(10.0)
    assert on(world, "d0") == ["r0"]
    world.load("d1", Load())
    world.advance(0.25)
    assert on(world, "d1") == ["r0"]


def test_requests_just_sent_take_room_too() -> None:
    world = streams(1)
    world.load("d1", Load(running_requests=63))
    world.arrive(request("x", max_tokens=50))
    assert on(world, "d1") == ["x"]
    world.advance(10.0)
    assert on(world, "d0") == ["r0"]


def test_no_request_moves_to_a_replica_where_it_failed() -> None:
    world = World(PATIENT)
    world.join("d0", Role.DECODE)
    world.join("d1", Role.DECODE)
    world.arrive(request("r", max_tokens=50))
    ((leg_id, (failed_on, _)),) = world.legs.items()
    world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
    ((leg_id, (runs_on, _)),) = world.legs.items()
    assert runs_on != failed_on
    world.step(leg_id)
    world.drain(runs_on)
    world.advance(10.0)
    assert on(world, runs_on) == ["r"]
    world.join("d2", Role.DECODE)
    world.advance(0.25)
    assert on(world, "d2") == ["r"]


def test_a_stream_that_cannot_be_carried_over_ends_where_it_is() -> None:
    world = World(PATIENT)
    world.join("d0", Role.DECODE)
    world.arrive(request("r", max_tokens=50, resumable=False))
    step_all(world, "d0")
    world.join("d1", Role.DECODE)
    world.drain("d0")
    world.advance(60.0)
    world.run_to_end()
    assert (world.records["r"].outcome, world.records["r"].resumes) == (Phase.FINISHED, 0)


def test_a_prompt_is_computed_where_it_is_and_moved_once_it_streams() -> None:
    world = World(PATIENT)
    world.join("d0", Role.DECODE)
    world.arrive(request("r", max_tokens=50))
    world.join("d1", Role.DECODE)
    world.drain("d0")
    world.advance(60.0)
    assert on(world, "d0") == ["r"]
    world.step("r~1")
    world.advance(0.25)
    assert on(world, "d1") == ["r"]


def test_a_prefill_replica_finishes_its_prompts_and_keeps_their_blocks() -> None:
    world = World(PATIENT)
    world.join_prefill_decode(prefill=2, decode=1)
    world.arrive(request("r"))
    (leg_id,) = world.legs
    prefiller, _ = world.legs[leg_id]
    world.drain(prefiller)
    world.advance(20.0)
    world.step(leg_id)
    assert [leg.kind for _, leg in world.legs.values()] == [LegKind.DECODE]
    assert world.leased == {leg_id: prefiller}
    world.run_to_end()
    assert world.records["r"].resumes == 0


def test_a_drain_timeout_begins_once() -> None:
    world = streams(1)
    world.advance(4.0)
    world.drain("d0")
    world.advance(1.0)
    assert on(world, "d1") == ["r0"]


def test_a_changed_drain_timeout_holds_for_the_next_drain() -> None:
    world = streams(1)
    world.coordinator.reconfigure(
        limits=replace(PATIENT, drain_timeout_s=1.0, max_drain_migrations=7)
    )
    world.advance(1.0)
    assert on(world, "d0") == ["r0"]
    world.join("d2", Role.DECODE)
    world.arrive(request("x", max_tokens=50))
    ((where, _),) = [at for at in world.legs.values() if at[1].request_id == "x"]
    step_all(world, where)
    world.drain(where)
    world.advance(1.0)
    assert "x" not in on(world, where)


def test_a_replica_that_is_lost_or_joins_again_drains_no_more() -> None:
    world = streams(1)
    world.disconnect("d0")
    assert on(world, "d1") == ["r0"]
    world.step("r0~2")
    world.join("d0", Role.DECODE)
    world.advance(60.0)
    assert on(world, "d1") == ["r0"]


class DrainMachine(RuleBasedStateMachine):
    """Decode replicas join, drain and leave once they run nothing; streams never end badly."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(replace(PATIENT, drain_timeout_s=1.0, max_failures=0))
        self.draining: set[str] = set()
        self.count = self.replicas = 0

    @initialize()
    def two(self) -> None:
        self.join()
        self.join()

    @rule()
    def join(self) -> None:
        if len(self.world.alive) < 5:
            self.replicas += 1
            self.world.join(f"d{self.replicas}", Role.DECODE)

    @rule(tokens=st.integers(1, 30))
    def arrive(self, tokens: int) -> None:
        self.count += 1
        self.world.arrive(request(f"r{self.count}", max_tokens=tokens))

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        working = sorted(self.world.alive.keys() - self.draining)
        if len(working) > 1:
            chosen = data.draw(st.sampled_from(working))
            self.draining.add(chosen)
            self.world.drain(chosen)

    @precondition(lambda self: self.world.legs)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.world.step(data.draw(st.sampled_from(sorted(self.world.legs))))

    @rule(seconds=st.sampled_from([0.1, 0.25, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def confirm(self) -> None:
        self.world.confirm_aborts()

    @rule()
    def leave(self) -> None:
        for replica_id in sorted(self.draining):
            if all(where != replica_id for where, _ in self.world.legs.values()):
                self.draining.discard(replica_id)
                self.world.disconnect(replica_id)

    @invariant()
    def nothing_fails(self) -> None:
        assert not self.world.errors

    @invariant()
    def tokens_are_in_order(self) -> None:
        for request_id, tokens in self.world.tokens.items():
            assert tokens == list(range(len(tokens))), request_id

    @invariant()
    def at_most_two_are_being_moved(self) -> None:
        phases = self.world.coordinator.phases()
        moving = [
            leg.request_id
            for _, leg in self.world.legs.values()
            if leg.resumed_tokens and phases.get(leg.request_id) is Phase.PREFILL
        ]
        assert len(set(moving)) <= 2

    def teardown(self) -> None:
        # Streams that nobody advances: a drain ends all the same, as long as others have room.
        for _ in range(60):
            self.wait(0.25)
            self.confirm()
            self.leave()
            for leg_id, (where, _) in list(self.world.legs.items()):
                if where not in self.draining:
                    self.world.step(leg_id)
        self.world.run_to_end()
        assert {r.outcome for r in self.world.records.values()} <= {Phase.FINISHED}
        assert self.world.requests.keys() == self.world.records.keys()


TestDrains = DrainMachine.TestCase
TestDrains.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
