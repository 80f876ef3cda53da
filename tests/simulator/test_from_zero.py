"""Fleets that go to zero between requests, in virtual time, with the autoscaler that ships."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.scaling.catalogue import make_scaling_policy
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, ScalingRule, StepLimits
from baton.simulator.scenario import SimulationResult, simulate
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.simulator.scenes import pool, scenario

PROMISED = ServiceRules(slos=SloClasses(classes={"default": Slo(ttft_s=0.8)}))
APART_S = 100.0
COLD_S = 20.0


def run(
    *roles: Role,
    wakes: int = 5,
    together: int = 1,
    rules: ServiceRules = PROMISED,
    cold_start_s: float = COLD_S,
    most_s: float | None = 60.0,
    coordinators: int = 1,
) -> SimulationResult:
    """Requests so far apart that every time the whole fleet has gone."""
    options = AutoscalerOptions(
        bounds={str(role): PoolBounds(min=0, initial=1, max=2) for role in roles},
        scale_down=StepLimits(cooldown_s=10.0, max_step=1),
        scale_to_zero=True,
    )
    scene = scenario(
        *(replace(pool(role, 1), cold_start_s=cold_start_s) for role in roles),
        rules=rules,
        limits=CoordinatorLimits(cold_start_timeout_s=most_s),
        autoscaler=lambda: Autoscaler(make_scaling_policy(ScalingRule.SLO, options), options),
        scaling_interval_s=2.0,
        coordinators=coordinators,
    )
    asked = [
        TraceRequest(APART_S * (number + 1) + 0.1 * index, 200, 20)
        for number in range(wakes)
        for index in range(together)
    ]
    return simulate(scene, Trace(name="apart", requests=tuple(asked)))


def ttfts_s(made: SimulationResult) -> list[float]:
    return [outcome.ttft_s for outcome in made.outcomes]


@pytest.mark.parametrize("rules", [PROMISED, ServiceRules()])
@pytest.mark.parametrize("roles", [(Role.MIXED,), (Role.PREFILL, Role.DECODE)])
def test_every_request_that_wakes_a_fleet_is_served_after_a_cold_start(
    roles: tuple[Role, ...], rules: ServiceRules
) -> None:
    made = run(*roles, rules=rules, wakes=20)
    assert [outcome.ok for outcome in made.outcomes] == [True] * 20
    # It really was at zero: asked for within a tick, and there a cold start later.
    assert all(COLD_S <= ttft_s <= COLD_S + 3.0 for ttft_s in ttfts_s(made))


def test_all_that_come_during_a_cold_start_are_served() -> None:
    made = run(Role.MIXED, together=50)
    assert [outcome.ok for outcome in made.outcomes] == [True] * 250


def test_two_ingresses_wake_a_fleet_as_one_does() -> None:
    made = run(Role.MIXED, together=2, coordinators=2)
    assert [outcome.ok for outcome in made.outcomes] == [True] * 10


def test_a_fleet_that_takes_longer_than_requests_wait_is_there_when_they_come_back() -> None:
    made = run(Role.MIXED, cold_start_s=90.0, most_s=60.0, wakes=1)
    assert [outcome.ok for outcome in made.outcomes] == [False]
    waited = run(Role.MIXED, cold_start_s=90.0, most_s=120.0, wakes=1)
    assert [outcome.ok for outcome in waited.outcomes] == [True]


def test_without_a_wait_for_cold_starts_every_waking_request_is_refused() -> None:
    made = run(Role.MIXED, most_s=None)
    assert not any(outcome.ok for outcome in made.outcomes)
