"""What a controller's state is to Prometheus."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from baton.control.accounting.class_counts import ClassCounts
from baton.control.accounting.cluster_totals import PoolCapacity
from baton.domain.demand import GpuUsage
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.actions import AutoscalerTick, ScalingDecision
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Demand, Observation, PoolObservation
from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import OTHER, ScalingAction, TickOutcome
from baton.telemetry.metrics.controller import (
    ClassStatus,
    ControllerState,
    PoolSize,
    controller_families,
)
from baton.telemetry.metrics.scaling_counters import ScalingCounters
from baton.telemetry.metrics.usage_meter import UsageMeter

POOL = PoolObservation(
    name="decode",
    role=Role.DECODE,
    prefill=1,
    decode=2,
    mixed=1,
    starting=5,
    draining=6,
    cold_start_s=30.0,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=200.0,
    utilization_fraction=0.5,
)
SEEN = Observation(
    at_s=1.0,
    window_s=30.0,
    demand=Demand(requests_per_s=3.0, prompt_tokens_per_s=500.0, output_tokens_per_s=70.0),
    pools={"decode": POOL},
)
DECISION = ScalingDecision(
    pool="decode",
    current_replicas=4,
    target_replicas=5,
    desired_replicas=7,
    reason=ScalingReason.DEMAND,
    inputs={"target": 7.0, "horizon_s": float("inf")},
)
TICK = AutoscalerTick(at_s=1.0, policy="slo", decisions=(DECISION,))
SIZE = PoolSize(
    name="decode", min=1, max=8, desired=5, running=9, starting=8, stopping=7, price_per_hour=2.5
)
CHAT = Slo(name="chat", ttft_s=0.5, tpot_s=0.05, itl_p99_s=0.2, attainment_target=0.9)


def busy_counters() -> ScalingCounters:
    counters = ScalingCounters()
    counters.record_decisions(TICK)
    counters.record_tick(TICK)
    counters.record_scaling("decode", current=4, desired=5)
    return counters


FULL = ControllerState(
    version="1.2.3",
    model="tiny",
    generation=4,
    rejected_configs=2,
    pools=(SIZE,),
    observation=SEEN,
    tick=TICK,
    counters=busy_counters(),
    overridden_pools=1,
    report_age_s=1.5,
    unresponsive_ingresses=1,
    classes=(
        ClassStatus(
            slo=CHAT,
            recent=ClassCounts(evaluated=10, good=8),
            over_window=ClassCounts(evaluated=100, good=95),
        ),
    ),
)


def used() -> UsageMeter:
    meter = UsageMeter()
    pools = {"decode": PoolCapacity(device_s=7200.0, busy_s=3600.0)}
    meter.ingest([GpuUsage("acme", "decode", 3600.0)], pools, {"decode": 2.5})
    return meter


def told(state: ControllerState) -> dict[tuple[str, ...], float]:
    """Every sample by its name and labels' values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in controller_families(state, used())
        for sample in family.samples
    }


def test_every_metric_of_controllers_is_told() -> None:
    wanted = {
        name
        for metric in c.CATALOGUE
        if metric.component is c.Component.CONTROLLER
        for name in metric.names
    }
    assert {name for name, *_ in told(FULL)} == wanted


def test_pools_are_told_as_ingresses_see_them() -> None:
    found = told(FULL)
    assert {
        key[2]: value for key, value in found.items() if key[:2] == (c.POOL_REPLICAS.name, "decode")
    } == {"desired": 5, "ready": 4, "starting": 5, "draining": 6}
    assert found[c.POOL_ROLES.name, "decode", "prefill"] == 1
    assert found[c.POOL_ROLES.name, "decode", "decode"] == 2
    assert found[c.POOL_BOUNDS.name, "decode", "max"] == 8
    assert found[c.POOL_CAPACITY.name, "decode", "prompt"] == 1000.0
    assert found[c.POOL_CAPACITY.name, "decode", "output"] == 200.0
    assert found[c.POOL_PRICE.name, "decode"] == 2.5


def test_pools_that_no_ingress_has_seen_are_told_as_they_are_deployed() -> None:
    found = told(replace(FULL, observation=None))
    assert found[c.POOL_REPLICAS.name, "decode", "ready"] == 9
    assert found[c.POOL_REPLICAS.name, "decode", "draining"] == 7
    assert c.DEMAND_REQUESTS.name not in {name for name, *_ in found}


def test_a_pool_of_which_nothing_is_known_has_bounds_and_no_counts() -> None:
    found = told(replace(FULL, observation=None, pools=(PoolSize(name="new", min=0, max=3),)))
    assert found[c.POOL_BOUNDS.name, "new", "min"] == 0
    assert not [key for key in found if key[0] == c.POOL_REPLICAS.name]


