"""Ingresses come and go by what they use; nothing is decided while one of them is silent."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.policy.scaling.ingresses import IngressBounds
from baton.serving.controller.ingress_scaler import IngressScaler, IngressUsage
from baton.serving.scaling.ports import TickInputs
from tests.serving.scaled_fleet import Clock


@dataclass
class Doors:
    """Ingresses that use as much as is said."""

    clock: Clock
    busy: dict[str, float]
    cores: float = 1.0
    silent: int = 0
    target: int | None = 1
    ordered: list[int] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=dict)

    def passes(self, seconds: float) -> None:
        self.clock.at_s += seconds
        for name, busy in self.busy.items():
            self.used_s[name] = self.used_s.get(name, 0.0) + busy * self.cores * seconds

    async def used(self) -> tuple[tuple[IngressUsage, ...], int]:
        now_s = self.clock.now_s()
        told = (IngressUsage(n, self.used_s.get(n, 0.0), now_s, self.cores) for n in self.busy)
        return tuple(told), self.silent

    async def seen(self) -> int | None:
        return self.target

    async def scale(self, replicas: int) -> None:
        self.ordered.append(replicas)
        self.target = replicas

    def desk(self, most: int = 4) -> IngressScaler:
        bounds = IngressBounds(min=1, max=most)
        return IngressScaler(
            bounds, usage=self.used, target=self.seen, scale=self.scale, clock=self.clock
        )


async def test_a_second_one_comes_when_the_first_has_little_left() -> None:
    doors = Doors(Clock(), {"a": 0.9})
    desk = doors.desk()
    await desk.on_tick(TickInputs())
    assert doors.ordered == [], "nobody knows yet how busy it is"
    doors.passes(2.0)
    await desk.on_tick(TickInputs())
    assert doors.ordered == [2]
    doors.passes(2.0)
    await desk.on_tick(TickInputs())
    assert doors.ordered == [2], "the second one has not come yet"


async def test_what_one_can_use_counts() -> None:
    doors = Doors(Clock(), {"a": 0.5}, cores=4.0)
    desk = doors.desk()
    await desk.on_tick(TickInputs())
    doors.passes(2.0)
    await desk.on_tick(TickInputs())
    assert doors.ordered == []


async def test_nothing_is_decided_while_one_is_silent_or_serve_is() -> None:
    doors = Doors(Clock(), {"a": 0.9})
    desk = doors.desk()
    await desk.on_tick(TickInputs())
    for silent, target in ((1, 1), (0, None)):
        doors.silent, doors.target = silent, target
        doors.passes(2.0)
        await desk.on_tick(TickInputs())
    assert doors.ordered == []


async def test_one_goes_when_there_is_little_to_do() -> None:
    doors = Doors(Clock(), {"a": 0.1, "b": 0.1}, target=2)
    desk = doors.desk()
    for _ in range(33):
        await desk.on_tick(TickInputs())
        doors.passes(2.0)
    assert doors.ordered == [1]


async def test_where_their_number_is_fixed_nobody_is_asked() -> None:
    doors = Doors(Clock(), {"a": 0.9})
    desk = doors.desk(most=1)
    for _ in range(3):
        doors.passes(2.0)
        await desk.on_tick(TickInputs())
    assert doors.ordered == []
