"""Scaling in plain values, for operators: what was decided, why, and what stands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import assert_never

from baton.policy.scaling.actions import (
    Action,
    FlipReplicas,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
    Tick,
)

Row = Mapping[str, object]


def tick_rows(ticks: Iterable[Tick], now_s: float) -> list[Row]:
    """One row a tick, in the order given."""
    return [_tick(tick, now_s) for tick in ticks]


def action_text(action: Action) -> str:
    """`start 2 of decode`, `flip 1 of prefill to decode`."""
    match action:
        case StartReplicas():
            return f"start {action.replicas} of {action.pool}"
        case StopReplicas():
            return f"stop {action.replicas} of {action.pool}"
        case FlipReplicas():
            return f"flip {action.replicas} of {action.pool} to {action.to}"
        case _:
            assert_never(action)


def _tick(tick: Tick, now_s: float) -> Row:
    return {
        "age_s": round(now_s - tick.at_s, 3),
        "policy": tick.policy,
        "held": tick.held,
        "dry_run": tick.dry_run,
        "actions": [action_text(action) for action in tick.actions],
        "pools": [_decision(decision) for decision in tick.decisions],
    }


def _decision(decision: ScalingDecision) -> Row:
    return {
        "pool": decision.pool,
        "have": decision.have,
        "want": decision.want,
        "asked": decision.asked,
        "reason": str(decision.reason),
        "why": decision.why,
        "clipped_by": decision.clipped_by,
        "flips": {str(role): replicas for role, replicas in decision.flips.items()},
        "inputs": {name: _finite(value) for name, value in decision.inputs.items()},
    }


def _finite(value: float) -> float | None:
    """JSON has no infinities; None says that there was no number."""
    return round(value, 6) if math.isfinite(value) else None
