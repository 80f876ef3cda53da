"""What an engine refuses for what was asked is told once, and is nobody's failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.state.limits import RecoveryOptions
from baton.domain.errors import Cause, EngineFailed, RequestInvalid
from baton.domain.events import StepCompleted
from baton.domain.fleet import LossReason, Role
from baton.domain.handoff import LegFailure, LegKind, LegOutput
from baton.domain.leg_record import LegOutcome
from baton.domain.request import FinishReason, Phase
from baton.policy.resilience.circuit_breakers import BreakerOptions, CircuitState
from baton.policy.resilience.retry_budget import RetryOptions
from baton.telemetry.requests.outcomes import ReplicaOutcomes
from tests.control.world import LIMITS, World, request

ONE_FAILURE = RecoveryOptions(
    circuit_breaker=BreakerOptions(failure_threshold=1),
    retry_budget=RetryOptions(ratio=0.0, min_retries=0),
)
"""A circuit opens at once, and no second try can be paid for."""
STRICT = replace(LIMITS, recovery=ONE_FAILURE, max_failures=8)
WHY = "the grammar does not compile"


def refuse(world: World, leg_id: str, finish: FinishReason = FinishReason.INVALID) -> None:
    replica_id, _ = world.legs.pop(leg_id)
    output = LegOutput(leg_id, finish=finish, stop_reason=WHY)
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))


def assert_nobody_is_to_blame(world: World) -> None:
    assert set(world.coordinator.circuits(world.now_s).values()) <= {CircuitState.CLOSED}
    recoveries = world.coordinator.retry_totals()
    assert (sum(count for _, count in recoveries.retries), recoveries.denied) == (0, 0)
    assert recoveries.circuit_openings == 0


@pytest.mark.parametrize("kind", [LegKind.LOCAL, LegKind.PREFILL, LegKind.DECODE])
def test_a_request_that_its_engine_finds_wrong_is_answered_once(kind: LegKind) -> None:
    world = World(STRICT)
    if kind is LegKind.LOCAL:
        world.join("m0", Role.MIXED)
        world.join("m1", Role.MIXED)
    else:
        world.join_prefill_decode(2, 2)
    world.arrive(request("r"))
    ((leg_id, (replica_id, leg)),) = world.legs.items()
    if kind is LegKind.DECODE:
        world.step(leg_id)
        ((leg_id, (replica_id, leg)),) = world.legs.items()
    assert leg.kind is kind
    refuse(world, leg_id)
    error = world.errors["r"]
    assert isinstance(error, RequestInvalid)
    assert (error.http_status, error.retryable, error.cause) == (400, False, Cause.INVALID_REQUEST)
    assert WHY in str(error)
    assert replica_id not in str(error), "which replica it was is nothing to a client"
    assert (world.legs, world.leased, world.aborting) == ({}, {}, [])
    record = world.records["r"]
    assert (record.outcome, record.legs[-1].outcome) == (Phase.FAILED, LegOutcome.REJECTED)
    assert_nobody_is_to_blame(world)


def test_a_leg_that_is_invalid_for_its_engine_is_answered_once_and_as_the_clients_error() -> None:
    world = World(STRICT)
    world.join_prefill_decode(2, 2)
    for number in range(20):
        world.arrive(request(f"r{number}", arrived_at_s=world.now_s))
        (leg_id,) = world.legs
        world.fail_leg(leg_id, LegFailure.INVALID)
    assert {type(error) for error in world.errors.values()} == {RequestInvalid}
    assert_nobody_is_to_blame(world)


@pytest.mark.parametrize("how", ["submit", "output"])
def test_an_engines_own_inability_is_an_internal_error_sent_once(
    how: str,
) -> None:
    world = World(STRICT)
    world.join_prefill_decode(2, 2)
    world.arrive(request("r"))
    (leg_id,) = world.legs
    if how == "submit":
        world.fail_leg(leg_id, LegFailure.REJECTED)
    else:
        refuse(world, leg_id, FinishReason.REJECTED)
    error = world.errors["r"]
    assert isinstance(error, EngineFailed)
    assert error.http_status == 500
    assert world.records["r"].legs[-1].outcome is LegOutcome.FAILED
    assert_nobody_is_to_blame(world)


def test_a_request_of_which_an_engine_has_given_tokens_is_not_called_wrong() -> None:
    world = World(LIMITS)
    world.join("m0", Role.MIXED)
    world.join("m1", Role.MIXED)
    world.arrive(request("r", max_tokens=9))
    ((leg_id, (replica_id, _)),) = world.legs.items()
    world.step(leg_id)
    world.disconnect(replica_id)
    (leg_id,) = world.legs
    refuse(world, leg_id)
    assert isinstance(world.errors["r"], EngineFailed)


def test_a_refusal_decides_nothing_about_a_replica_on_trial() -> None:
    world = World(
        replace(
            LIMITS, recovery=RecoveryOptions(circuit_breaker=BreakerOptions(failure_threshold=1))
        )
    )
    world.join("m0", Role.MIXED)
    world.join("m1", Role.MIXED)
    world.arrive(request("r0"))
    ((leg_id, (ailing, _)),) = world.legs.items()
    world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
    world.run_to_end()
    world.advance_with_heartbeats(1.25)
    for number in range(1, 5):
        world.arrive(request(f"r{number}", arrived_at_s=world.now_s))
    (trial,) = [name for name, (where, _) in world.legs.items() if where == ailing]
    refuse(world, trial)
    assert world.coordinator.circuits(world.now_s)[ailing] is CircuitState.HALF_OPEN
    world.arrive(request("r9", arrived_at_s=world.now_s))
    (trial,) = [name for name, (where, _) in world.legs.items() if where == ailing]
    world.step(trial)
    assert world.coordinator.circuits(world.now_s)[ailing] is CircuitState.CLOSED


def test_a_refusal_of_a_leg_that_was_given_up_is_no_news() -> None:
    world = World(LIMITS)
    world.join("m0", Role.MIXED)
    world.arrive(request("r"))
    ((leg_id, (replica_id, _)),) = world.legs.items()
    world.cancel("r")
    output = LegOutput(leg_id, finish=FinishReason.INVALID, stop_reason=WHY)
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))
    world.advance_with_heartbeats(30.0)
    assert "r" not in world.errors
    assert_nobody_is_to_blame(world)


def test_invalid_requests_do_not_count_against_the_generation() -> None:
    world = World(STRICT)
    world.join_prefill_decode()
    world.arrive(request("r"))
    (leg_id,) = world.legs
    refuse(world, leg_id)
    outcomes = ReplicaOutcomes()
    outcomes.record(world.records["r"])
    assert outcomes.tallies() == {}


# ---------------------------------------------------------------------- what really kills engines


@pytest.mark.parametrize("reason", [LossReason.ENGINE_DEAD, LossReason.DISCONNECTED])
def test_a_request_that_kills_its_engines_kills_three_at_most(reason: LossReason) -> None:
    world = World(replace(LIMITS, max_failures=8))
    for number in range(8):
        world.join(f"m{number}", Role.MIXED)
    world.arrive(request("poison"))
    killed = 0
    while world.legs:
        ((_, (replica_id, _)),) = world.legs.items()
        world.disconnect(replica_id, reason)
        killed += 1
    assert killed == 3
    error = world.errors["poison"]
    assert isinstance(error, EngineFailed)
    assert "3 replicas in a row died" in str(error)


def test_a_stream_that_gets_on_in_between_outlives_any_number_of_engines() -> None:
    world = World(replace(LIMITS, max_failures=8))
    for number in range(8):
        world.join(f"m{number}", Role.MIXED)
    world.arrive(request("r", max_tokens=30))
    for _ in range(6):
        ((leg_id, (replica_id, _)),) = world.legs.items()
        world.step(leg_id)
        world.disconnect(replica_id, LossReason.ENGINE_DEAD)
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED


@pytest.mark.parametrize(
    "reason", [LossReason.LEFT, LossReason.OUT_OF_SYNC, LossReason.UNRESPONSIVE]
)
def test_replicas_that_go_for_other_reasons_are_not_held_against_a_request(
    reason: LossReason,
) -> None:
    world = World(replace(LIMITS, max_failures=8))
    for number in range(6):
        world.join(f"m{number}", Role.MIXED)
    world.arrive(request("r"))
    for _ in range(4):
        ((_, (replica_id, _)),) = world.legs.items()
        world.disconnect(replica_id, reason)
    world.run_to_end()
    assert world.records["r"].outcome is Phase.FINISHED
