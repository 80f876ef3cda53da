"""The autoscaler under any order of observations, overrides and options."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.control.autoscaling.autoscaler import Autoscaler, Override
from baton.domain.fleet import Role
from baton.policy.scaling.actions import AutoscalerTick, FlipReplicas, StartReplicas, StopReplicas
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, StepLimits
from tests.control.scaling_world import FixedPolicy, observe, options, pool

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.MIXED}
GPUS = {"prefill": 1.0, "decode": 2.0, "both": 4.0}
MOST = 8
counts = st.integers(0, 12)
names = st.sampled_from(sorted(ROLES))


def some_options(budget: float | None, *, zero: bool, step: int) -> AutoscalerOptions:
    each = {
        name: PoolBounds(min=0 if zero else 1, initial=1, max=MOST, gpus_per_replica=GPUS[name])
        for name in ROLES
    }
    limits = StepLimits(cooldown_s=20.0, max_step=step, max_fraction=0.25)
    return options(bounds=each, gpu_budget=budget, up=limits, down=limits, scale_to_zero=zero)


class AutoscalerMachine(RuleBasedStateMachine):
    """A body that carries out what it is told, now and then late, wrongly or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = FixedPolicy(**dict.fromkeys(ROLES, 2))
        self.options = some_options(None, zero=False, step=3)
        self.scaler = Autoscaler(self.policy, self.options)
        self.now_s = 0.0
        self.ready = dict.fromkeys(ROLES, 2)
        self.starting = dict.fromkeys(ROLES, 0)
        self.draining = dict.fromkeys(ROLES, 0)
        self.gone: set[str] = set()
        self.last: AutoscalerTick | None = None

    @rule(name=names, replicas=counts)
    def set_desired(self, name: str, replicas: int) -> None:
        self.policy.replicas[name] = replicas

    @rule(name=names, flips=st.integers(0, 3))
    def flip(self, name: str, flips: int) -> None:
        self.policy.flips[name] = {Role.PREFILL: flips}

    @rule(budget=st.none() | st.integers(0, 40), zero=st.booleans(), step=st.integers(1, 5))
    def reconfigure(self, budget: int | None, *, zero: bool, step: int) -> None:
        self.options = some_options(budget, zero=zero, step=step)
        self.scaler.reconfigure(self.policy, self.options)

    @rule(name=names, replicas=st.integers(0, MOST), for_s=st.none() | st.integers(1, 50))
    def override(self, name: str, replicas: int, for_s: int | None) -> None:
        until_s = None if for_s is None else self.now_s + for_s
        before = self.scaler.overrides()
        try:
            self.scaler.override(name, replicas, until_s=until_s, now_s=self.now_s)
        except ValueError:
            assert self.options.gpu_budget is not None
            assert self.scaler.overrides() == before
        else:
            assert self.scaler.overrides()[name] == Override(replicas=replicas, until_s=until_s)

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.scaler.clear_override(name)
        assert name not in self.scaler.overrides()

    @rule(name=names)
    def come_or_go(self, name: str) -> None:
        self.gone ^= {name}

    @rule(name=names)
    def become_ready(self, name: str) -> None:
        self.ready[name] += self.starting[name]
        self.starting[name] = 0

    @rule(name=names)
    def drained(self, name: str) -> None:
        self.draining[name] = 0

    @rule(step_s=st.integers(-5, 30), carried_out=st.booleans())
    def tick(self, step_s: int, *, carried_out: bool) -> None:
        self.now_s += step_s
        self.last = tick = self.scaler.tick(self.observation())
        assert bool(tick.paused_reason) == (step_s < 0 and len(self.scaler.history()) > 1)
        self.check(tick)
        if carried_out:
            self.carry_out(tick)

    @rule(name=names, value=st.sampled_from((math.nan, math.inf, -1.0)), counts=st.booleans())
    def tick_with_nonsense(self, name: str, value: float, *, counts: bool) -> None:
        observation = self.observation()
        if name not in observation.pools:
            return
        bad = observation.pools[name]
        field = "starting" if counts else "queued_tokens"
        bad = replace(bad, **{field: value})  # type: ignore[arg-type]  # it is nonsense
        tick = self.scaler.tick(replace(observation, pools={**observation.pools, name: bad}))
        assert tick.paused_reason
        for action in tick.actions:
            assert action.pool in self.scaler.overrides()
            assert not counts or action.pool != name

    @rule()
    def tick_with_something_missing(self) -> None:
        observation = replace(self.observation(), missing_inputs=("reports",))
        tick = self.scaler.tick(observation)
        assert "reports" in tick.paused_reason
        for decision in tick.decisions:
            if decision.reason is not ScalingReason.OVERRIDE:
                assert decision.target_replicas == decision.current_replicas

    @invariant()
    def keeps_its_integrity(self) -> None:
        self.scaler.check_integrity()

    def observation(self) -> Observation:
        pools = [
            replace(
                pool(
                    name,
                    role,
                    self.ready[name],
                    starting=self.starting[name],
                    draining=self.draining[name],
                ),
                gpus_per_replica=GPUS[name],
            )
            for name, role in ROLES.items()
            if name not in self.gone
        ]
        return observe(self.now_s, *pools)

    def check(self, tick: AutoscalerTick) -> None:
        overrides, budget = self.scaler.overrides(), self.options.gpu_budget
        least = 0 if self.options.scale_to_zero else 1
        used = have = leaving = least_gpus = 0.0
        for decision in tick.decisions:
            gpus = GPUS[decision.pool]
            used += decision.target_replicas * gpus
            have += decision.current_replicas * gpus
            leaving += self.draining[decision.pool] * gpus
            least_gpus += gpus * (decision.current_replicas if tick.paused_reason else least)
            if decision.pool in overrides and budget is None:
                assert decision.target_replicas == overrides[decision.pool].replicas
            elif not tick.paused_reason and decision.pool not in overrides:
                assert (
                    min(least, decision.current_replicas)
                    <= decision.target_replicas
                    <= max(MOST, 0)
                )
        if budget is not None:
            assert used <= max(budget, least_gpus, min(have, budget)) + 1e-9
            if any(isinstance(action, StartReplicas) for action in tick.actions):
                assert used + leaving <= budget + 1e-9

    def carry_out(self, tick: AutoscalerTick) -> None:
        for action in tick.actions:
            match action:
                case StartReplicas():
                    self.starting[action.pool] += action.replicas
                case StopReplicas():
                    cancelled = min(action.replicas, self.starting[action.pool])
                    self.starting[action.pool] -= cancelled
                    self.ready[action.pool] -= action.replicas - cancelled
                    self.draining[action.pool] += action.replicas - cancelled
                case FlipReplicas():
                    pass


TestAutoscaler = AutoscalerMachine.TestCase
TestAutoscaler.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
