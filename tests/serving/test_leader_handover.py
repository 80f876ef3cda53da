"""A scaling loop that takes over from another holds still until it has seen enough."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.control.autoscaling.autoscaler import Override
from baton.serving.scaling.plan import ScalingPlan
from tests.serving.scaled_fleet import ScalingWorld, plan


async def took_over(rules: ScalingPlan) -> ScalingWorld:
    """A loop that begins where another one acted until now."""
    world = ScalingWorld(rules)
    world.store.owner = "another controller"
    await world.loop.claim()
    return world


async def test_a_loop_that_takes_over_holds_still_until_it_has_seen_a_whole_window() -> None:
    world = await took_over(plan(decode=5))  # ticks of two seconds, of which fifteen are a window
    await world.tick(15)
    assert world.fleet.calls == []
    assert "another controller acted until now" in world.loop.history()[-1].paused_reason
    await world.tick(2)
    assert world.fleet.calls == [("decode", 5)]


async def test_time_with_an_unresponsive_ingress_was_not_watched() -> None:
    world = await took_over(plan(decode=5))
    world.fleet.unresponsive = ("ingress: no answer to 'report' within 2 s",)
    await world.tick(20)
    world.fleet.unresponsive = ()
    await world.tick(15)
    assert world.fleet.calls == []
    await world.tick(2)
    assert world.fleet.calls == [("decode", 5)]


async def test_an_operators_word_is_carried_out_by_a_loop_that_just_took_over() -> None:
    world = await took_over(plan())
    world.store.overrides = {"decode": Override(replicas=4)}
    await world.tick()
    assert world.fleet.targets["decode"] == 4


async def test_the_first_loop_of_a_deployment_has_missed_nothing() -> None:
    world = ScalingWorld(plan(decode=5))
    world.store.owner = None
    await world.loop.claim()
    await world.tick(2)
    assert world.fleet.targets["decode"] == 5


async def test_a_loop_that_another_one_has_relieved_has_ended() -> None:
    world = ScalingWorld(replace(plan(), options=replace(plan().options, interval_s=0.0)))
    world.loop.start()
    await world.store.queried.acquire()
    ended_at_once = world.loop.has_ended
    world.store.owner = "another controller"
    task = world.loop._task._task
    assert task is not None
    async with asyncio.timeout(5):
        await asyncio.wait({task})
    assert (ended_at_once, world.loop.has_ended) == (False, True), (
        "Serve has to hear of it: nobody scales here any more"
    )
    await world.loop.stop()
    assert not world.loop.has_ended, "one that was stopped is as it should be"
