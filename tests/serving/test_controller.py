"""What the controller answers to an operator who scales by hand."""

from __future__ import annotations

from baton.runtime.ports import Clock
from baton.serving.controller.deployment import ControllerService
from baton.serving.scaling.loop import ScalingLoop
from tests.serving.scaled_fleet import ScalingWorld


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


async def test_it_says_what_a_pool_had_and_what_it_is_to_have() -> None:
    world = ScalingWorld()
    await world.settle()
    told = await scaled(world, 6)
    assert (told["had"], told["target"]) == (2, 6)


async def test_a_pool_of_which_serve_has_said_nothing_yet_is_refused_in_words() -> None:
    world = ScalingWorld()
    world.fleet.serve_error = TimeoutError("busy")
    told = await scaled(world, 6)
    assert "Ray Serve does not say how many replicas it has" in str(told["refused"])
    told = await scaled(world, None)
    assert "Ray Serve has not said yet how many replicas pool 'decode' has" in str(told["refused"])
    assert "baton status" in str(told["remedy"])


async def test_a_turn_that_fails_is_said_with_what_to_do() -> None:
    world = ScalingWorld()
    await world.settle()
    world.store.error = TimeoutError("GCS")
    told = await scaled(world, 6)
    assert "the controller's turn failed: TimeoutError: GCS" in str(told["refused"])
    assert "tried again" in str(told["remedy"])
