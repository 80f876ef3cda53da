"""The few numbers that Ray's own metrics have, too."""

from __future__ import annotations

import math

from baton.control.class_counts import ClassCounts
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, Service
from baton.serving.ray_gauges import MIRRORED, Mirrored, RayGauges
from baton.serving.scaling_ports import Looks
from baton.telemetry.controller_metrics import ClassFare, ControllerState, PoolSize

LOOKS = Looks()


class Clock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


class Gauge:
    def __init__(self) -> None:
        self.values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[tuple(tags.items())] = value


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.gauges: dict[str, Gauge] = {}
        self.state = state()
        self.asked = 0
        self.mirror = RayGauges(self.now, clock=self.clock, make=self.make)

    def now(self) -> ControllerState:
        self.asked += 1
        return self.state

    def make(self, one: Mirrored) -> Gauge:
        return self.gauges.setdefault(one.name, Gauge())

    def told(self, name: str) -> dict[str, float]:
        """By the value of the gauge's tag."""
        return {
            tags[0][1] if tags else "": value for tags, value in self.gauges[name].values.items()
        }


def state(*pools: str) -> ControllerState:
    pool = PoolObservation(
        name="decode", role=Role.DECODE, decode=3, kv_used_fraction=0.5, busy_fraction=0.25
    )
    seen = Observation(
        at_s=0.0,
        window_s=30.0,
        demand=Demand(requests_per_s=2.0),
        service=Service(in_flight=7, held=1),
        pools={"decode": pool},
    )
    chat = ClassFare(slo=Slo(name="chat"), lately=ClassCounts(judged=4, good=3), good_per_s=1.5)
    sizes = tuple(PoolSize(name=name, min=1, max=8, want=4) for name in pools or ("decode",))
    return ControllerState(
        version="1", model="m", generation=0, pools=sizes, seen=seen, classes=(chat,)
    )


async def test_pools_classes_and_demand_are_mirrored() -> None:
    world = World()
    await world.mirror.take(LOOKS)
    assert world.told("baton_pool_ready") == {"decode": 3}
    assert world.told("baton_pool_want") == {"decode": 4}
    assert world.told("baton_pool_kv_used_fraction") == {"decode": 0.5}
    assert world.told("baton_goodput_per_second") == {"chat": 1.5}
    assert world.told("baton_attainment_fraction") == {"chat": 0.75}
    assert world.told("baton_in_flight_requests") == {"": 7}
    assert world.told("baton_held_requests") == {"": 1}
    assert len(MIRRORED) == len(world.gauges) == 10


async def test_they_are_set_no_more_often_than_ray_looks_at_them() -> None:
    world = World()
    for _ in range(12):
        await world.mirror.take(LOOKS)
        world.clock.at_s += 2.0
    assert world.asked == 3  # at 0, 10 and 20 s


async def test_what_is_not_known_any_more_is_taken_back_once() -> None:
    world = World()
    world.state = state("decode", "prefill")
    await world.mirror.take(LOOKS)
    assert world.told("baton_pool_want") == {"decode": 4, "prefill": 4}
    world.state = state("decode")
    world.clock.at_s += 10.0
    await world.mirror.take(LOOKS)
    assert math.isnan(world.told("baton_pool_want")["prefill"])
    del world.gauges["baton_pool_want"].values[("pool", "prefill"),]
    world.clock.at_s += 10.0
    await world.mirror.take(LOOKS)
    assert world.told("baton_pool_want") == {"decode": 4}
