"""An autoscaler's changes to a simulated fleet, and their cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, assert_never

from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.observation import Observation

_HOUR_S = 3600.0


class Scaler(Protocol):
    """The autoscaler: `control.autoscaling.autoscaler.Autoscaler`."""

    def tick(self, observation: Observation) -> AutoscalerTick:
        """The actions for this observation."""
        ...


class Direction(StrEnum):
    """Kind of a change to a pool."""

    UP = "up"
    DOWN = "down"
    TO_PREFILL = "prefill"
    TO_DECODE = "decode"
    TO_MIXED = "mixed"


_OPPOSITE = {
    Direction.UP: frozenset({Direction.DOWN}),
    Direction.DOWN: frozenset({Direction.UP}),
    Direction.TO_PREFILL: frozenset({Direction.TO_DECODE, Direction.TO_MIXED}),
    Direction.TO_DECODE: frozenset({Direction.TO_PREFILL, Direction.TO_MIXED}),
    Direction.TO_MIXED: frozenset({Direction.TO_PREFILL, Direction.TO_DECODE}),
}


class ScalingChange(NamedTuple):
    """Replicas of a pool were started or stopped, or changed their role."""

    at_s: float
    pool: str
    direction: Direction
    replicas: int

    def reverses(self, previous: ScalingChange) -> bool:
        """Whether this change undoes `previous`."""
        return previous.direction in _OPPOSITE[self.direction]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """All changes from the first tick to the end."""

    span_s: float
    ticks: int = 0
    paused_ticks: int = 0
    """Ticks without a decision because data was missing."""
    changes: tuple[ScalingChange, ...] = ()
    replica_seconds: Mapping[str, float] = field(default_factory=dict)
    """By pool: from the request for a replica until it leaves, or to the end."""
    gpu_seconds: float = 0.0

    @property
    def gpu_hours(self) -> float:
        """Of all pools."""
        return self.gpu_seconds / _HOUR_S

    @property
    def actions_per_hour(self) -> float:
        """Starts, stops and role changes; several replicas at a time count once."""
        return _per_hour(len(self.changes), self.span_s)

    @property
    def reversals_per_hour(self) -> float:
        """Changes that undo the previous change of the same pool and kind.

        The time between them does not matter: a day's rise and fall count, too.
        """
        return _per_hour(count_reversals(self.changes), self.span_s)


EMPTY_SCALING_REPORT = ScalingReport(span_s=0.0)


def count_reversals(changes: Iterable[ScalingChange]) -> int:
    """Number of changes that undo the previous change of the same pool and kind (size or role)."""
    last: dict[tuple[str, bool], ScalingChange] = {}
    count = 0
    for change in changes:
        is_resize = change.direction in {Direction.UP, Direction.DOWN}
        previous = last.get((change.pool, is_resize))
        count += previous is not None and change.reverses(previous)
        last[change.pool, is_resize] = change
    return count


def to_change(action: ScalingAction, at_s: float) -> ScalingChange:
    """The record of an action."""
    match action:
        case StartReplicas():
            return ScalingChange(
                at_s=at_s, pool=action.pool, direction=Direction.UP, replicas=action.replicas
            )
        case StopReplicas():
            return ScalingChange(
                at_s=at_s, pool=action.pool, direction=Direction.DOWN, replicas=action.replicas
            )
        case FlipReplicas():
            return ScalingChange(
                at_s=at_s,
                pool=action.pool,
                direction=Direction(str(action.role)),
                replicas=action.replicas,
            )
        case _:
            assert_never(action)


class ScalingRecorder:
    """Collects changes during a run."""

    def __init__(self) -> None:
        self._ticks = 0
        self._paused_ticks = 0
        self._changes: list[ScalingChange] = []

    def record_tick(self, tick: AutoscalerTick) -> None:
        """Record one tick of the autoscaler."""
        self._ticks += 1
        self._paused_ticks += bool(tick.paused_reason)
        self._changes += [to_change(action, tick.at_s) for action in tick.actions]

    def report(
        self,
        span_s: float,
        *,
        replica_seconds: Mapping[str, float],
        gpus_per_replica: Mapping[str, float],
    ) -> ScalingReport:
        """The report of all recorded ticks."""
        return ScalingReport(
            span_s=span_s,
            ticks=self._ticks,
            paused_ticks=self._paused_ticks,
            changes=tuple(self._changes),
            replica_seconds=dict(replica_seconds),
            gpu_seconds=sum(
                gpus_per_replica.get(pool, 1.0) * took_s for pool, took_s in replica_seconds.items()
            ),
        )


def _per_hour(count: int, span_s: float) -> float:
    return count * _HOUR_S / span_s if span_s else 0.0
