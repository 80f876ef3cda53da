"""What an autoscaler has done to a simulated fleet: its changes, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, assert_never

from baton.policy.scaling.actions import (
    Action,
    FlipReplicas,
    StartReplicas,
    StopReplicas,
    Tick,
)
from baton.policy.scaling.observation import Observation

_HOUR_S = 3600.0


class Scaler(Protocol):
    """What decides: `control.autoscaler.Autoscaler`."""

    def tick(self, seen: Observation) -> Tick:
        """What is to be done now."""
        ...


class Direction(StrEnum):
    """Which way a pool was changed."""

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


class Change(NamedTuple):
    """Replicas of a pool were started, stopped, or given another role."""

    at_s: float
    pool: str
    direction: Direction
    replicas: int

    def undoes(self, before: Change) -> bool:
        """Whether this goes back on the change before it."""
        return before.direction in _OPPOSITE[self.direction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that was done, from the first tick to the end."""

    span_s: float
    ticks: int = 0
    held: int = 0
    """Ticks that decided nothing because something could not be seen."""
    changes: tuple[Change, ...] = ()
    replica_seconds: Mapping[str, float] = field(default_factory=dict)
    """By pool: from being asked for to being gone, or to the end."""
    gpu_seconds: float = 0.0

    @property
    def gpu_hours(self) -> float:
        """Of all pools."""
        return self.gpu_seconds / _HOUR_S

    @property
    def actions_per_hour(self) -> float:
        """Starts, stops and flips, however many replicas at a time."""
        return _per_hour(len(self.changes), self.span_s)

    @property
    def reversals_per_hour(self) -> float:
        """Changes that go the other way than the one before it of the same pool and kind.

        However long ago that was: a day's rise and fall count, too.
        """
        return _per_hour(reversals(self.changes), self.span_s)


NO_STORY = Story(span_s=0.0)


def reversals(changes: Iterable[Change]) -> int:
    """How many changes undo the last one of the same pool: sizes and roles each by themselves."""
    last: dict[tuple[str, bool], Change] = {}
    count = 0
    for change in changes:
        resized = change.direction in {Direction.UP, Direction.DOWN}
        before = last.get((change.pool, resized))
        count += before is not None and change.undoes(before)
        last[change.pool, resized] = change
    return count


def change_of(action: Action, at_s: float) -> Change:
    """An action, as it is kept."""
    match action:
        case StartReplicas():
            return Change(at_s, action.pool, Direction.UP, action.replicas)
        case StopReplicas():
            return Change(at_s, action.pool, Direction.DOWN, action.replicas)
        case FlipReplicas():
            return Change(at_s, action.pool, Direction(str(action.to)), action.replicas)
        case _:
            assert_never(action)


class StoryTeller:
    """Keeps the changes while they happen."""

    def __init__(self) -> None:
        self._ticks = 0
        self._held = 0
        self._changes: list[Change] = []

    def ticked(self, tick: Tick) -> None:
        """The autoscaler has decided."""
        self._ticks += 1
        self._held += bool(tick.held)
        self._changes += [change_of(action, tick.at_s) for action in tick.actions]

    def told(
        self,
        span_s: float,
        *,
        replica_seconds: Mapping[str, float],
        gpus_per_replica: Mapping[str, float],
    ) -> Story:
        """All of it."""
        return Story(
            span_s=span_s,
            ticks=self._ticks,
            held=self._held,
            changes=tuple(self._changes),
            replica_seconds=dict(replica_seconds),
            gpu_seconds=sum(
                gpus_per_replica.get(pool, 1.0) * took_s for pool, took_s in replica_seconds.items()
            ),
        )


def _per_hour(count: int, span_s: float) -> float:
    return count * _HOUR_S / span_s if span_s else 0.0
