"""What a scaling loop has done since it began; only ever grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.policy.scaling.actions import AutoscalerTick
from baton.policy.scaling.desired import ScalingReason
from baton.telemetry.catalogue import OTHER
from baton.telemetry.label_values import ScalingAction, TickOutcome

_REASONS = frozenset(ScalingReason)


@dataclass(slots=True)
class ScalingCounters:
    """Counted as it happens: ticks themselves are remembered for a while only."""

    ticks: int = 0
    """That were begun."""
    failed_ticks: int = 0
    paused_ticks: int = 0
    """That ended with nothing decided, for want of what is needed for it."""
    decided_ticks: int = 0
    failed_calls: int = 0
    last_failure: str = ""
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By pool and reason."""
    actions: Counter[tuple[str, ScalingAction]] = field(default_factory=Counter)
    """Replicas, by pool and what was done to them, whoever wanted it."""

    def record_decisions(self, tick: AutoscalerTick) -> None:
        """Count what a tick decided."""
        for decision in tick.decisions:
            # A policy of the user's may give any reason; labels are few.
            reason = str(decision.reason) if decision.reason in _REASONS else OTHER
            self.decisions[decision.pool, reason] += 1

    def record_tick(self, tick: AutoscalerTick) -> None:
        """A turn has ended in which this was ticked."""
        if tick.paused_reason:
            self.paused_ticks += 1
        else:
            self.decided_ticks += 1

    def record_scaling(self, pool: str, *, current: int, desired: int) -> None:
        """A pool was told to have another number of replicas."""
        action = ScalingAction.START if desired > current else ScalingAction.STOP
        self.actions[pool, action] += abs(desired - current)

    def record_flip(self, pool: str, replicas: int) -> None:
        """Replicas of a pool were told to play another role."""
        self.actions[pool, ScalingAction.FLIP] += replicas

    def by_outcome(self) -> dict[TickOutcome, int]:
        """Turns that have ended."""
        return {
            TickOutcome.DECIDED: self.decided_ticks,
            TickOutcome.PAUSED: self.paused_ticks,
            TickOutcome.FAILED: self.failed_ticks,
        }
