"""Second tries: who is left and when, who pays for it, and what a client is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from baton.control.state.limits import CoordinatorLimits, RecoveryOptions
from baton.domain.commands import SubmitLeg
from baton.domain.errors import EngineFailed, RetryBudgetExhausted
from baton.domain.events import TimerFired
from baton.domain.fleet import Health, Load, LossReason, Role, StepTotals
from baton.domain.handoff import LegFailure
from baton.domain.leg_record import LegOutcome
from baton.domain.request import FinishReason, Phase
from baton.domain.retry_reasons import RetryReason
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.resilience.circuit_breakers import BreakerOptions, CircuitState
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.liveness import IDLE_GRACE_S
from baton.policy.resilience.retry_budget import RetryOptions
from tests.control.world import LIMITS, World, request
from tests.fakes.timings import LinearTiming

QUICK = replace(LIMITS, stall_timeout_s=1e4, first_token_timeout_s=1e4, total_timeout_s=1e5)
"""Nothing is given up for its own slowness."""
NO_BUDGET = RecoveryOptions(retry_budget=RetryOptions(ratio=0.0, min_retries=0))


def mixed(count: int, limits: CoordinatorLimits = QUICK) -> World:
    world = World(limits)
    for number in range(count):
        world.join(f"m{number}", Role.MIXED)
    return world


def arrive(world: World, count: int, *, max_tokens: int = 9, resumable: bool = True) -> None:
    for _ in range(count):
        name = f"r{len(world.requests)}"
        world.arrive(
            request(name, max_tokens=max_tokens, resumable=resumable, arrived_at_s=world.now_s)
        )


def legs_on(world: World, replica_id: str) -> list[str]:
    return [leg_id for leg_id, (where, _) in world.legs.items() if where == replica_id]


def fail_all(world: World, replica_id: str, failure: LegFailure = LegFailure.ENGINE_ERROR) -> None:
    for leg_id in legs_on(world, replica_id):
        world.fail_leg(leg_id, failure)


def health(world: World, replica_id: str) -> Health:
    return world.coordinator.fleet(world.now_s).replicas[replica_id].health


def tries(world: World, trouble: RetryReason) -> int:
    return dict(world.coordinator.retry_totals().retries)[trouble]


def freeze(world: World, replica_id: str) -> None:
    """Nothing comes of what was said to it any more."""
    world.legs = {name: leg for name, leg in world.legs.items() if leg[0] != replica_id}


# ---------------------------------------------------------------------- silence


def test_all_streams_of_a_frozen_replica_are_moved_at_once_and_finish_elsewhere() -> None:
    world = mixed(2)
    arrive(world, 8)
    for leg_id in tuple(world.legs):
        world.step(leg_id)
    frozen = legs_on(world, "m0")
    assert len(frozen) == 4
    freeze(world, "m0")
    world.advance_with_heartbeats(1.75, frozen={"m0"})
    assert len(legs_on(world, "m1")) == 8
    assert tries(world, RetryReason.UNRESPONSIVE) == 4
    world.run_to_end()
    assert {record.outcome for record in world.records.values()} == {Phase.FINISHED}
    moved = [record for record in world.records.values() if record.resumes]
    assert len(moved) == 4
    for record in moved:
        assert [leg.outcome for leg in record.legs] == [LegOutcome.TIMED_OUT, LegOutcome.COMPLETED]
        assert "watchdog: nothing was heard" in record.resume_reasons[0]


def test_no_stream_moves_before_the_heartbeat_timeout() -> None:
    world = mixed(2)
    arrive(world, 2)
    world.advance_with_heartbeats(1.25, frozen={"m0"})
    assert world.aborting == []
    assert health(world, "m0") is Health.UNRESPONSIVE


def test_a_suspect_gets_no_new_work() -> None:
    world = mixed(2)
    arrive(world, 2)
    world.advance_with_heartbeats(1.0, frozen={"m0"})
    arrive(world, 6)
    assert len(legs_on(world, "m0")) == 1


def test_an_idle_replica_may_send_fewer_heartbeats() -> None:
    world = mixed(2)
    arrive(world, 1)
    idle = next(name for name in ("m0", "m1") if not legs_on(world, name))
    for _ in range(4):
        world.load(idle, Load())
        world.advance_with_heartbeats(0.25 + IDLE_GRACE_S, frozen={idle})
        assert health(world, idle) is Health.HEALTHY
    world.advance_with_heartbeats(1.0, frozen={idle})
    assert health(world, idle) is Health.UNRESPONSIVE


def test_a_formerly_idle_replica_with_work_must_send_heartbeats() -> None:
    world = mixed(2)
    arrive(world, 1)
    idle = next(name for name in ("m0", "m1") if not legs_on(world, name))
    world.load(idle, Load())
    arrive(world, 1)
    assert legs_on(world, idle)
    freeze(world, idle)
    world.advance_with_heartbeats(1.75, frozen={idle})
    assert legs_on(world, idle) == []
    assert tries(world, RetryReason.UNRESPONSIVE) == 1


def test_a_replica_that_talks_again_in_time_keeps_its_streams() -> None:
    world = mixed(2)
    arrive(world, 2)
    world.advance_with_heartbeats(1.25, frozen={"m0"})
    world.load("m0", Load())
    assert health(world, "m0") is Health.HEALTHY
    world.advance_with_heartbeats(1.25)
    assert world.aborting == []


def test_without_any_heartbeat_streams_stay_where_they_are() -> None:
    """It is likelier that this end is cut off; and there is nowhere to go."""
    world = mixed(2)
    arrive(world, 2)
    world.advance_with_heartbeats(5.0, frozen={"m0", "m1"})
    assert world.aborting == []


def test_a_process_that_stood_still_itself_blames_no_replica() -> None:
    world = mixed(2)
    arrive(world, 2)
    world.advance_with_heartbeats(0.5)
    world.advance(60.0)
    assert world.aborting == []
    assert health(world, "m0") is Health.HEALTHY


def test_a_stream_that_cannot_be_carried_over_waits_for_its_frozen_replica() -> None:
    world = mixed(2)
    arrive(world, 2, resumable=False)
    for leg_id in tuple(world.legs):
        world.step(leg_id)
    world.advance_with_heartbeats(3.0, frozen={"m0"})
    assert world.aborting == []
    world.run_to_end()
    assert {record.outcome for record in world.records.values()} == {Phase.FINISHED}


def test_a_frozen_replica_that_is_back_is_tried_with_one_request_first() -> None:
    world = mixed(2)
    arrive(world, 2)
    freeze(world, "m0")
    world.advance_with_heartbeats(2.0, frozen={"m0"})
    world.disconnect("m0", LossReason.UNRESPONSIVE)
    world.join("m0", Role.MIXED)
    arrive(world, 3)
    (trial,) = legs_on(world, "m0")
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.HALF_OPEN
    world.step(trial)
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.CLOSED
    arrive(world, 3)
    assert len(legs_on(world, "m0")) > 1


def test_an_engine_that_hangs_is_left_by_all_when_one_stream_has_stalled() -> None:
    """The replica talks, and says that it has work; requests without a token go, too."""
    world = mixed(2, replace(LIMITS, stall_timeout_s=4.0))
    arrive(world, 8)
    world.step(legs_on(world, "m0")[0])
    hanging = Load(running_requests=4, steps=StepTotals(steps=7))
    for number in range(17):
        world.load("m0", hanging)
        world.load("m1", Load(running_requests=4, steps=StepTotals(steps=number)))
        world.advance(0.25)
        for leg_id in legs_on(world, "m1"):
            if len(world.tokens[world.legs[leg_id][1].request_id]) < 3:
                world.step(leg_id)
    assert tries(world, RetryReason.ENGINE_STALLED) == 4
    assert {replica_id for replica_id, _ in world.aborting} == {"m0"}
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.OPEN


def test_a_slow_engine_that_still_steps_is_left_by_the_stalled_stream_only() -> None:
    world = mixed(2, replace(LIMITS, stall_timeout_s=4.0))
    arrive(world, 8)
    world.step(legs_on(world, "m0")[0])
    for number in range(17):
        for replica_id in ("m0", "m1"):
            world.load(replica_id, Load(running_requests=4, steps=StepTotals(steps=number)))
        world.advance(0.25)
    assert tries(world, RetryReason.ENGINE_STALLED) == 0
    assert tries(world, RetryReason.TOKEN_TIMEOUT) == 1


# ---------------------------------------------------------------------- circuits


def test_a_replica_that_fails_request_after_request_gets_no_more() -> None:
    world = mixed(2)
    arrive(world, 6)
    fail_all(world, "m0")
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.OPEN
    arrive(world, 4)
    assert legs_on(world, "m0") == []


def test_after_its_pause_one_request_decides() -> None:
    world = mixed(2)
    arrive(world, 6)
    fail_all(world, "m0")
    world.advance_with_heartbeats(1.25)
    arrive(world, 3)
    (trial,) = legs_on(world, "m0")
    world.fail_leg(trial, LegFailure.ENGINE_ERROR)
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.OPEN
    world.advance_with_heartbeats(1.25)
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.OPEN
    world.advance_with_heartbeats(1.0)
    arrive(world, 1)
    (trial,) = legs_on(world, "m0")
    world.step(trial)
    assert health(world, "m0") is Health.HEALTHY


def test_where_every_circuit_is_open_all_replicas_are_used() -> None:
    world = mixed(2)
    arrive(world, 12)
    fail_all(world, "m0")
    fail_all(world, "m1")
    assert set(world.coordinator.circuits(world.now_s).values()) == {CircuitState.OPEN}
    before = len(world.records)
    arrive(world, 2)
    assert len(world.records) == before, "they were let in"


def test_when_the_first_of_all_is_well_again_all_are_tried() -> None:
    """What failed everywhere at once was not the replicas: one must not carry the whole load."""
    world = mixed(4)
    arrive(world, 24)
    for number in range(4):
        fail_all(world, f"m{number}")
    world.advance_with_heartbeats(0.25)
    assert set(world.coordinator.circuits(world.now_s).values()) == {CircuitState.OPEN}
    arrive(world, 1)
    world.step(next(reversed(world.legs)))
    circuits = Counter(world.coordinator.circuits(world.now_s).values())
    assert circuits == {CircuitState.CLOSED: 1, CircuitState.HALF_OPEN: 3}


def test_a_request_that_fails_everywhere_is_blamed_on_no_third_replica() -> None:
    """One poisoned request must not have the whole fleet quarantined."""
    one_is_enough = RecoveryOptions(circuit_breaker=BreakerOptions(failure_threshold=1))
    world = mixed(4, replace(QUICK, recovery=one_is_enough))
    arrive(world, 1)
    for _ in range(4):
        (leg_id,) = world.legs
        world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
        world.advance_with_heartbeats(0.25)
    circuits = world.coordinator.circuits(world.now_s)
    assert sum(circuit is not CircuitState.CLOSED for circuit in circuits.values()) == 2


def test_failures_that_are_not_the_replicas_fault_do_not_open_its_circuit() -> None:
    for failure in (LegFailure.OVERLOADED, LegFailure.DRAINING, LegFailure.REJECTED):
        world = mixed(2)
        arrive(world, 10)
        fail_all(world, "m0", failure)
        assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.CLOSED, failure


def test_a_client_that_leaves_is_not_the_replicas_fault() -> None:
    world = mixed(2)
    arrive(world, 10)
    world.cancel(*world.coordinator.phases())
    world.confirm_aborts()
    assert set(world.coordinator.circuits(world.now_s).values()) == {CircuitState.CLOSED}


def test_aborts_that_are_never_confirmed_count_against_a_replica() -> None:
    world = mixed(2)
    arrive(world, 8)
    world.cancel(*world.coordinator.phases())
    world.advance(LIMITS.abort_s)
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.OPEN


def test_a_replica_that_left_for_good_is_forgotten() -> None:
    world = mixed(2)
    arrive(world, 6)
    fail_all(world, "m0")
    world.disconnect("m0", LossReason.LEFT)
    world.join("m0", Role.MIXED)
    assert world.coordinator.circuits(world.now_s)["m0"] is CircuitState.CLOSED


# ---------------------------------------------------------------------- the budget


def test_the_streams_of_a_lost_replica_are_all_carried_over_without_a_budget() -> None:
    world = mixed(2, replace(QUICK, recovery=NO_BUDGET))
    arrive(world, 60)
    for leg_id in tuple(world.legs):
        world.step(leg_id)
    world.disconnect("m0")
    world.run_to_end()
    assert {record.outcome for record in world.records.values()} == {Phase.FINISHED}
    assert tries(world, RetryReason.REPLICA_LOST) == 30


def test_streams_with_tokens_are_placed_before_those_without() -> None:
    world = mixed(2)
    arrive(world, 6)
    streaming = legs_on(world, "m0")[-1]
    world.step(streaming)
    before = len(world.commands)
    world.disconnect("m0")
    sent = [
        command.leg.request_id
        for command in world.commands[before:]
        if isinstance(command, SubmitLeg)
    ]
    assert sent[0] == streaming.rpartition("~")[0]
    assert len(sent) == 3


def test_a_request_that_loses_a_second_replica_uses_the_retry_budget() -> None:
    """Or a request that kills its replicas would be carried from one to the next."""
    world = mixed(3, replace(QUICK, recovery=NO_BUDGET))
    arrive(world, 1)
    world.disconnect("m0")
    (replica_id, _) = next(iter(world.legs.values()))
    world.disconnect(replica_id)
    assert isinstance(world.errors["r0"], RetryBudgetExhausted)


def test_a_stream_that_got_further_in_between_outlives_a_second_replica_for_nothing() -> None:
    world = mixed(3, replace(QUICK, recovery=NO_BUDGET))
    arrive(world, 1)
    for _ in range(2):
        ((leg_id, (replica_id, _)),) = world.legs.items()
        world.step(leg_id)
        world.disconnect(replica_id)
    world.run_to_end()
    assert world.records["r0"].outcome is Phase.FINISHED
    assert tries(world, RetryReason.REPLICA_LOST) == 2


def test_with_the_budget_spent_a_client_without_tokens_is_told_to_come_back() -> None:
    world = mixed(2, replace(QUICK, recovery=NO_BUDGET))
    arrive(world, 2)
    world.fail_leg(legs_on(world, "m0")[0], LegFailure.ENGINE_ERROR)
    error = world.errors["r0"]
    assert isinstance(error, RetryBudgetExhausted)
    assert (error.http_status, error.retry_after_s) == (503, 5.0)
    assert world.coordinator.retry_totals().denied == 1


def test_with_the_budget_spent_a_stream_ends_in_an_error() -> None:
    world = mixed(2, replace(QUICK, recovery=NO_BUDGET))
    arrive(world, 1)
    (leg_id,) = world.legs
    world.step(leg_id)
    world.step(leg_id, finish=FinishReason.ERROR)
    assert type(world.errors["r0"]) is EngineFailed


def test_retries_of_an_open_circuit_are_free() -> None:
    """The first failures pay; when the circuit is open the rest is the same failure again."""
    three = RecoveryOptions(retry_budget=RetryOptions(ratio=0.0, min_retries=4))
    world = mixed(2, replace(QUICK, recovery=three))
    arrive(world, 40)
    for leg_id in tuple(world.legs):
        world.step(leg_id)
    fail_all(world, "m0")
    assert world.errors == {}
    assert len(legs_on(world, "m1")) == 40


def test_where_everything_fails_retries_stay_within_the_budget() -> None:
    world = mixed(4)
    for _ in range(200):
        arrive(world, 1)
        for leg_id in tuple(world.legs):
            if leg_id in world.legs:
                world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
        world.advance_with_heartbeats(0.05, beat_s=0.05)
    retries = LIMITS.recovery.retry_budget
    begun = sum(isinstance(command, SubmitLeg) for command in world.commands)
    windows = world.now_s / retries.window_s + 1
    assert begun <= 200 * (1 + retries.ratio) + retries.min_retries * windows
    assert begun > 200, "nobody was tried again"


def test_a_handoff_that_fails_costs_no_budget() -> None:
    world = World(replace(QUICK, recovery=NO_BUDGET))
    world.join_prefill_decode(prefill=1, decode=2)
    arrive(world, 1)
    world.step(next(iter(world.legs)))
    world.fail_leg(next(iter(world.legs)), LegFailure.KV_LOAD_FAILED)
    world.run_to_end()
    assert world.records["r0"].outcome is Phase.FINISHED
    assert tries(world, RetryReason.HANDOFF_FAILED) == 1


def test_moves_off_a_draining_replica_cost_no_budget() -> None:
    limits = replace(QUICK, recovery=NO_BUDGET, drain_timeout_s=1.0)
    world = mixed(2, limits)
    arrive(world, 6)
    for leg_id in tuple(world.legs):
        world.step(leg_id)
    world.drain("m0")
    world.advance_with_heartbeats(1.5)
    world.run_to_end()
    assert world.errors == {}
    assert tries(world, RetryReason.DRAINING) > 0


def test_a_request_at_its_limit_of_failures_goes_on_elsewhere_when_its_replica_drains() -> None:
    world = mixed(3, replace(QUICK, max_failures=1))
    arrive(world, 1)
    for failure in (LegFailure.ENGINE_ERROR, LegFailure.DRAINING):
        (leg_id,) = world.legs
        world.fail_leg(leg_id, failure)
    world.run_to_end()
    assert world.records["r0"].outcome is Phase.FINISHED


def test_a_lone_draining_replica_is_not_asked_again_and_again() -> None:
    world = mixed(1, replace(QUICK, max_failures=3))
    arrive(world, 1)
    for _ in range(4):
        (leg_id,) = world.legs
        world.fail_leg(leg_id, LegFailure.DRAINING)
        world.advance(QUICK.retry_s)
    (leg_id,) = world.legs
    world.fail_leg(leg_id, LegFailure.DRAINING)
    assert isinstance(world.errors["r0"], EngineFailed)


# ---------------------------------------------------------------------- hedges

_TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001, per_stream_s=0.001)
"""A prompt of 40 tokens takes 50 ms: it is suspiciously late after a second."""


def predicted(limits: CoordinatorLimits = QUICK, *, seen: bool = True) -> World:
    """With `seen`, first tokens have come about when they were predicted."""
    policy = PredictedPlacer(PredictedOptions())
    priors = {str(role): _TIMING for role in Role}
    world = World(limits, policy=policy, priors=priors)
    for number in range(2):
        world.join(f"m{number}", Role.MIXED)
    for _ in range(50 if seen else 0):
        world.coordinator.fleet_model.ttft_overruns.observe(0.01)
    return world


def test_a_first_token_that_is_much_too_late_is_sought_on_an_idle_replica() -> None:
    world = predicted()
    arrive(world, 1)
    (silent, _) = next(iter(world.legs.values()))
    world.advance_with_heartbeats(0.75)
    assert world.aborting == []
    world.advance_with_heartbeats(0.5)
    assert [replica_id for replica_id, _ in world.aborting] == [silent]
    assert tries(world, RetryReason.HEDGED) == 1
    world.run_to_end()
    record = world.records["r0"]
    assert record.outcome is Phase.FINISHED
    assert record.resume_reasons[0].startswith(f"{silent}: hedge: no first token in")
    assert [leg.outcome for leg in record.legs] == [LegOutcome.TIMED_OUT, LegOutcome.COMPLETED]


def test_only_once() -> None:
    world = predicted()
    world.join("m2", Role.MIXED)
    arrive(world, 1)
    world.advance_with_heartbeats(10.0)
    assert tries(world, RetryReason.HEDGED) == 1


def test_a_request_is_hedged_at_its_limit_of_failures_and_does_not_end_by_it() -> None:
    world = predicted(replace(QUICK, max_failures=0))
    arrive(world, 1)
    world.advance_with_heartbeats(1.25)
    assert tries(world, RetryReason.HEDGED) == 1
    world.run_to_end()
    assert world.records["r0"].outcome is Phase.FINISHED


def test_tokens_of_the_leg_that_was_given_up_never_reach_the_client() -> None:
    world = predicted()
    arrive(world, 1)
    (late,) = world.legs
    world.advance_with_heartbeats(1.25)
    world.step(late)
    assert world.tokens["r0"] == []
    world.run_to_end()
    assert world.tokens["r0"] == list(range(9))


def test_a_stream_with_output_in_time_is_not_hedged() -> None:
    world = predicted()
    arrive(world, 1)
    world.advance_with_heartbeats(0.5)
    world.step(next(iter(world.legs)))
    world.advance_with_heartbeats(5.0)
    assert tries(world, RetryReason.HEDGED) == 0


def test_where_others_have_queues_a_late_request_waits_on() -> None:
    world = predicted()
    arrive(world, 1)
    busy = Load(running_requests=64, queued_requests=9, queued_tokens=4000)
    for _ in range(20):
        for replica_id in ("m0", "m1"):
            world.load(replica_id, busy)
        world.advance(0.25)
    assert tries(world, RetryReason.HEDGED) == 0


def test_hedges_are_paid_from_the_budget() -> None:
    world = predicted(replace(QUICK, recovery=NO_BUDGET))
    arrive(world, 1)
    world.advance_with_heartbeats(5.0)
    assert tries(world, RetryReason.HEDGED) == 0
    assert world.coordinator.retry_totals().denied == 1
    world.run_to_end()
    assert world.records["r0"].outcome is Phase.FINISHED


def test_a_trial_that_must_be_hedged_has_failed() -> None:
    world = predicted()
    arrive(world, 1)
    (silent, _) = next(iter(world.legs.values()))
    world.disconnect(silent)
    world.join(silent, Role.MIXED)
    world.run_to_end()
    while not (on_trial := legs_on(world, silent)):
        arrive(world, 1)
    assert len(on_trial) == 1
    for leg_id in set(world.legs) - set(on_trial):
        world.step(leg_id)
    world.advance_with_heartbeats(1.5)
    assert world.coordinator.circuits(world.now_s)[silent] is CircuitState.OPEN


def test_predictions_that_nothing_has_borne_out_yet_are_no_reason() -> None:
    world = predicted(seen=False)
    arrive(world, 1)
    world.advance_with_heartbeats(10.0)
    assert tries(world, RetryReason.HEDGED) == 0


def test_without_hedging_no_leg_is_hedged() -> None:
    never = RecoveryOptions(hedging=HedgeOptions(latency_multiple=None))
    world = predicted(replace(QUICK, recovery=never))
    arrive(world, 1)
    world.advance_with_heartbeats(10.0)
    assert tries(world, RetryReason.HEDGED) == 0


def test_other_rules_hold_for_later_requests() -> None:
    world = mixed(2)
    arrive(world, 2)
    one_is_enough = RecoveryOptions(
        heartbeat_timeout_s=6.0, circuit_breaker=BreakerOptions(failure_threshold=1)
    )
    world.coordinator.reconfigure(limits=replace(QUICK, recovery=one_is_enough))
    world.advance_with_heartbeats(2.0, frozen={"m0"})
    assert world.aborting == []
    fail_all(world, "m1")
    assert world.coordinator.circuits(world.now_s)["m1"] is CircuitState.OPEN


def test_a_missed_heartbeat_is_noticed_after_new_options() -> None:
    world = mixed(2)
    arrive(world, 2)
    world.advance_with_heartbeats(0.5)
    world.coordinator.reconfigure(limits=QUICK)
    world.handle(TimerFired())  # as whoever reconfigures it does
    world.advance_with_heartbeats(2.0, frozen={"m0"})
    assert len(legs_on(world, "m1")) == 2
