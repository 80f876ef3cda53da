"""The scaling loop acts exactly, holds when it sees too little, and keeps an operator's word."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from baton.control.autoscaling.autoscaler import Override
from baton.domain.errors import ScalingRefused
from baton.domain.fleet import Role
from baton.policy.scaling.actions import FlipReplicas
from baton.policy.scaling.desired import ScalingReason, Want
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.serving.scaling.loop import Superseded
from baton.serving.scaling.ports import whom_to_flip
from tests.serving.scaled_fleet import World, plan


class FlipOne:
    """A policy that wants one prefill replica to decode."""

    name = "flip-one"

    def __init__(self, _options: AutoscalerOptions) -> None:
        pass

    def wants(self, seen: Observation) -> dict[str, Want]:
        return {
            name: Want(
                replicas=pool.ready,
                reason=ScalingReason.BALANCE,
                flips={Role.DECODE: 1} if name == "prefill" else {},
            )
            for name, pool in seen.pools.items()
        }


class Forgets:
    """A policy that forgets to answer."""

    name = "forgets"

    def __init__(self, _options: AutoscalerOptions) -> None:
        pass

    def wants(self, seen: Observation) -> None:
        pass


FLIP_ONE = f"{__name__}:FlipOne"
FORGETS = f"{__name__}:Forgets"


async def test_a_pool_is_told_exactly_how_many_replicas_to_have() -> None:
    world = World(plan(decode=5))
    await world.turn(2)
    assert world.fleet.targets == {"prefill": 2, "decode": 5}
    assert world.loop.states["decode"].target == 5, "operators are told at once"


async def test_nothing_is_done_again_while_a_pool_has_what_it_should() -> None:
    world = World(plan(decode=5))
    await world.settle()
    await world.turn(5)
    assert world.fleet.calls == []


async def test_a_pool_that_should_be_smaller_is_told_so() -> None:
    world = World()
    world.fleet.targets["decode"] = 3
    await world.turn(3)
    assert world.fleet.calls == [("decode", 2)]


async def test_a_silent_ingress_makes_it_hold_and_say_so() -> None:
    world = World()
    await world.settle()
    world.fleet.silent = ("ingress: no answer to 'report' within 2 s",)
    world.loop.reconfigure(plan(decode=5))
    await world.turn(3)
    assert world.fleet.calls == []
    assert "no answer to 'report'" in world.loop.history()[-1].held


async def test_why_it_holds_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await world.settle()
    caplog.clear()
    with caplog.at_level(logging.INFO, "baton"):
        world.fleet.silent = ("ingress: gone",)
        await world.turn(3)
        world.fleet.silent = ()
        await world.turn(3)
    told = [(one.levelname, one.message) for one in caplog.records]
    assert told == [("WARNING", "scaling_held"), ("INFO", "scaling_goes_on")]


async def test_it_goes_on_when_the_ingress_speaks_again() -> None:
    world = World()
    await world.settle()
    world.fleet.silent = ("ingress: gone",)
    world.loop.reconfigure(plan(decode=5))
    await world.turn(3)
    world.fleet.silent = ()
    await world.turn(2)
    assert world.fleet.targets["decode"] == 5


async def test_it_holds_while_serve_does_not_answer() -> None:
    world = World()
    await world.settle()
    world.fleet.serve_fails = TimeoutError("GCS")
    world.loop.reconfigure(plan(decode=5))
    await world.turn(2)
    assert world.fleet.calls == []
    last = world.loop.history()[-1]
    assert "Serve does not say" in last.held
    assert [decision.have for decision in last.decisions] == [2, 2], "what was known last"


async def test_a_pool_that_serve_does_not_know_is_waited_for() -> None:
    world = World(plan(decode=5))
    del world.fleet.targets["prefill"]
    await world.turn(3)
    assert "Serve does not know pool prefill" in world.loop.history()[-1].held
    assert world.fleet.calls == []


async def test_a_call_that_fails_is_counted_and_made_again() -> None:
    world = World()
    await world.settle()
    world.fleet.acting_fails = TimeoutError("busy")
    world.loop.reconfigure(plan(decode=5))
    await world.turn()
    assert world.loop.counters.failed_calls == 1
    assert "busy" in world.loop.counters.last_failure
    world.fleet.acting_fails = None
    await world.turn()
    assert world.fleet.targets["decode"] == 5


async def test_a_call_that_failed_is_not_made_again_when_it_is_not_wanted_any_more() -> None:
    world = World()
    await world.settle()
    world.fleet.acting_fails = TimeoutError("busy")
    world.loop.reconfigure(plan(decode=5))
    await world.turn()
    world.fleet.acting_fails = None
    world.fleet.calls.clear()
    world.loop.reconfigure(plan())
    await world.turn(3)
    assert world.fleet.calls == []


async def test_what_keeps_failing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await world.settle()
    caplog.clear()
    world.fleet.acting_fails = TimeoutError("busy")
    world.loop.reconfigure(plan(decode=5))
    with caplog.at_level(logging.INFO, "baton"):
        await world.turn(4)
    assert [one.message for one in caplog.records] == ["scaling_call_failed"]
    assert world.loop.counters.failed_calls == 4


async def test_a_dry_run_does_nothing() -> None:
    world = World(plan(decode=5, dry_run=True))
    await world.turn(4)
    assert world.fleet.calls == []
    assert {one.pool: one.want for one in world.loop.history()[-1].decisions}["decode"] == 5


async def test_a_dry_run_makes_no_call_again_that_has_failed_before() -> None:
    world = World()
    await world.settle()
    world.fleet.acting_fails = TimeoutError("busy")
    world.loop.reconfigure(plan(decode=5))
    await world.turn()
    world.fleet.acting_fails = None
    world.fleet.calls.clear()
    world.loop.reconfigure(plan(decode=5, dry_run=True))
    await world.turn(2)
    assert world.fleet.calls == []


async def test_a_replica_is_told_to_play_another_role() -> None:
    world = World(plan(rule=FLIP_ONE))
    await world.turn(2)
    assert world.fleet.calls == [("prefill", (("prefill-0",), Role.DECODE))]
    await world.turn(3)
    assert len(world.fleet.calls) == 1, "it plays it already"


async def test_a_flip_that_fails_is_tried_again() -> None:
    world = World(plan(rule=FLIP_ONE))
    world.fleet.acting_fails = TimeoutError("busy")
    await world.turn(2)
    world.fleet.acting_fails = None
    await world.turn()
    assert world.fleet.roles == {"prefill-0": Role.DECODE}


def test_replicas_that_play_the_role_already_are_not_flipped() -> None:
    world = World()
    world.fleet.roles["prefill-0"] = Role.DECODE
    flip = FlipReplicas(pool="prefill", replicas=2, to=Role.DECODE)
    assert whom_to_flip(flip, (world.fleet.report(),)) == ("prefill-1",)


def test_only_replicas_of_the_pool_are_flipped() -> None:
    world = World()
    flip = FlipReplicas(pool="prefill", replicas=3, to=Role.MIXED)
    assert whom_to_flip(flip, (world.fleet.report(),)) == ("prefill-0", "prefill-1")


# ----------------------------------------------------------------------- an operator's word


async def test_an_override_counts_at_once_and_without_any_report() -> None:
    world = World()
    world.fleet.silent = ("ingress: gone",)
    await world.override(6, for_s=60.0)
    assert world.fleet.targets["decode"] == 6


async def test_an_override_that_runs_out_leaves_the_pool_to_the_autoscaler() -> None:
    world = World()
    await world.settle()
    await world.override(3, for_s=60.0)
    await world.turn(29)
    assert world.fleet.targets["decode"] == 3
    await world.turn(2 + 150)  # `down.cooldown` is five minutes
    assert world.fleet.targets["decode"] == 2
    assert world.memory.overrides == {}


async def test_an_override_that_is_taken_back_leaves_the_pool_to_the_autoscaler() -> None:
    world = World()
    await world.settle()
    await world.override(1, for_s=None)
    assert world.loop.overrides() == {"decode": Override(replicas=1)}
    await world.release()
    assert world.loop.overrides() == world.memory.overrides == {}
    await world.turn()
    assert world.fleet.targets["decode"] == 2


async def test_an_override_survives_a_new_controller() -> None:
    world = World()
    await world.settle()
    await world.override(6, for_s=60.0)
    world.fleet.targets["decode"] = 2  # as if Serve had forgotten it, too
    world.another_loop(plan())
    await world.turn()
    assert world.fleet.targets["decode"] == 6
    (override,) = world.loop.overrides().values()
    assert override.until_s == pytest.approx(world.clock.at_s - 2.0 + 60.0)


async def test_an_override_that_ran_out_while_no_controller_was_there_is_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(plan(rule="static"))
    world.memory.overrides = {"decode": Override(replicas=6, until_s=50.0)}
    world.fleet.targets["decode"] = 6
    await world.turn()
    assert world.fleet.targets["decode"] == 2
    assert world.memory.overrides == {}
    assert "override_dropped" not in caplog.messages, "it was kept for as long as it was to be"


async def test_a_kept_override_that_is_not_possible_any_more_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.memory.overrides = {"decode": Override(replicas=99)}
    await world.turn(2)
    assert world.fleet.targets["decode"] == 2
    assert world.loop.overrides() == world.memory.overrides == {}
    assert "override_dropped" in caplog.messages


async def test_an_override_that_cannot_be_carried_out_yet_is_said_and_tried_again() -> None:
    world = World()
    await world.settle()
    world.fleet.acting_fails = TimeoutError("busy")
    with pytest.raises(ScalingRefused, match=r"could not be scaled yet.*busy"):
        await world.override(6, for_s=None)
    world.fleet.acting_fails = None
    await world.turn()
    assert world.fleet.targets["decode"] == 6


async def test_what_failed_once_is_no_trouble_when_the_pool_has_what_it_should() -> None:
    world = World(plan(rule="static"))
    await world.settle()
    world.fleet.acting_fails = TimeoutError("busy")
    with pytest.raises(ScalingRefused):
        await world.override(3, for_s=5.0)
    world.fleet.targets["decode"] = 3  # somebody has helped
    await world.override(3, for_s=5.0)
    world.fleet.targets["decode"] = 2
    await world.turn(4)
    assert world.memory.overrides == {}


async def test_an_override_in_a_turn_that_fails_is_not_said_to_be_done() -> None:
    world = World()
    await world.settle()
    world.memory.fails = TimeoutError("GCS")
    with pytest.raises(ScalingRefused, match=r"'decode' may not have been scaled yet.*GCS.*again"):
        await world.override(6, for_s=None)
    world.memory.fails = None
    await world.turn()
    assert world.fleet.targets["decode"] == 6
    await world.override(5, for_s=None)


async def test_an_override_of_a_pool_that_serve_says_nothing_of_is_not_said_to_be_done() -> None:
    world = World()
    world.fleet.serve_fails = TimeoutError("busy")
    with pytest.raises(ScalingRefused, match="Serve does not say how many replicas it has"):
        await world.override(6, for_s=None)
    world.fleet.serve_fails = None
    await world.turn()
    assert world.fleet.targets["decode"] == 6
    await world.override(5, for_s=None)


@pytest.mark.parametrize(("pool", "replicas"), [("decode", 9), ("decode", -1), ("nobody", 1)])
async def test_what_a_pool_cannot_have_is_refused(pool: str, replicas: int) -> None:
    world = World()
    with pytest.raises(ScalingRefused, match=pool):
        await world.loop.override(pool, replicas, for_s=None)
    assert world.loop.overrides() == {}


async def test_taking_back_what_no_pool_has_is_refused() -> None:
    world = World()
    with pytest.raises(ScalingRefused, match="no pool 'nobody'"):
        await world.loop.release("nobody")


async def test_the_store_is_written_only_when_something_has_changed() -> None:
    world = World()
    await world.settle()
    await world.override(3, for_s=None)
    await world.turn(5)
    assert world.memory.saves == 1


# ----------------------------------------------------------------------- scaled by hand only


@pytest.mark.parametrize("rules", [plan(rule="static"), plan(rule="static", configured=False)])
async def test_without_an_autoscaler_a_pool_that_nobody_named_is_left_as_it_is(
    rules: object,
) -> None:
    world = World(rules)  # type: ignore[arg-type]
    world.fleet.targets["decode"] = 12  # somebody has used Ray's own means, and is above `max`
    await world.turn(4)
    assert world.fleet.calls == []


async def test_without_an_autoscaler_an_override_ends_at_the_size_to_start_with() -> None:
    world = World(plan(rule="static", decode=3))
    await world.settle()
    await world.override(6, for_s=60.0)
    await world.turn(29)
    assert world.fleet.targets["decode"] == 6
    await world.turn(2)
    assert world.fleet.targets == {"prefill": 2, "decode": 3}


async def test_the_way_back_is_tried_until_it_succeeds() -> None:
    world = World(plan(rule="static"))
    await world.settle()
    await world.override(6, for_s=5.0)
    world.fleet.acting_fails = TimeoutError("busy")
    await world.turn(4)
    assert world.memory.overrides.keys() == {"decode"}, "a new controller would have to know"
    world.fleet.acting_fails = None
    await world.turn()
    assert world.fleet.targets["decode"] == 2
    assert world.memory.overrides == {}


async def test_the_way_back_waits_until_serve_says_how_many_there_are() -> None:
    world = World(plan(rule="static"))
    await world.settle()
    await world.override(6, for_s=5.0)
    world.fleet.serve_fails = TimeoutError("Serve's controller is starting again")
    await world.turn(4)
    world.fleet.serve_fails = None
    del world.fleet.targets["decode"]  # it does not know every pool yet
    await world.turn()
    world.fleet.targets["decode"] = 6
    await world.turn()
    assert world.fleet.targets["decode"] == 2
    assert world.memory.overrides == {}


async def test_an_override_taken_back_while_serve_is_away_holds_no_more_for_a_new_controller() -> (
    None
):
    world = World(plan(rule="static"))
    await world.settle()
    await world.override(6, for_s=None)
    world.fleet.serve_fails = TimeoutError("Serve's controller is starting again")
    with pytest.raises(ScalingRefused, match="Serve does not say how many replicas it has"):
        await world.release()
    saves = world.memory.saves
    await world.turn(3)
    assert world.memory.saves == saves, "it is written down once"
    world.another_loop(plan(rule="static"))
    world.fleet.serve_fails = None
    await world.turn()
    assert world.fleet.targets["decode"] == 2
    assert world.loop.overrides() == world.memory.overrides == {}


# ----------------------------------------------------------------------- the task


async def test_a_turn_that_fails_is_counted_and_the_next_one_comes() -> None:
    world = World(replace(plan(), options=replace(plan().options, interval_s=0.0)))
    world.memory.fails = TimeoutError("GCS")
    world.loop.start()
    async with asyncio.timeout(5):
        for _ in range(3):
            await world.memory.asked.acquire()
        world.memory.fails = None
        await world.reader.heard.acquire()
    await world.loop.stop()
    assert world.loop.counters.failed_turns >= 2


async def test_a_loop_that_was_superseded_stops_for_good() -> None:
    world = World(plan(decode=5))
    first = world.loop
    await first.turn()
    world.another_loop(plan(decode=5))
    with pytest.raises(Superseded):
        await first.turn()


async def test_rules_that_have_not_changed_leave_the_policy_what_it_has_learned() -> None:
    world = World()
    await world.turn()
    machine = world.loop._machine
    policy = machine._policy
    world.loop.reconfigure(plan())
    assert machine._policy is policy
    world.loop.reconfigure(plan(decode=3))
    assert machine._policy is not policy


async def test_others_hear_the_reports_even_when_they_fail() -> None:
    world = World()
    world.reader.fails = True
    await world.turn(2)
    assert [len(looks.reports) for looks in world.reader.seen] == [1, 1]
    assert world.loop.counters.failed_calls == 2


async def test_others_hear_the_reports_even_when_pools_cannot_be_scaled() -> None:
    world = World()
    world.memory.overrides = {"decode": Override(replicas=99)}  # impossible: it is to be forgotten
    world.memory.save_fails = TimeoutError("GCS")
    with pytest.raises(TimeoutError):
        await world.turn()
    assert [len(looks.reports) for looks in world.reader.seen] == [1]


async def test_others_hear_the_reports_though_a_policy_answers_nothing() -> None:
    world = World(plan(rule=FORGETS))
    await world.turn(2)
    assert "policy 'forgets' answers NoneType" in world.loop.history()[-1].held
    assert len(world.reader.seen) == 2