def test_a_decision_is_reported_with_its_inputs_and_its_orders() -> None:
    found = told(FULL)
    assert found[c.SCALING_INPUT.name, "decode", "target"] == 7.0
    assert found[c.SCALING_INPUT.name, "decode", "asked"] == 7
    assert (c.SCALING_INPUT.name, "decode", "horizon_s") not in found, "infinity is no number"
    assert found[c.SCALING_DECISIONS.name, "decode", "demand"] == 1
    assert found[c.SCALING_ACTIONS.name, "decode", "start"] == 1
    assert found[c.SCALING_ACTIONS.name, "decode", "stop"] == 0, "an increase needs a first value"
    assert found[c.AUTOSCALER_TICKS.name, "decided"] == 1


@pytest.mark.parametrize(
    ("tick", "held"), [(TICK, 0), (replace(TICK, paused_reason="unresponsive"), 1), (None, 1)]
)
def test_an_autoscaler_that_has_decided_nothing_is_paused(
    tick: AutoscalerTick | None, held: int
) -> None:
    assert told(replace(FULL, tick=tick))[(c.AUTOSCALER_PAUSED.name,)] == held


def test_a_class_is_reported_with_its_objectives_and_its_results() -> None:
    found = told(FULL)
    assert found[c.SLO_TARGET.name, "chat"] == 0.9
    assert found[c.SLO_OBJECTIVE.name, "chat", "itl"] == 0.2
    assert found[c.SLO_ATTAINMENT.name, "chat", "recent"] == 0.8
    assert found[c.SLO_ATTAINMENT.name, "chat", "target"] == 0.95
    assert found[c.SLO_BUDGET.name, "chat"] == pytest.approx(0.5)


def test_an_objective_that_a_class_lacks_is_not_reported() -> None:
    bare = ClassStatus(slo=Slo(name="batch"))
    found = told(replace(FULL, classes=(bare,)))
    assert not [key for key in found if key[0] in {c.SLO_OBJECTIVE.name, c.SLO_ATTAINMENT.name}]
    assert found[c.SLO_BUDGET.name, "batch"] == 1.0


@pytest.mark.parametrize(
    ("judged", "good", "target", "left"),
    [
        (100, 100, 0.9, 1.0),
        (100, 90, 0.9, 0.0),
        (100, 80, 0.9, -1.0),
        (0, 0, 0.9, 1.0),
        (10, 10, 1.0, 1.0),
        (10, 9, 1.0, None),
    ],
)
def test_the_budget_is_what_is_left_of_the_misses_that_are_allowed(
    judged: int, good: int, target: float, left: float | None
) -> None:
    slo = Slo(attainment_target=target)
    fare = ClassStatus(slo=slo, over_window=ClassCounts(evaluated=judged, good=good))
    assert fare.error_budget_fraction == (None if left is None else pytest.approx(left))


def test_usage_and_the_process_itself_are_told() -> None:
    found = told(FULL)
    assert found[c.GPU_SECONDS.name, "acme", "decode"] == 3600.0
    assert found[c.COST.name, "acme"] == 2.5
    assert found[c.COST.name, "(idle)"] == 2.5
    assert found[(c.CONFIG_GENERATION.name,)] == 4
    assert found[(c.CONFIG_REJECTED.name,)] == 2
    assert found[c.BUILD_INFO.name, "1.2.3", "tiny"] == 1
    assert found[(c.REPORT_AGE.name,)] == 1.5


# -------------------------------------------------------------------- counters of scaling


def tick(*reasons: ScalingReason, held: str = "") -> AutoscalerTick:
    decisions = tuple(
        ScalingDecision(
            pool=f"p{n}", current_replicas=1, target_replicas=1, desired_replicas=1, reason=reason
        )
        for n, reason in enumerate(reasons)
    )
    return AutoscalerTick(at_s=0.0, policy="slo", decisions=decisions, paused_reason=held)


def test_each_decision_counts_for_its_pool_and_reason() -> None:
    counters = ScalingCounters()
    for _ in range(3):
        counters.record_decisions(tick(ScalingReason.STEADY, ScalingReason.FORECAST))
    assert counters.decisions == {("p0", "steady"): 3, ("p1", "forecast"): 3}


def test_reasons_that_a_user_has_made_up_count_together() -> None:
    counters = ScalingCounters()
    for n in range(300):
        counters.record_decisions(tick(cast("ScalingReason", f"because {n}")))
    assert counters.decisions == {("p0", OTHER): 300}


def test_replicas_are_counted_by_the_action_taken() -> None:
    counters = ScalingCounters()
    counters.record_scaling("p", current=1, desired=4)
    counters.record_scaling("p", current=4, desired=2)
    counters.record_flip("p", 2)
    assert counters.actions == {
        ("p", ScalingAction.START): 3,
        ("p", ScalingAction.STOP): 2,
        ("p", ScalingAction.FLIP): 2,
    }


def test_a_turn_counts_once_and_only_when_it_has_ended() -> None:
    counters = ScalingCounters()
    counters.ticks += 1
    assert sum(counters.by_outcome().values()) == 0
    counters.record_tick(tick())
    counters.record_tick(tick(held="an ingress is silent"))
    counters.failed_ticks += 1
    assert counters.by_outcome() == {
        TickOutcome.DECIDED: 1,
        TickOutcome.PAUSED: 1,
        TickOutcome.FAILED: 1,
    }
