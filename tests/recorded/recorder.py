"""Records what the brain is told and what it orders: events in, commands out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.coordinator import Coordinator
from baton.domain.commands import Command
from baton.domain.events import Event
from baton.policy.scaling.actions import AutoscalerTick
from baton.policy.scaling.observation import Observation
from tests.recorded.canonical import canonical

CHECKED_EVERY = 250


@dataclass(frozen=True, slots=True)
class Digest:
    """What a case came to."""

    calls: int
    """Events and ticks."""
    orders: dict[str, int]
    """How many of each command, by its name."""
    checkpoints: tuple[str, ...]
    """Of all lines so far, after every 250 of them and at the end."""


@dataclass(slots=True)
class Recorder:
    """Keeps no line, but a digest of them; each of `on_lines` is told every line."""

    on_lines: list[Callable[[str], object]] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)
    _calls: int = 0
    _orders: Counter[str] = field(default_factory=Counter)
    _checkpoints: list[str] = field(default_factory=list)
    _machines: dict[int, tuple[int, object]] = field(default_factory=dict)

    def add(self, machine: object, told: object, at_s: float | None, orders: object) -> None:
        """One call of a machine, which is named by when it was first seen."""
        number, _ = self._machines.setdefault(id(machine), (len(self._machines), machine))
        line = f"{number} {canonical(at_s)} {canonical(told)} -> {canonical(orders)}\n"
        self._hash.update(line.encode())
        for on_line in self.on_lines:
            on_line(line)
        self._calls += 1
        if isinstance(orders, list):
            self._orders.update(canonical(order).partition("(")[0] for order in orders)
        if self._calls % CHECKED_EVERY == 0:
            self._checkpoints.append(self._now())

    def digest(self) -> Digest:
        """Of all that was recorded."""
        last = () if self._calls % CHECKED_EVERY == 0 else (self._now(),)
        return Digest(self._calls, dict(sorted(self._orders.items())), (*self._checkpoints, *last))

    def _now(self) -> str:
        return str(self._hash.hexdigest()[:16])


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Have every coordinator and every autoscaler of this process recorded."""
    handle, tick = Coordinator.handle, Autoscaler.tick

    @wraps(handle)
    def handled(self: Coordinator, event: Event, now_s: float) -> list[Command]:
        commands = handle(self, event, now_s)
        recorder.add(self, event, now_s, commands)
        return commands

    @wraps(tick)
    def ticked(self: Autoscaler, observation: Observation) -> AutoscalerTick:
        done = tick(self, observation)
        recorder.add(self, observation, None, done)
        return done

    Coordinator.handle, Autoscaler.tick = handled, ticked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Coordinator.handle, Autoscaler.tick = handle, tick  # type: ignore[method-assign]
