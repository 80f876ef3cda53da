"""What a scaling loop has done since it began; only ever grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.policy.scaling.actions import Tick
from baton.policy.scaling.desired import ScalingReason
from baton.telemetry.catalogue import OTHER
from baton.telemetry.label_values import ScalingAct, TurnOutcome

_REASONS = frozenset(ScalingReason)


@dataclass(slots=True)
class ScalingCounters:
    """Counted as it happens: ticks themselves are remembered for a while only."""

    turns: int = 0
    """That were begun."""
    failed_turns: int = 0
    held_turns: int = 0
    """That ended with nothing decided, for want of what is needed for it."""
    decided_turns: int = 0
    failed_calls: int = 0
    last_failure: str = ""
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By pool and reason."""
    actions: Counter[tuple[str, ScalingAct]] = field(default_factory=Counter)
    """Replicas, by pool and what was done to them, whoever wanted it."""

    def decided(self, tick: Tick) -> None:
        """Count what a tick decided."""
        for one in tick.decisions:
            # A policy of the user's may give any reason; labels are few.
            reason = str(one.reason) if one.reason in _REASONS else OTHER
            self.decisions[one.pool, reason] += 1

    def turned(self, tick: Tick) -> None:
        """A turn has ended in which this was ticked."""
        if tick.held:
            self.held_turns += 1
        else:
            self.decided_turns += 1

    def scaled(self, pool: str, *, had: int, want: int) -> None:
        """A pool was told to have another number of replicas."""
        act = ScalingAct.START if want > had else ScalingAct.STOP
        self.actions[pool, act] += abs(want - had)

    def flipped(self, pool: str, replicas: int) -> None:
        """Replicas of a pool were told to play another role."""
        self.actions[pool, ScalingAct.FLIP] += replicas

    def by_outcome(self) -> dict[TurnOutcome, int]:
        """Turns that have ended."""
        return {
            TurnOutcome.DECIDED: self.decided_turns,
            TurnOutcome.HELD: self.held_turns,
            TurnOutcome.FAILED: self.failed_turns,
        }
