"""An autoscaler's body in virtual time: what it sees, and what becomes of what it wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.observation import Observation
from baton.simulator.fleet.fleet import VirtualFleet
from baton.simulator.fleet.membership import Membership
from baton.simulator.fleet.scaling_log import Direction, ScalingChange, count_reversals
from baton.simulator.scenario import PoolPlan, Scenario, Simulation, SimulationResult, simulate
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.simulator.scenes import ENGINE, pool, scenario, trace

RULES = ServiceRules(slos=SloClasses(classes={"default": Slo(ttft_s=1.0, tpot_s=0.1)}))


class Scripted:
    """Does at its n-th tick what is written; keeps what it has seen."""

    def __init__(self, script: Mapping[int, tuple[ScalingAction, ...]]) -> None:
        self.script = script
        self.seen: list[Observation] = []

    def tick(self, seen: Observation) -> AutoscalerTick:
        self.seen.append(seen)
        return AutoscalerTick(
            at_s=seen.at_s, policy="scripted", actions=self.script.get(len(self.seen), ())
        )


def run(
    script: Mapping[int, tuple[ScalingAction, ...]],
    *pools: PoolPlan,
    served: Trace | None = None,
    until_s: float = 12.0,
    change: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> tuple[SimulationResult, list[Observation]]:
    scaler = Scripted(script)
    scene = scenario(*pools, rules=RULES, autoscaler=lambda: scaler, scaling_interval_s=1.0)
    made = simulate(change(scene), served or trace(200, rate_per_s=20.0), until_s=until_s)
    return made, scaler.seen


def test_a_start_serves_after_a_cold_start_and_costs_from_the_asking() -> None:
    mixed = replace(pool(Role.MIXED, 1), cold_start_s=3.0, gpus_per_replica=4.0)
    got, seen = run({2: (StartReplicas(pool="mixed", replicas=2),)}, mixed)
    counts = [
        (observation.pools["mixed"].starting, observation.pools["mixed"].ready_replicas)
        for observation in seen
    ]
    assert counts[:2] == [(0, 1), (0, 1)]
    assert counts[2:4] == [(2, 1), (2, 1)]
    assert counts[5:8] == [(0, 3)] * 3
    assert got.ended_at_s > 6.0
    paid_s = got.ended_at_s + 2 * (got.ended_at_s - 2.0)
    assert got.replica_seconds["mixed"] == pytest.approx(paid_s)
    assert got.scaling.gpu_seconds == pytest.approx(4 * paid_s)
    assert got.scaling.changes == (ScalingChange(2.0, "mixed", Direction.UP, 2),)


def test_a_stop_cancels_starts_before_it_stops_serving_replicas() -> None:
    mixed = replace(pool(Role.MIXED, 2), cold_start_s=3.0)
    script: dict[int, tuple[ScalingAction, ...]] = {
        1: (StartReplicas(pool="mixed", replicas=2),),
        2: (StopReplicas(pool="mixed", replicas=3),),
    }
    got, seen = run(script, mixed, served=trace(50, rate_per_s=5.0))
    last = seen[-1].pools["mixed"]
    assert (last.starting, last.ready_replicas, last.draining) == (0, 1, 0)
    started_s = 2 * 1.0  # called off a second after they were asked for
    least_s = got.ended_at_s + 2.0 + started_s
    assert least_s < got.replica_seconds["mixed"] < least_s + 5.0
    assert all(outcome.ok for outcome in got.outcomes)


def test_a_stopped_replica_is_paid_for_until_it_has_ended_what_it_has() -> None:
    long = Trace(name="t", requests=tuple(TraceRequest(0.1, 50, 800) for _ in range(2)))
    got, seen = run(
        {1: (StopReplicas(pool="mixed", replicas=1),)}, pool(Role.MIXED, 2), served=long
    )
    assert [observation.pools["mixed"].draining for observation in seen[1:4]] == [1, 1, 1]
    assert seen[1].pools["mixed"].ready_replicas == 1
    assert seen[1].pools["mixed"].starting == 0
    assert [outcome.ok for outcome in got.outcomes] == [True, True]
    assert got.replica_seconds["mixed"] > got.ended_at_s + 4.0


def test_a_killed_replica_is_gone_and_paid_for_no_longer() -> None:
    fleet = VirtualFleet()
    members = Membership(fleet, [pool(Role.MIXED, 2)], model="sim")
    members.join_initial(since_s=0.0)
    fleet.run(until_s=3.0)
    victim = fleet.replicas["mixed-0"]
    members.kill("mixed-0")
    fleet.run(until_s=5.0)
    assert not victim.is_alive
    assert list(fleet.replicas) == ["mixed-1"]
    assert members.replica_seconds() == {"mixed": 3.0 + 5.0}


def test_a_flip_takes_the_least_loaded_replica_and_restarts_none() -> None:
    long = Trace(name="t", requests=(TraceRequest(0.1, 50, 900),))
    script: dict[int, tuple[ScalingAction, ...]] = {
        1: (FlipReplicas(pool="decode", replicas=1, role=Role.PREFILL),)
    }
    got, seen = run(script, pool(Role.DECODE, 2), served=long)
    flipped = seen[1].pools["decode"]
    assert (flipped.prefill, flipped.decode, flipped.starting) == (1, 1, 0)
    assert [outcome.ok for outcome in got.outcomes] == [True]
    assert got.scaling.changes == (ScalingChange(1.0, "decode", Direction.TO_PREFILL, 1),)


def test_the_least_loaded_replica_flips() -> None:
    asked = Trace(name="t", requests=tuple(TraceRequest(0.1, 50, 900) for _ in range(4)))
    flip = FlipReplicas(pool="decode", replicas=1, role=Role.PREFILL)
    scene = scenario(
        pool(Role.DECODE, 5), autoscaler=lambda: Scripted({2: (flip,)}), scaling_interval_s=1.0
    )
    stage = Simulation(scene, asked)
    stage.run(asked.to_requests(), until_s=3.0)
    replicas = stage.fleet.replicas.values()
    (flipped,) = [replica for replica in replicas if replica.facts.role is Role.PREFILL]
    assert flipped.is_empty()
    assert sum(replica.is_empty() for replica in replicas) == 1


def test_a_replica_in_another_role_is_stopped_first() -> None:
    script: dict[int, tuple[ScalingAction, ...]] = {
        1: (FlipReplicas(pool="decode", replicas=1, role=Role.PREFILL),),
        2: (StopReplicas(pool="decode", replicas=1),),
    }
    _, seen = run(script, pool(Role.DECODE, 3))
    last = seen[4].pools["decode"]
    assert (last.prefill, last.decode) == (0, 2)


def test_a_tick_sees_demand_capacity_and_objectives() -> None:
    _, seen = run({}, pool(Role.PREFILL, 1), pool(Role.DECODE, 1))
    one = seen[7]
    assert one.missing_inputs == ()
    assert one.demand.requests_per_s == pytest.approx(20.0, rel=0.3)
    assert one.demand.mean_prompt_tokens == pytest.approx(300, rel=0.3)
    assert (one.ttft_s, one.tpot_s) == (1.0, 0.1)
    assert one.pools["prefill"].prefill_tokens_per_s == pytest.approx(19_600, rel=0.3)
    assert one.service.attainment == 1.0


def test_a_run_keeps_the_ticks_that_acted_or_were_paused() -> None:
    got, seen = run({3: (StartReplicas(pool="mixed", replicas=1),)}, pool(Role.MIXED, 1))
    assert [tick.at_s for tick in got.ticks] == [seen[2].at_s]
    assert got.scaling.ticks == len(seen)


def test_going_back_on_the_last_change_of_a_pool_is_a_reversal_however_late() -> None:
    changes = [
        ScalingChange(0.0, "a", Direction.UP, 1),
        ScalingChange(1.0, "b", Direction.DOWN, 1),  # another pool
        ScalingChange(2.0, "a", Direction.TO_PREFILL, 1),  # roles count by themselves
        ScalingChange(3.0, "a", Direction.UP, 3),
        ScalingChange(9e5, "a", Direction.DOWN, 1),  # a reversal
        ScalingChange(9e5, "a", Direction.DOWN, 1),
        ScalingChange(9e5, "a", Direction.TO_DECODE, 1),  # a reversal
        ScalingChange(9e5, "a", Direction.UP, 1),  # a reversal
        ScalingChange(9e5, "b", Direction.DOWN, 1),
    ]
    assert count_reversals(changes) == 3


def test_a_scenario_that_would_tick_without_a_pause_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scaling_interval_s is 0.0, expected more than 0"):
        scenario(pool(Role.MIXED, 1, ENGINE), scaling_interval_s=0.0)


def test_an_idle_fleet_is_not_taken_for_one_that_is_out_of_touch() -> None:
    late = Trace(name="t", requests=(TraceRequest(0.1, 50, 5), TraceRequest(40.0, 50, 5)))
    _, seen = run({}, pool(Role.MIXED, 2), served=late, until_s=45.0)
    assert [observation.missing_inputs for observation in seen[5:]] == [()] * len(seen[5:])
    assert len(seen) >= 40
