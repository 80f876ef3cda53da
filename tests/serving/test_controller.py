"""The controller: answers to an operator, what it measures, and steps of the wall clock."""

from __future__ import annotations

import gc
import weakref

import pytest

from baton.config import DeploymentConfig
from baton.serving.controller.deployment import (
    ClockStepGuard,
    ControllerMetrics,
    ControllerService,
    HeapTrimmer,
    ReportAges,
)
from baton.serving.scaling.loop import ScalingLoop
from baton.serving.scaling.ports import TickInputs
from baton.telemetry import catalogue as c
from tests.serving.configs import simulated
from tests.serving.scaled_fleet import Clock, ScalingWorld


class Body:
    """As much of a controller as scales by hand."""

    scale = ControllerService.scale

    def __init__(self, loop: ScalingLoop, clock: Clock) -> None:
        self._loop, self._clock = loop, clock


async def scaled(world: ScalingWorld, replicas: int | None) -> dict[str, object]:
    """What an operator hears of the decode pool."""
    body = Body(world.loop, world.clock)
    world.loop.start()
    try:
        return await body.scale("decode", replicas, None)  # type: ignore[misc]
    finally:
        await world.loop.stop()


async def test_the_former_and_the_new_size_of_a_pool_are_reported() -> None:
    world = ScalingWorld()
    await world.settle()
    told = await scaled(world, 6)
    assert (told["had"], told["target"]) == (2, 6)


async def test_a_pool_of_which_serve_has_said_nothing_yet_is_refused_in_words() -> None:
    world = ScalingWorld()
    world.fleet.serve_error = TimeoutError("busy")
    told = await scaled(world, 6)
    assert "Ray Serve does not say how many replicas it has" in str(told["rejected"])
    told = await scaled(world, None)
    assert "has not reported yet how many replicas pool 'decode' has" in str(told["rejected"])
    assert "baton status" in str(told["remedy"])


async def test_a_failed_tick_is_reported_with_a_remedy() -> None:
    world = ScalingWorld()
    await world.settle()
    world.store.error = TimeoutError("GCS")
    told = await scaled(world, 6)
    assert "the controller's turn failed: TimeoutError: GCS" in str(told["rejected"])
    assert "tried again" in str(told["remedy"])


# -------------------------------------------------------------------- what it measures


PRICED = ("pools.decode.resources.price_per_hour=4", "slo.default.ttft=1s")


def config(*sets: str) -> DeploymentConfig:
    return simulated(*PRICED, *sets)


class Watched:
    """A world, and what is measured of it."""

    def __init__(self) -> None:
        self.world = ScalingWorld()
        self.hearing = ReportAges(self.world.clock)
        self.measured = self.measure(config())

    def measure(self, said: DeploymentConfig) -> ControllerMetrics:
        loop = self.world.loop
        return ControllerMetrics(
            said,
            loop=loop,
            observer=loop._observer,
            report_ages=self.hearing,
            clock=self.world.clock,
        )

    def told(self) -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in self.measured.families(generation=5, refused_configs=1)
            for sample in family.samples
        }


async def test_pools_are_told_with_their_sizes_bounds_and_prices() -> None:
    watched = Watched()
    await watched.world.settle()
    found = watched.told()
    assert found[c.POOL_REPLICAS.name, "decode", "desired"] == 2
    assert found[c.POOL_REPLICAS.name, "decode", "ready"] == 2
    assert found[c.POOL_BOUNDS.name, "decode", "max"] == 8
    assert found[c.POOL_PRICE.name, "decode"] == 4.0
    assert (c.POOL_PRICE.name, "prefill") not in found
    assert found[(c.CONFIG_GENERATION.name,)] == 5
    assert found[(c.CONFIG_REJECTED.name,)] == 1


async def test_turns_and_decisions_are_counted_beyond_what_is_remembered() -> None:
    watched = Watched()
    await watched.world.tick(350)
    found = watched.told()
    held = found.get((c.SCALING_DECISIONS.name, "decode", "paused"), 0)
    fixed = found[c.SCALING_DECISIONS.name, "decode", "fixed"]
    assert held + fixed == 350, "a history of 300 ticks cannot say that"
    turns = [value for key, value in found.items() if key[0] == c.AUTOSCALER_TICKS.name]
    assert sum(turns) == 350


async def test_operator_actions_count_as_well() -> None:
    watched = Watched()
    await watched.world.settle()
    watched.world.loop._autoscaler.override("decode", 5, until_s=None, now_s=0.0)
    await watched.world.tick()
    found = watched.told()
    assert found[c.SCALING_ACTIONS.name, "decode", "start"] == 3
    assert found[(c.POOL_OVERRIDES.name,)] == 1


