"""The scaling loop acts exactly, holds when it sees too little, and keeps an operator's word."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from baton.control.autoscaling.autoscaler import Override
from baton.domain.errors import ScalingRejected
from baton.domain.fleet import Role
from baton.policy.scaling.actions import FlipReplicas
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.serving.scaling.loop import LeadershipLost
from baton.serving.scaling.plan import ScalingPlan
from baton.serving.scaling.ports import replicas_to_flip
from tests.serving.scaled_fleet import ScalingWorld, plan


class FlipOne:
    """A policy that wants one prefill replica to decode."""

    name = "flip-one"

    def __init__(self, _options: AutoscalerOptions) -> None:
        pass

    def desired(self, seen: Observation) -> dict[str, DesiredReplicas]:
        return {
            name: DesiredReplicas(
                replicas=pool.ready_replicas,
                reason=ScalingReason.ROLE_FLIP,
                role_flips={Role.DECODE: 1} if name == "prefill" else {},
            )
            for name, pool in seen.pools.items()
        }


class Forgets:
    """A policy that forgets to answer."""

    name = "forgets"

    def __init__(self, _options: AutoscalerOptions) -> None:
        pass

    def desired(self, seen: Observation) -> None:
        pass


FLIP_ONE = f"{__name__}:FlipOne"
FORGETS = f"{__name__}:Forgets"


async def settled(*rules: ScalingPlan) -> ScalingWorld:
    """One in which nothing is left to do."""
    world = ScalingWorld(*rules)
    await world.settle()
    return world


async def after_a_failed_call() -> ScalingWorld:
    """One that could not start three replicas of `decode`, and could now."""
    world = await settled()
    world.fleet.action_error = TimeoutError("busy")
    world.loop.reconfigure(plan(decode=5))
    await world.tick()
    world.fleet.action_error = None
    world.fleet.calls.clear()
    return world


async def test_a_pool_is_told_exactly_how_many_replicas_to_have() -> None:
    world = ScalingWorld(plan(decode=5))
    await world.tick(2)
    assert world.fleet.targets == {"prefill": 2, "decode": 5}
    assert world.loop.states["decode"].target == 5, "operators are told at once"


async def test_nothing_is_done_again_while_a_pool_has_what_it_should() -> None:
    world = await settled(plan(decode=5))
    await world.tick(5)
    assert world.fleet.calls == []


async def test_a_pool_that_should_be_smaller_is_told_so() -> None:
    world = ScalingWorld()
    world.fleet.targets["decode"] = 3
    await world.tick(3)
    assert world.fleet.calls == [("decode", 2)]


async def test_an_unresponsive_ingress_pauses_scaling_with_a_reason() -> None:
    world = await settled()
    world.fleet.unresponsive = ("ingress: no answer to 'report' within 2 s",)
    world.loop.reconfigure(plan(decode=5))
    await world.tick(3)
    assert world.fleet.calls == []
    assert "no answer to 'report'" in world.loop.history()[-1].paused_reason


async def test_why_it_holds_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = await settled()
    caplog.clear()
    with caplog.at_level(logging.INFO, "baton"):
        world.fleet.unresponsive = ("ingress: gone",)
        await world.tick(3)
        world.fleet.unresponsive = ()
        await world.tick(3)
    told = [(record.levelname, record.message) for record in caplog.records]
    assert told == [("WARNING", "scaling_held"), ("INFO", "scaling_goes_on")]


async def test_scaling_continues_when_the_ingress_responds_again() -> None:
    world = await settled()
    world.fleet.unresponsive = ("ingress: gone",)
    world.loop.reconfigure(plan(decode=5))
    await world.tick(3)
    world.fleet.unresponsive = ()
    await world.tick(2)
    assert world.fleet.targets["decode"] == 5


async def test_it_holds_while_serve_does_not_answer() -> None:
    world = await settled()
    world.fleet.serve_error = TimeoutError("GCS")
    world.loop.reconfigure(plan(decode=5))
    await world.tick(2)
    assert world.fleet.calls == []
    last = world.loop.history()[-1]
    assert "Serve does not say" in last.paused_reason
    assert [decision.current_replicas for decision in last.decisions] == [2, 2], (
        "what was known last"
    )


async def test_a_pool_that_serve_does_not_know_is_waited_for() -> None:
    world = ScalingWorld(plan(decode=5))
    del world.fleet.targets["prefill"]
    await world.tick(3)
    assert "Serve does not know pool prefill" in world.loop.history()[-1].paused_reason
    assert world.fleet.calls == []


async def test_a_call_that_fails_is_counted_and_made_again() -> None:
    world = await after_a_failed_call()
    assert world.loop.counters.failed_calls == 1
    assert "busy" in world.loop.counters.last_failure
    await world.tick()
    assert world.fleet.targets["decode"] == 5


@pytest.mark.parametrize(
    "rules", [plan(), plan(decode=5, dry_run=True)], ids=["not wanted any more", "a dry run"]
)
async def test_a_call_that_failed_is_not_made_again_when_it_is_not_to_be(
    rules: ScalingPlan,
) -> None:
    world = await after_a_failed_call()
    world.loop.reconfigure(rules)
    await world.tick(3)
    assert world.fleet.calls == []


async def test_a_repeated_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = await settled()
    caplog.clear()
    world.fleet.action_error = TimeoutError("busy")
    world.loop.reconfigure(plan(decode=5))
    with caplog.at_level(logging.INFO, "baton"):
        await world.tick(4)
    assert [record.message for record in caplog.records] == ["scaling_call_failed"]
    assert world.loop.counters.failed_calls == 4


async def test_a_dry_run_does_nothing() -> None:
    world = ScalingWorld(plan(decode=5, dry_run=True))
    await world.tick(4)
    assert world.fleet.calls == []
    assert {
        decision.pool: decision.target_replicas for decision in world.loop.history()[-1].decisions
    }["decode"] == 5


async def test_a_replica_is_told_to_play_another_role() -> None:
    world = ScalingWorld(plan(policy=FLIP_ONE))
    await world.tick(2)
    assert world.fleet.calls == [("prefill", (("prefill-0",), Role.DECODE))]
    await world.tick(3)
    assert len(world.fleet.calls) == 1, "it plays it already"


async def test_a_flip_that_fails_is_tried_again() -> None:
    world = ScalingWorld(plan(policy=FLIP_ONE))
    world.fleet.action_error = TimeoutError("busy")
    await world.tick(2)
    world.fleet.action_error = None
    await world.tick()
    assert world.fleet.roles == {"prefill-0": Role.DECODE}


def test_replicas_that_play_the_role_already_are_not_flipped() -> None:
    world = ScalingWorld()
    world.fleet.roles["prefill-0"] = Role.DECODE
    flip = FlipReplicas(pool="prefill", replicas=2, role=Role.DECODE)
    assert replicas_to_flip(flip, (world.fleet.report(),)) == ("prefill-1",)


def test_only_replicas_of_the_pool_are_flipped() -> None:
    world = ScalingWorld()
    flip = FlipReplicas(pool="prefill", replicas=3, role=Role.MIXED)
    assert replicas_to_flip(flip, (world.fleet.report(),)) == ("prefill-0", "prefill-1")


# ----------------------------------------------------------------------- an operator's word


async def test_an_override_counts_at_once_and_without_any_report() -> None:
    world = ScalingWorld()
    world.fleet.unresponsive = ("ingress: gone",)
    await world.override(6, for_s=60.0)
    assert world.fleet.targets["decode"] == 6


async def test_an_override_that_runs_out_leaves_the_pool_to_the_autoscaler() -> None:
    world = await settled()
    await world.override(3, for_s=60.0)
    await world.tick(29)
    assert world.fleet.targets["decode"] == 3
    await world.tick(2 + 150)  # `down.cooldown` is five minutes
    assert world.fleet.targets["decode"] == 2
    assert world.store.overrides == {}


async def test_a_cleared_override_leaves_the_pool_to_the_autoscaler() -> None:
    world = await settled()
    await world.override(1, for_s=None)
    assert world.loop.overrides() == {"decode": Override(replicas=1)}
    await world.release()
    assert world.loop.overrides() == world.store.overrides == {}
    await world.tick()
    assert world.fleet.targets["decode"] == 2


async def test_an_override_survives_a_new_controller() -> None:
    world = await settled()
    await world.override(6, for_s=60.0)
    world.fleet.targets["decode"] = 2  # as if Serve had forgotten it, too
    world.restart_loop(plan())
    await world.tick()
    assert world.fleet.targets["decode"] == 6
    (override,) = world.loop.overrides().values()
    assert override.until_s == pytest.approx(world.clock.at_s - 2.0 + 60.0)


async def test_an_override_that_ran_out_while_no_controller_was_there_is_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = ScalingWorld(plan(policy="static"))
    world.store.overrides = {"decode": Override(replicas=6, until_s=50.0)}
    world.fleet.targets["decode"] = 6
    await world.tick()
    assert world.fleet.targets["decode"] == 2
    assert world.store.overrides == {}
    assert "override_dropped" not in caplog.messages, "it was kept for as long as it was to be"


async def test_a_kept_override_that_is_not_possible_any_more_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = ScalingWorld()
    world.store.overrides = {"decode": Override(replicas=99)}
    await world.tick(2)
    assert world.fleet.targets["decode"] == 2
    assert world.loop.overrides() == world.store.overrides == {}
    assert "override_dropped" in caplog.messages


async def test_an_override_that_cannot_be_carried_out_yet_is_said_and_tried_again() -> None:
    world = await settled()
    world.fleet.action_error = TimeoutError("busy")
    with pytest.raises(ScalingRejected, match=r"could not be scaled yet.*busy"):
        await world.override(6, for_s=None)
    world.fleet.action_error = None
    await world.tick()
    assert world.fleet.targets["decode"] == 6


async def test_a_past_failure_is_cleared_when_the_pool_has_its_target() -> None:
    world = await settled(plan(policy="static"))
    world.fleet.action_error = TimeoutError("busy")
    with pytest.raises(ScalingRejected):
        await world.override(3, for_s=5.0)
    world.fleet.targets["decode"] = 3  # somebody has helped
    await world.override(3, for_s=5.0)
    world.fleet.targets["decode"] = 2
    await world.tick(4)
    assert world.store.overrides == {}


async def test_an_override_in_a_turn_that_fails_is_not_said_to_be_done() -> None:
    world = await settled()
    world.store.error = TimeoutError("GCS")
    with pytest.raises(ScalingRejected, match=r"'decode' may not have been scaled yet.*GCS.*again"):
        await world.override(6, for_s=None)
    world.store.error = None
    await world.tick()
    assert world.fleet.targets["decode"] == 6
    await world.override(5, for_s=None)


async def test_an_override_of_a_pool_that_serve_says_nothing_of_is_not_said_to_be_done() -> None:
    world = ScalingWorld()
    world.fleet.serve_error = TimeoutError("busy")
    with pytest.raises(ScalingRejected, match="Serve does not say how many replicas it has"):
        await world.override(6, for_s=None)
    world.fleet.serve_error = None
    await world.tick()
    assert world.fleet.targets["decode"] == 6
    await world.override(5, for_s=None)


@pytest.mark.parametrize(("pool", "replicas"), [("decode", 9), ("decode", -1), ("nobody", 1)])
async def test_an_impossible_target_of_a_pool_is_refused(pool: str, replicas: int) -> None:
    world = ScalingWorld()
    with pytest.raises(ScalingRejected, match=pool):
        await world.loop.override(pool, replicas, for_s=None)
    assert world.loop.overrides() == {}


async def test_reverting_an_override_that_no_pool_has_is_refused() -> None:
    world = ScalingWorld()
    with pytest.raises(ScalingRejected, match="no pool 'nobody'"):
        await world.loop.release("nobody")


async def test_the_store_is_written_only_when_something_has_changed() -> None:
    world = await settled()
    await world.override(3, for_s=None)
    await world.tick(5)
    assert world.store.saves == 1


# ----------------------------------------------------------------------- scaled by hand only


@pytest.mark.parametrize("rules", [plan(policy="static"), plan(policy="static", configured=False)])
async def test_without_an_autoscaler_an_unnamed_pool_is_left_as_it_is(
    rules: object,
) -> None:
    world = ScalingWorld(rules)  # type: ignore[arg-type]
    world.fleet.targets["decode"] = 12  # somebody has used Ray's own means, and is above `max`
    await world.tick(4)
    assert world.fleet.calls == []


@pytest.mark.parametrize("size", [0, 12])
async def test_without_an_autoscaler_no_tick_claims_to_start_or_stop_replicas(size: int) -> None:
    world = ScalingWorld(plan(policy="static"))
    world.fleet.targets["decode"] = size
    await world.tick(4)
    assert [tick.actions for tick in world.loop.history()] == [()] * 4
    last = {decision.pool: decision for decision in world.loop.history()[-1].decisions}
    assert (last["decode"].target_replicas, last["decode"].limited_by) == (size, "")


async def test_roles_that_an_autoscaler_has_changed_are_changed_back_when_it_is_taken_away() -> (
    None
):
    world = ScalingWorld(plan(policy=FLIP_ONE))
    await world.tick(2)
    assert world.fleet.roles == {"prefill-0": Role.DECODE}
    world.loop.reconfigure(plan(policy="static"))
    await world.tick(2)
    assert world.fleet.roles == {"prefill-0": Role.PREFILL}


async def test_without_an_autoscaler_an_override_ends_at_the_size_to_start_with() -> None:
    world = await settled(plan(policy="static", decode=3))
    await world.override(6, for_s=60.0)
    await world.tick(29)
    assert world.fleet.targets["decode"] == 6
    await world.tick(2)
    assert world.fleet.targets == {"prefill": 2, "decode": 3}


async def test_the_way_back_is_tried_until_it_succeeds() -> None:
    world = await settled(plan(policy="static"))
    await world.override(6, for_s=5.0)
    world.fleet.action_error = TimeoutError("busy")
    await world.tick(4)
    assert world.store.overrides.keys() == {"decode"}, "a new controller would have to know"
    world.fleet.action_error = None
    await world.tick()
    assert world.fleet.targets["decode"] == 2
    assert world.store.overrides == {}


async def test_the_way_back_waits_until_serve_says_how_many_there_are() -> None:
    world = await settled(plan(policy="static"))
    await world.override(6, for_s=5.0)
    world.fleet.serve_error = TimeoutError("Serve's controller is starting again")
    await world.tick(4)
    world.fleet.serve_error = None
    del world.fleet.targets["decode"]  # it does not know every pool yet
    await world.tick()
    world.fleet.targets["decode"] = 6
    await world.tick()
    assert world.fleet.targets["decode"] == 2
    assert world.store.overrides == {}


async def test_an_override_cleared_while_serve_is_away_does_not_hold_for_a_new_controller() -> None:
    world = await settled(plan(policy="static"))
    await world.override(6, for_s=None)
    world.fleet.serve_error = TimeoutError("Serve's controller is starting again")
    with pytest.raises(ScalingRejected, match="Serve does not say how many replicas it has"):
        await world.release()
    saves = world.store.saves
    await world.tick(3)
    assert world.store.saves == saves, "it is written down once"
    world.restart_loop(plan(policy="static"))
    world.fleet.serve_error = None
    await world.tick()
    assert world.fleet.targets["decode"] == 2
    assert world.loop.overrides() == world.store.overrides == {}


# ----------------------------------------------------------------------- the task


async def test_a_turn_that_fails_is_counted_and_the_next_one_comes() -> None:
    world = ScalingWorld(replace(plan(), options=replace(plan().options, interval_s=0.0)))
    world.store.error = TimeoutError("GCS")
    world.loop.start()
    async with asyncio.timeout(5):
        for _ in range(3):
            await world.store.queried.acquire()
        world.store.error = None
        await world.reader.received.acquire()
    await world.loop.stop()
    assert world.loop.counters.failed_ticks >= 2


async def test_a_loop_that_was_superseded_stops_for_good() -> None:
    world = ScalingWorld(plan(decode=5))
    first = world.loop
    await first.run_tick()
    world.restart_loop(plan(decode=5))
    with pytest.raises(LeadershipLost):
        await first.run_tick()


async def test_rules_that_have_not_changed_leave_the_policy_what_it_has_learned() -> None:
    world = ScalingWorld()
    await world.tick()
    machine = world.loop._autoscaler
    policy = machine._policy
    world.loop.reconfigure(plan())
    assert machine._policy is policy
    world.loop.reconfigure(plan(decode=3))
    assert machine._policy is not policy


async def test_reports_reach_other_consumers_even_when_they_fail() -> None:
    world = ScalingWorld()
    world.reader.is_failing = True
    await world.tick(2)
    assert [len(looks.reports) for looks in world.reader.inputs] == [1, 1]
    assert world.loop.counters.failed_calls == 2


async def test_reports_reach_other_consumers_even_when_pools_cannot_be_scaled() -> None:
    world = ScalingWorld()
    world.store.overrides = {"decode": Override(replicas=99)}  # impossible: it is to be forgotten
    world.store.save_error = TimeoutError("GCS")
    with pytest.raises(TimeoutError):
        await world.tick()
    assert [len(looks.reports) for looks in world.reader.inputs] == [1]


async def test_reports_reach_other_consumers_though_a_policy_answers_nothing() -> None:
    world = ScalingWorld(plan(policy=FORGETS))
    await world.tick(2)
    assert "policy 'forgets' answers NoneType" in world.loop.history()[-1].paused_reason
    assert len(world.reader.inputs) == 2
