"""The coordinator, edge by edge."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits, RecoveryOptions
from baton.domain.commands import AbortLegs, Deliver, FailRequest, ReleaseLease, SubmitLeg
from baton.domain.errors import (
    DeadlineExceeded,
    EngineFailed,
    Evicted,
    NoCapacity,
    NotResumable,
    QueueFull,
)
from baton.domain.events import LegsAborted, ReplicaJoined, RequestArrived, StepCompleted
from baton.domain.fleet import Load, LossReason, Role, StepTotals
from baton.domain.handoff import HandoffMode, LegFailure, LegKind, LegOutput, RouteReason
from baton.domain.request import FinishReason, LocalOnlyReason, Phase
from baton.policy.placement.port import Disaggregate
from tests.control.world import LIMITS, World, kv_handle_of, request
from tests.fakes.facts import replica_facts
from tests.fakes.placers import placer


def only_leg(world: World) -> str:
    (leg_id,) = world.legs
    return leg_id


def kinds(world: World) -> list[LegKind]:
    return [leg.kind for _, leg in world.legs.values()]


def test_a_request_is_prefilled_handed_off_and_decoded() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r", max_tokens=3))
    assert world.coordinator.phases() == {"r": Phase.PREFILL}
    world.step(only_leg(world))
    assert world.coordinator.phases() == {"r": Phase.TRANSFER}
    assert kinds(world) == [LegKind.DECODE]
    world.step(only_leg(world))
    assert world.coordinator.phases() == {"r": Phase.DECODE}
    world.run_to_end()
    record = world.records["r"]
    assert record.outcome is Phase.FINISHED
    assert world.tokens["r"] == [0, 1, 2]
    assert (record.output_tokens, record.resumes, record.handed_off_blocks) == (3, 0, 3)
    assert world.leased == {}


def test_the_prefill_leg_delivers_no_token() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.step(only_leg(world))
    assert world.tokens["r"] == []


def test_a_local_only_request_never_leaves_its_decode_replica() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r", local_only=LocalOnlyReason.PROMPT_LOGPROBS))
    world.run_to_end()
    (route,) = world.records["r"].routes
    assert (route.mode, route.decode_replica_id) == (HandoffMode.LOCAL, "d0")
    assert route.reason is RouteReason.LOCAL_ONLY


def test_without_a_prefill_replica_the_decode_replica_runs_both_phases() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r"))
    assert kinds(world) == [LegKind.LOCAL]
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED


def test_a_request_waits_for_the_first_replica_to_join() -> None:
    world = World()
    world.arrive(request("r"))
    assert world.coordinator.phases() == {"r": Phase.QUEUED}
    world.join_prefill_decode()
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED


def test_a_request_that_no_replica_takes_is_evicted_with_a_retry_time() -> None:
    world = World()
    world.arrive(request("r"))
    world.advance(LIMITS.queue_timeout_s)
    assert world.records["r"].outcome is Phase.EVICTED
    error = world.errors["r"]
    assert isinstance(error, NoCapacity)
    assert error.retry_after_s >= 1
    assert error.http_status == 503


def test_a_request_that_waits_for_a_draining_fleet_is_evicted_too() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.drain("d0")
    world.arrive(request("r"))
    world.advance(LIMITS.queue_timeout_s)
    assert isinstance(world.errors["r"], Evicted)


def test_a_full_queue_sheds_the_new_request_and_keeps_the_others() -> None:
    world = World(replace(LIMITS, max_queued_requests=1))
    world.arrive(request("first"))
    assert isinstance(world.coordinator.rejection(), QueueFull)
    world.arrive(request("second"))
    assert world.records["second"].outcome is Phase.SHED
    assert isinstance(world.errors["second"], QueueFull)
    assert world.coordinator.phases() == {"first": Phase.QUEUED}


def test_a_batch_larger_than_the_queue_is_admitted_while_it_is_empty() -> None:
    world = World(replace(LIMITS, max_queued_requests=2))
    world.join("m0", Role.MIXED)
    assert world.coordinator.rejection(requests=5) is None
    for number in range(5):
        world.arrive(request(f"r{number}"))
    assert not world.errors
    world.disconnect("m0")
    world.arrive(request("waits"))
    assert isinstance(world.coordinator.rejection(requests=5), QueueFull)


def test_a_batch_that_could_wait_is_refused_once_its_places_are_taken() -> None:
    world = World(replace(LIMITS, max_queued_requests=3))
    world.arrive(request("waits"))
    assert world.coordinator.rejection(requests=2) is None
    assert isinstance(world.coordinator.rejection(requests=3), QueueFull)


def test_more_requests_than_the_bound_are_shed() -> None:
    world = World(replace(LIMITS, max_requests=1))
    world.join_prefill_decode()
    assert world.coordinator.rejection() is None
    world.arrive(request("first"))
    assert isinstance(world.coordinator.rejection(), QueueFull)
    world.arrive(request("second"))
    assert world.records["second"].outcome is Phase.SHED


def test_a_prompt_over_the_bound_is_shed_as_a_client_error() -> None:
    world = World(replace(LIMITS, max_prompt_tokens=39))
    world.join_prefill_decode()
    world.arrive(request("r", prompt_tokens=40))
    assert world.records["r"].outcome is Phase.SHED
    assert world.errors["r"].http_status == 400
    world.arrive(request("fits", prompt_tokens=39))
    assert world.coordinator.phases() == {"fits": Phase.PREFILL}


def test_a_duplicate_id_does_not_disturb_the_stream_that_has_it() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    assert world.handle(RequestArrived(request=request("r"))) == []
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_lost_decode_replica_does_not_lose_or_repeat_a_token() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r", max_tokens=6))
    world.step(only_leg(world))
    for _ in range(3):
        world.step(only_leg(world))
    ((replica_id, _),) = world.legs.values()
    world.disconnect(replica_id)
    ((_, leg),) = world.legs.values()
    assert leg.resumed_tokens == 3
    assert leg.prompt_token_ids[-3:] == (0, 1, 2)
    assert leg.max_tokens == 3
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3, 4, 5]
    assert world.records["r"].resumes == 1


def test_a_stream_waits_for_its_only_replica_to_come_back() -> None:
    world = World()
    world.join("m0", Role.MIXED)
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.disconnect("m0")
    assert world.coordinator.phases() == {"r": Phase.QUEUED}
    world.advance(LIMITS.queue_timeout_s * 2)
    world.join("m0", Role.MIXED)
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_stream_whose_replica_never_comes_back_ends_in_an_error() -> None:
    world = World()
    world.join("m0", Role.MIXED)
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.disconnect("m0")
    world.advance(LIMITS.resume_timeout_s)
    assert world.records["r"].outcome is Phase.FAILED
    assert isinstance(world.errors["r"], EngineFailed)


def test_a_stream_that_cannot_be_carried_over_fails_honestly() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r", resumable=False))
    world.step(only_leg(world))
    world.step(only_leg(world))
    ((replica_id, _),) = world.legs.values()
    world.disconnect(replica_id)
    assert isinstance(world.errors["r"], NotResumable)


def test_a_request_that_cannot_be_carried_over_is_placed_again_before_its_first_token() -> None:
    world = World()
    world.join_prefill_decode(prefill=2)
    world.arrive(request("r", resumable=False))
    world.disconnect("p0")
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED


def test_a_lost_prefill_replica_only_delays_the_request() -> None:
    world = World()
    world.join_prefill_decode(prefill=2)
    world.arrive(request("r"))
    ((replica_id, _),) = world.legs.values()
    world.disconnect(replica_id)
    ((other, _),) = world.legs.values()
    assert {replica_id, other} == {"p0", "p1"}
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_handoff_to_a_lost_replica_goes_to_another() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r"))
    prefill_leg = only_leg(world)
    world.disconnect("d0")
    world.step(prefill_leg)
    ((replica_id, leg),) = world.legs.values()
    assert (replica_id, leg.kind) == ("d1", LegKind.DECODE)


def test_a_handoff_that_finds_no_decode_replica_is_finished_by_the_prefill_replica() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    prefill_leg = only_leg(world)
    world.disconnect("d0")
    world.step(prefill_leg)
    ((replica_id, leg),) = world.legs.values()
    assert (replica_id, leg.kind) == ("p0", LegKind.LOCAL)


def test_a_handoff_goes_to_a_replica_that_failed_before_when_no_other_is_left() -> None:
    world = World()
    world.join_prefill_decode(prefill=2)
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.fail_leg(only_leg(world), LegFailure.OVERLOADED)
    world.advance(LIMITS.retry_s)
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED


def test_many_bytes_have_twice_the_time_that_they_are_predicted_to_take() -> None:
    world = World()
    world.join("p0", Role.PREFILL, kv_block_bytes=10**10)
    world.join("d0", Role.DECODE, kv_block_bytes=10**10)
    world.arrive(request("r", prompt_tokens=48))
    predicted_s = world.coordinator.fleet_model.links.transfer_s("p0", "d0", 3 * 10**10)
    assert predicted_s is not None
    assert LIMITS.transfer_deadline_s < 2 * predicted_s < LIMITS.first_token_timeout_s
    world.step(only_leg(world))
    pulling = only_leg(world)
    world.advance(2 * predicted_s - 0.1)
    world.confirm_aborts()
    assert pulling in world.legs
    world.advance(0.2)
    world.confirm_aborts()
    assert pulling not in world.legs
    world.advance(LIMITS.retry_s)
    assert kinds(world) == [LegKind.LOCAL]


def test_a_transfer_over_its_deadline_becomes_local() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r"))
    world.step(only_leg(world))
    stuck = only_leg(world)
    world.advance(LIMITS.transfer_deadline_s)
    world.confirm_aborts()
    assert stuck not in world.legs
    assert kinds(world) == [LegKind.LOCAL]
    assert world.leased == {}
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def wait_in_queue(world: World, seconds: float, *, steps: bool) -> None:
    """Let time pass in which the decode replica has a queue; its engine may do steps meanwhile."""
    begun_at_s, done = world.now_s, 0
    while world.now_s < begun_at_s + seconds:
        done += steps
        queue = Load(queued_requests=3, running_requests=8, steps=StepTotals(steps=done))
        world.load("d0", queue)
        world.advance(LIMITS.transfer_deadline_s / 2)


def test_a_wait_for_a_place_is_not_taken_for_a_slow_transfer() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.step(only_leg(world))
    wait_in_queue(world, 2 * LIMITS.first_token_timeout_s, steps=True)
    assert world.coordinator.phases() == {"r": Phase.TRANSFER}
    assert world.aborting == []
    assert next(iter(world.coordinator.fleet_model.links.rows(world.now_s))).handoff_failures == 0
    world.load("d0", Load(steps=StepTotals(steps=999)))
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED
    assert [leg.kind for leg in world.records["r"].legs] == [LegKind.PREFILL, LegKind.DECODE]


def test_a_place_in_an_engine_that_does_no_steps_is_not_waited_for() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.step(only_leg(world))
    wait_in_queue(world, LIMITS.stall_timeout_s + LIMITS.transfer_deadline_s, steps=False)
    world.confirm_aborts()
    assert world.coordinator.phases() == {"r": Phase.PREFILL}
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_transfer_has_its_time_from_when_the_queue_before_it_was_gone() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.load("d0", Load(queued_requests=1))
    world.advance(LIMITS.transfer_deadline_s * 0.9)
    world.load("d0", Load())
    world.advance(LIMITS.transfer_deadline_s * 0.9)
    assert world.coordinator.phases() == {"r": Phase.TRANSFER}
    assert world.aborting == []
    world.advance(LIMITS.transfer_deadline_s * 0.2)
    assert len(world.aborting) == 1
    assert next(iter(world.coordinator.fleet_model.links.rows(world.now_s))).handoff_failures == 1


def test_a_queue_that_was_gone_before_the_handoff_gives_a_transfer_no_more_time() -> None:
    world = World()
    world.join_prefill_decode()
    world.load("d0", Load(queued_requests=1))
    world.load("d0", Load())
    world.advance(LIMITS.transfer_deadline_s * 0.5)
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.advance(LIMITS.transfer_deadline_s)
    assert len(world.aborting) == 1


def test_a_queue_at_its_replica_does_not_excuse_a_stalled_stream() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.step(only_leg(world))
    world.load("d0", Load(queued_requests=1))
    world.advance(LIMITS.stall_timeout_s)
    assert len(world.aborting) == 1


def test_a_stalled_stream_goes_on_elsewhere() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.step(only_leg(world))
    ((stalled, _),) = world.legs.values()
    world.advance(LIMITS.stall_timeout_s)
    assert {replica_id for replica_id, _ in world.aborting} == {stalled}
    world.confirm_aborts()
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]
    assert world.records["r"].routes[-1].decode_replica_id != stalled


def test_a_stream_that_stalls_is_noticed_long_before_a_first_token_would_be_late() -> None:
    world = World(replace(LIMITS, first_token_timeout_s=LIMITS.stall_timeout_s * 10))
    world.join_prefill_decode()
    world.arrive(request("r", local_only=LocalOnlyReason.FAN_OUT))
    world.step(only_leg(world))
    world.advance(LIMITS.stall_timeout_s)
    assert len(world.aborting) == 1


def test_progress_postpones_the_stall_deadline() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r", max_tokens=10))
    world.step(only_leg(world))
    for _ in range(5):
        world.step(only_leg(world))
        world.advance(LIMITS.stall_timeout_s * 0.9)
    world.advance(LIMITS.stall_timeout_s * 0.09)
    assert world.records == {}
    assert world.aborting == []
    world.advance(LIMITS.stall_timeout_s * 0.02)
    assert len(world.aborting) == 1


def test_a_request_over_its_total_deadline_ends() -> None:
    world = World(replace(LIMITS, total_timeout_s=5.0))
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.advance(5.0)
    assert isinstance(world.errors["r"], DeadlineExceeded)
    world.confirm_aborts()
    assert world.coordinator.unconfirmed_aborts() == 0


def test_a_refused_leg_fails_the_request_at_once() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r"))
    world.fail_leg(only_leg(world), LegFailure.REJECTED)
    assert isinstance(world.errors["r"], EngineFailed)


@pytest.mark.parametrize(
    "failure", [LegFailure.OVERLOADED, LegFailure.UNREACHABLE, LegFailure.ENGINE_ERROR]
)
def test_a_failed_leg_is_tried_elsewhere(failure: LegFailure) -> None:
    world = World()
    world.join_prefill_decode(prefill=2)
    world.arrive(request("r"))
    ((first, _),) = world.legs.values()
    world.fail_leg(only_leg(world), failure)
    ((second, _),) = world.legs.values()
    assert first != second


def test_a_replica_that_refuses_at_once_is_not_hammered() -> None:
    world = World()
    world.join("m0", Role.MIXED)
    world.arrive(request("r"))
    world.fail_leg(only_leg(world), LegFailure.OVERLOADED)
    assert world.legs == {}
    world.advance(LIMITS.retry_s)
    assert len(world.legs) == 1


def test_a_request_that_fails_everywhere_is_given_up() -> None:
    world = World(replace(LIMITS, max_failures=2))
    world.join_prefill_decode(decode=5)
    world.arrive(request("r", local_only=LocalOnlyReason.FAN_OUT))
    for _ in range(3):
        world.fail_leg(only_leg(world), LegFailure.ENGINE_ERROR)
    assert isinstance(world.errors["r"], EngineFailed)
    assert "3 failures" in str(world.errors["r"])


def test_a_broken_transfer_makes_the_request_local() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r"))
    world.step(only_leg(world))
    broken = only_leg(world)
    replica_id, _ = world.legs.pop(broken)
    output = LegOutput(broken, (), FinishReason.ERROR)
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))
    assert world.leased == {}, "the blocks that were not pulled are not needed any more"
    assert kinds(world) == [LegKind.LOCAL]
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_broken_prefill_that_hands_out_a_kv_handle_has_its_blocks_freed(
    finish: FinishReason,
) -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    leg_id = only_leg(world)
    replica_id, leg = world.legs.pop(leg_id)
    output = LegOutput(leg_id, (), finish, kv_handle=kv_handle_of(leg))
    commands = world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))
    (freed,) = [command.lease for command in commands if isinstance(command, ReleaseLease)]
    assert (freed.leg_id, freed.replica_id) == (leg_id, "p0")
    assert kinds(world) == [LegKind.LOCAL]
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_prefill_without_a_kv_handle_makes_the_request_local() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    leg_id = only_leg(world)
    world.legs.pop(leg_id)
    output = LegOutput(leg_id, (7,), FinishReason.LENGTH)
    world.handle(StepCompleted(replica_id="p0", outputs=(output,)))
    assert kinds(world) == [LegKind.LOCAL]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_cancelled_request_frees_both_engines_in_every_phase(steps: int) -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    for _ in range(steps):
        world.step(only_leg(world))
    world.cancel("r")
    assert world.records["r"].outcome is Phase.CANCELLED
    world.confirm_aborts()
    assert world.legs == {}
    assert world.leased == {}
    assert world.coordinator.unconfirmed_aborts() == 0
    assert all(v.inflight_legs == 0 for v in world.coordinator.fleet(0).replicas.values())


def test_cancelling_a_queued_or_unknown_request_is_harmless() -> None:
    world = World()
    world.arrive(request("r"))
    world.cancel("r", "r", "never-heard-of")
    assert world.records["r"].outcome is Phase.CANCELLED
    assert world.errors == {}


def test_a_kv_handle_that_comes_after_the_cancel_is_released() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    leg_id = only_leg(world)
    late = world.output(leg_id)
    world.cancel("r")
    commands = world.handle(StepCompleted(replica_id="p0", outputs=(late,)))
    assert [type(command) for command in commands] == [ReleaseLease]
    assert world.leased == {}


def test_an_output_of_an_unknown_leg_is_ignored_and_counted() -> None:
    world = World()
    world.join_prefill_decode()
    world.handle(StepCompleted(replica_id="d0", outputs=(LegOutput("ghost", (1,)),)))
    world.handle(LegsAborted(replica_id="d0", leg_ids=("ghost",)))
    assert world.coordinator.ignored_events == 2


def test_an_output_from_the_wrong_replica_is_ignored() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r", local_only=LocalOnlyReason.FAN_OUT))
    leg_id = only_leg(world)
    assert world.handle(StepCompleted(replica_id="d1", outputs=(LegOutput(leg_id, (1,)),))) == []
    assert world.tokens["r"] == []


def test_an_unconfirmed_abort_is_forgotten_after_its_deadline() -> None:
    world = World(
        replace(LIMITS, recovery=RecoveryOptions(heartbeat_timeout_s=inf))
    )  # nobody looks around
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.cancel("r")
    assert world.coordinator.unconfirmed_aborts() == 1
    assert world.coordinator.next_deadline_at_s() is not None
    world.advance(LIMITS.abort_s / 2)
    world.arrive(request("later"))  # whose own deadline is not the next one
    begun_at_s = world.now_s - LIMITS.abort_s / 2
    assert world.coordinator.next_deadline_at_s() == begun_at_s + LIMITS.abort_s
    world.advance(LIMITS.abort_s / 2)
    assert world.coordinator.unconfirmed_aborts() == 0


def test_the_lease_of_an_aborted_pull_is_released_when_the_puller_dies() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("r"))
    world.step(only_leg(world))
    ((puller, _),) = world.legs.values()
    world.cancel("r")
    world.disconnect(puller)
    assert world.leased == {}


def test_a_draining_replica_gets_no_new_work_and_finishes_its_own() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    world.arrive(request("old", local_only=LocalOnlyReason.FAN_OUT))
    ((draining, _),) = world.legs.values()
    world.drain(draining)
    world.arrive(request("new", local_only=LocalOnlyReason.FAN_OUT))
    assert {r for r, leg in world.legs.values() if leg.request_id == "new"} != {draining}
    world.run_to_end()
    assert world.records["old"].routes[-1].decode_replica_id == draining
    assert world.records["old"].outcome is Phase.FINISHED


def test_a_replica_that_joins_again_has_lost_what_ran_on_it() -> None:
    world = World()
    world.join("m0", Role.MIXED)
    world.arrive(request("r"))
    world.step(only_leg(world))
    world.legs.clear()
    world.handle(ReplicaJoined(facts=replica_facts("m0")))
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_replicas_of_different_layouts_hand_nothing_over() -> None:
    world = World()
    world.join("p0", Role.PREFILL, layout="block16")
    world.join("d0", Role.DECODE, layout="block32")
    world.arrive(request("r"))
    world.run_to_end()
    assert world.records["r"].routes[0].reason is RouteReason.INCOMPATIBLE


def test_disaggregation_can_be_turned_off() -> None:
    world = World(disaggregate=Disaggregate.NEVER)
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.run_to_end()
    assert world.records["r"].routes[0].reason is RouteReason.DISAGGREGATION_OFF


def test_the_last_token_reaches_the_client_before_the_record_is_written() -> None:
    world = World()
    world.join("m0", Role.MIXED)
    world.arrive(request("r", max_tokens=1))
    world.step(only_leg(world))
    assert isinstance(world.commands[-2], Deliver)


def test_one_step_is_one_delivery_for_all_its_streams() -> None:
    world = World()
    world.join("m0", Role.MIXED)
    for name in "abc":
        world.arrive(request(name))
    outputs = tuple(world.output(leg_id) for leg_id in tuple(world.legs))
    commands = world.handle(StepCompleted(replica_id="m0", outputs=outputs))
    assert [type(command) for command in commands] == [Deliver]


def test_an_idle_machine_asks_for_no_wake_up() -> None:
    machine = Coordinator(limits=CoordinatorLimits(), placer=placer(Disaggregate.ALWAYS))
    assert machine.next_deadline_at_s() is None


def test_a_lost_replica_with_two_streams_resumes_both_and_fails_none() -> None:
    world = World()
    world.join_prefill_decode(decode=2)
    for name in ("a", "b", "c"):
        world.arrive(request(name, local_only=LocalOnlyReason.FAN_OUT))
    world.disconnect("d0", LossReason.UNRESPONSIVE)
    world.run_to_end()
    assert world.errors == {}
    assert all(tokens == [0, 1, 2, 3] for tokens in world.tokens.values())


def test_commands_name_what_they_are_for() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.cancel("r")
    submits = [c for c in world.commands if isinstance(c, SubmitLeg)]
    aborts = [c for c in world.commands if isinstance(c, AbortLegs)]
    assert aborts[0].leg_ids == (submits[0].leg.leg_id,)
    assert not [c for c in world.commands if isinstance(c, FailRequest)]