async def test_before_the_first_turn_bounds_are_known_and_nothing_is_decided() -> None:
    found = Watched().told()
    assert found[c.POOL_BOUNDS.name, "decode", "min"] == 1
    assert found[(c.AUTOSCALER_PAUSED.name,)] == 1
    assert found[c.SLO_OBJECTIVE.name, "default", "ttft"] == 1.0


async def test_a_price_that_is_applied_holds_from_then_on() -> None:
    watched = Watched()
    await watched.world.tick(10)
    watched.measured.reconfigure(config("pools.decode.resources.price_per_hour=0"))
    await watched.world.tick(10)
    # Two replicas for the 18 s between ten looks, which nobody scraped before the price changed.
    assert watched.told()[c.COST.name, "(idle)"] == pytest.approx(2 * 18 / 3600 * 4.0)


# ----------------------------------------------------------------------- who was heard


async def test_the_age_of_reports_is_that_of_the_last_turn_in_which_all_came() -> None:
    clock = Clock()
    hearing = ReportAges(clock)
    report = ScalingWorld().fleet.report()
    clock.at_s += 7.0
    assert hearing.age_s == 7.0, "since the beginning, while there was none"
    await hearing.on_tick(TickInputs(reports=(report,)))
    assert (hearing.age_s, hearing.unresponsive) == (0.0, 0)
    clock.at_s += 2.0
    await hearing.on_tick(
        TickInputs(reports=(report,), missing=("ingress: no answer",), unresponsive_ingresses=1)
    )
    assert (hearing.age_s, hearing.unresponsive) == (2.0, 1)
    await hearing.on_tick(TickInputs())
    assert hearing.age_s == 2.0, "that nobody is there is no report"


async def test_an_unresponsive_serve_is_no_unresponsive_ingress() -> None:
    world = ScalingWorld()
    world.fleet.serve_error = RuntimeError("no")
    await world.tick()
    assert world.reader.inputs[-1].unresponsive_ingresses == 0
    assert world.reader.inputs[-1].missing
    world.fleet.unresponsive = ("ingress: no answer", "ingress: no answer")
    await world.tick()
    assert world.reader.inputs[-1].unresponsive_ingresses == 2


async def test_a_controller_trims_unused_memory_now_and_then() -> None:
    class Thing:
        pass

    clock = Clock()
    tidying, looks = (
        HeapTrimmer(clock),
        TickInputs(states={}, reports=(), missing=(), unresponsive_ingresses=0),
    )
    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]  # a cycle
    gone = weakref.ref(thing)
    del thing
    gc.disable()  # so that nobody else does
    try:
        clock.at_s += 59.0
        await tidying.on_tick(looks)
        assert gone() is not None
        clock.at_s += 1.0
        await tidying.on_tick(looks)
        assert gone() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------- steps of the wall clock


HOUR_S = 3600.0
LOOKS = TickInputs()


class Machine:
    """Two clocks, and what was done about them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.step_s = 0.0
        self.begun_anew = 0
        self.fails = False
        self.watch = ClockStepGuard(self.clock, self._wall, self._restart)

    def _wall(self) -> float:
        return 1e9 + self.clock.at_s + self.step_s

    async def _restart(self) -> None:
        if self.fails:
            raise ConnectionError("no Serve")
        self.begun_anew += 1

    async def turn(self, *, step_s: float = 0.0) -> int:
        """Two seconds later, after a step of the wall clock: how often Serve was begun anew."""
        self.clock.at_s += 2.0
        self.step_s += step_s
        await self.watch.on_tick(LOOKS)
        return self.begun_anew


async def test_a_clock_that_is_set_back_restarts_serves_timers_once() -> None:
    machine = Machine()
    assert await machine.turn() == 0
    assert await machine.turn(step_s=-HOUR_S) == 1
    assert await machine.turn() == 1
    assert await machine.turn(step_s=-HOUR_S) == 2


@pytest.mark.parametrize("step_s", [HOUR_S, 0.5, -0.5])
async def test_a_clock_that_is_set_forward_or_slewed_does_not(step_s: float) -> None:
    assert await Machine().turn(step_s=step_s) == 0


async def test_a_failed_call_is_retried() -> None:
    machine = Machine()
    machine.fails = True
    with pytest.raises(ConnectionError):
        await machine.turn(step_s=-HOUR_S)
    machine.fails = False
    assert await machine.turn() == 1
