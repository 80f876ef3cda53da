"""Frozen replicas, storms of failures and hedges, in any order: nothing lost, nothing twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.control.state.limits import RecoveryOptions
from baton.domain.errors import EngineFailed, RetryBudgetExhausted
from baton.domain.fleet import Health, Load, Role, StepTotals
from baton.domain.handoff import LegFailure
from baton.domain.retry_reasons import RetryReason
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.resilience.circuit_breakers import BreakerOptions, CircuitState
from baton.policy.resilience.retry_budget import RetryOptions
from tests.control.test_coordinator_stateful import CoordinatorMachine
from tests.control.world import LIMITS, World, request
from tests.fakes.timings import LinearTiming

RECOVERY = RecoveryOptions(
    circuit_breaker=BreakerOptions(
        failure_threshold=2, open_duration_s=0.5, max_open_duration_s=4.0
    ),
    retry_budget=RetryOptions(ratio=0.5, min_retries=6),
)
_TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001, per_stream_s=0.001)
_BEAT_S = 0.25


class RecoveryMachine(CoordinatorMachine):
    """Replicas freeze and thaw while others beat; `World` checks who is chosen, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            replace(LIMITS, recovery=RECOVERY, stall_timeout_s=3.0),
            policy=PredictedPlacer(PredictedOptions()),
            priors={str(role): _TIMING for role in Role},
        )
        self.frozen: set[str] = set()
        self.steps = 0

    def moving(self) -> list[str]:
        """Legs whose replicas are not frozen."""
        return [name for name, (where, _) in self.world.legs.items() if where not in self.frozen]

    # ------------------------------------------------------------ what frozen replicas cannot do

    @precondition(lambda self: self.moving())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.world.step(self.pick(data, self.moving()))

    @precondition(lambda self: self.moving())
    @rule(data=st.data(), failure=st.sampled_from(list(LegFailure)))
    def fail_leg(self, data: st.DataObject, failure: LegFailure) -> None:
        self.world.fail_leg(self.pick(data, self.moving()), failure)

    @precondition(lambda self: self.moving())
    @rule(data=st.data())
    def break_leg(self, data: st.DataObject) -> None:
        self.world.fail_leg(self.pick(data, self.moving()), LegFailure.ENGINE_ERROR)

    @rule()
    def confirm_aborts(self) -> None:
        self.world.confirm_aborts(frozen=self.frozen)

    @precondition(lambda self: set(self.world.alive) - self.frozen)
    @rule(data=st.data(), queued=st.integers(0, 3))
    def report(self, data: st.DataObject, queued: int) -> None:
        talking = sorted(set(self.world.alive) - self.frozen)
        self.world.load(data.draw(st.sampled_from(talking)), Load(queued_requests=queued))

    # ------------------------------------------------------------ freezes, storms, time

    @precondition(lambda self: set(self.world.alive) - self.frozen)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.frozen.add(data.draw(st.sampled_from(sorted(set(self.world.alive) - self.frozen))))

    @precondition(lambda self: self.frozen)
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        self.frozen.discard(data.draw(st.sampled_from(sorted(self.frozen))))

    @rule(beats=st.integers(1, 10), hangs=st.booleans())
    def beat(self, beats: int, *, hangs: bool) -> None:
        """Time passes; who talks says that it works, or that its engine hangs."""
        for _ in range(beats):
            for replica_id in sorted(set(self.world.alive) - self.frozen):
                self.steps += not hangs
                load = Load(running_requests=1, steps=StepTotals(steps=self.steps))
                self.world.load(replica_id, load)
            self.world.advance(_BEAT_S)

    @precondition(lambda self: self.moving())
    @rule(count=st.integers(2, 6))
    def storm(self, count: int) -> None:
        """Requests come, and whatever runs anywhere fails."""
        for _ in range(count):
            self.count += 1
            self.world.arrive(request(f"r{self.count}", arrived_at_s=self.world.now_s))
        for leg_id in self.moving():
            if leg_id in self.world.legs:
                self.world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)

    # ------------------------------------------------------------ what holds

    @invariant()
    def a_replica_with_an_open_circuit_is_not_healthy(self) -> None:
        views = self.world.coordinator.fleet(self.world.now_s).replicas
        for replica_id, circuit in self.world.coordinator.circuits(self.world.now_s).items():
            if circuit is CircuitState.OPEN:
                assert views[replica_id].health is not Health.HEALTHY, replica_id

    @invariant()
    def a_denied_retry_had_no_output_or_ends_with_an_error_in_its_stream(
        self,
    ) -> None:
        for request_id, error in self.world.errors.items():
            if isinstance(error, RetryBudgetExhausted):
                assert self.world.tokens[request_id] == [], request_id
            if self.world.tokens[request_id]:
                assert isinstance(error, EngineFailed) or not error.retryable, error

    @invariant()
    def retries_are_free_once_or_within_the_budget(self) -> None:
        tries = dict(self.world.coordinator.retry_totals().retries)
        retries, windows = RECOVERY.retry_budget, self.world.now_s // 10.0 + 2
        paid = retries.min_retries * windows + retries.ratio * self.count
        # Besides those: one for what is over when a request is elsewhere, and one handoff.
        free = 2 * self.count + tries.pop(RetryReason.DRAINING)
        assert sum(tries.values()) <= paid + free, tries

    def teardown(self) -> None:
        self.frozen.clear()
        super().teardown()
        for view in self.world.coordinator.fleet(self.world.now_s).replicas.values():
            assert view.inflight_legs == 0


TestRecoveryMachine = RecoveryMachine.TestCase
TestRecoveryMachine.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
