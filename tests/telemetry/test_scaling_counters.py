"""What a scaling loop counts of itself."""

from __future__ import annotations

from typing import cast

from baton.policy.scaling.actions import ScalingDecision, Tick
from baton.policy.scaling.desired import ScalingReason
from baton.telemetry.catalogue import OTHER
from baton.telemetry.label_values import ScalingAct, TurnOutcome
from baton.telemetry.metrics.scaling_counters import ScalingCounters


def tick(*reasons: ScalingReason, held: str = "") -> Tick:
    decisions = tuple(
        ScalingDecision(pool=f"p{n}", have=1, want=1, asked=1, reason=reason)
        for n, reason in enumerate(reasons)
    )
    return Tick(at_s=0.0, policy="slo", decisions=decisions, held=held)


def test_each_decision_counts_for_its_pool_and_reason() -> None:
    counters = ScalingCounters()
    for _ in range(3):
        counters.decided(tick(ScalingReason.STEADY, ScalingReason.FORECAST))
    assert counters.decisions == {("p0", "steady"): 3, ("p1", "forecast"): 3}


def test_reasons_that_a_user_has_made_up_count_together() -> None:
    counters = ScalingCounters()
    for n in range(300):
        counters.decided(tick(cast("ScalingReason", f"because {n}")))
    assert counters.decisions == {("p0", OTHER): 300}


def test_replicas_count_by_what_was_done_to_them() -> None:
    counters = ScalingCounters()
    counters.scaled("p", had=1, want=4)
    counters.scaled("p", had=4, want=2)
    counters.flipped("p", 2)
    assert counters.actions == {
        ("p", ScalingAct.START): 3,
        ("p", ScalingAct.STOP): 2,
        ("p", ScalingAct.FLIP): 2,
    }


def test_a_turn_counts_once_and_only_when_it_has_ended() -> None:
    counters = ScalingCounters()
    counters.turns += 1
    assert sum(counters.by_outcome().values()) == 0
    counters.turned(tick())
    counters.turned(tick(held="an ingress is silent"))
    counters.failed_turns += 1
    assert counters.by_outcome() == {
        TurnOutcome.DECIDED: 1,
        TurnOutcome.HELD: 1,
        TurnOutcome.FAILED: 1,
    }
