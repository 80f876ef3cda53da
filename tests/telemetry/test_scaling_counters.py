"""What a scaling loop counts of itself."""

from __future__ import annotations

from typing import cast

from baton.policy.scaling.actions import AutoscalerTick, ScalingDecision
from baton.policy.scaling.desired import ScalingReason
from baton.telemetry.catalogue import OTHER, ScalingAction, TickOutcome
from baton.telemetry.metrics.scaling_counters import ScalingCounters


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


def test_replicas_count_by_what_was_done_to_them() -> None:
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
