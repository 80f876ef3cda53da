"""Counters of a scaling loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.policy.scaling.actions import AutoscalerTick
from baton.policy.scaling.desired import ScalingReason
from baton.telemetry.catalogue import OTHER, ScalingAction, TickOutcome

_REASONS = frozenset(ScalingReason)


@dataclass(slots=True)
class ScalingCounters:
    """Counts ticks as they happen, because ticks themselves are kept only for a while."""

    ticks: int = 0
    failed_ticks: int = 0
    paused_ticks: int = 0
    """That decided nothing, because an input was missing."""
    decided_ticks: int = 0
    failed_calls: int = 0
    last_failure: str = ""
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    actions: Counter[tuple[str, ScalingAction]] = field(default_factory=Counter)
    """Replicas by pool and action, for any cause."""

    def record_decisions(self, tick: AutoscalerTick) -> None:
        """Count the decisions of a tick."""
        for decision in tick.decisions:
            # A custom policy may give any reason.
            reason = str(decision.reason) if decision.reason in _REASONS else OTHER
            self.decisions[decision.pool, reason] += 1

    def record_tick(self, tick: AutoscalerTick) -> None:
        """Count a tick that ended."""
        if tick.paused_reason:
            self.paused_ticks += 1
        else:
            self.decided_ticks += 1

    def record_scaling(self, pool: str, *, current: int, desired: int) -> None:
        """Count a change of a pool's desired replicas."""
        action = ScalingAction.START if desired > current else ScalingAction.STOP
        self.actions[pool, action] += abs(desired - current)

    def record_flip(self, pool: str, replicas: int) -> None:
        """Count role changes."""
        self.actions[pool, ScalingAction.FLIP] += replicas

    def by_outcome(self) -> dict[TickOutcome, int]:
        """Ended ticks."""
        return {
            TickOutcome.DECIDED: self.decided_ticks,
            TickOutcome.PAUSED: self.paused_ticks,
            TickOutcome.FAILED: self.failed_ticks,
        }
