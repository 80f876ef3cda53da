"""A stage without Ray is up in seconds, takes faults, and leaves nothing running."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from baton.domain.fleet import Role
from baton.runtime.link.options import LinkOptions
from tests.chaos import faults
from tests.chaos.history import Ending, Exchange, History, judged
from tests.chaos.load import HttpClient, Load, one_by_one, open_loop
from tests.chaos.proxy import Weather
from tests.chaos.stage import SimPlan, sim_stage

_FEW = Load(rate_per_s=100, requests=20, output_tokens=(8, 24), deadline_s=20)
_PAIR = (Role.PREFILL, Role.DECODE)


async def test_requests_are_served_and_nothing_is_held_or_left_running() -> None:
    async with sim_stage(SimPlan(roles=_PAIR, proxied=True)) as stage:
        pids = [replica.pid for replica in stage.replicas.values()]
        exchanges = await open_loop(_FEW, stage.doors[0].ask)
        history = History(
            exchanges=exchanges,
            wanted=stage.wanted,
            records=stage.records(),
            counters=await stage.quiet(),
        )
        assert all(record.prefill_done_at_s is not None for record in stage.records())
        assert stage.side_channels["prefill-0"].connections >= len(exchanges), "pulls went past it"
    bounds, note = judged(history)
    assert all(bound.held for bound in bounds), note
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_killed_replica_is_lost_at_once_and_its_streams_go_on() -> None:
    async with sim_stage(SimPlan(roles=(*_PAIR, Role.DECODE))) as stage:
        door = stage.doors[0]
        load = Load(rate_per_s=100, requests=12, output_tokens=(60, 90), deadline_s=30)
        running = asyncio.create_task(open_loop(load, door.ask))
        async with asyncio.timeout(20):
            while sum(bool(one.tokens) for one in door.exchanges.values()) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        victim = stage.busiest(Role.DECODE)
        killed_s = stage.kill(victim)
        exchanges = await running
        lost_s = door.lost_at_s(victim, since_s=killed_s - 1)
        assert lost_s is not None
        assert lost_s - killed_s < 1.0
        assert any(record.resumes for record in stage.records()), "the kill has hit nobody"
        assert [stage.wanted(one) for one in exchanges] == [tuple(one.tokens) for one in exchanges]
        assert not any((await stage.quiet()).values())


@pytest.mark.thorough
async def test_links_go_through_proxies_and_a_frozen_replica_falls_silent() -> None:
    link = LinkOptions(beat_s=0.05, liveness_s=0.8)
    plan = SimPlan(roles=(Role.DECODE, Role.DECODE), proxied=True, link=link)
    async with sim_stage(plan) as stage:
        door = stage.doors[0]
        name, other = stage.named(Role.DECODE)
        way = stage.links[door.name, name]
        assert way.passed_bytes > 0
        way.set_weather(up=Weather(stalled=True), down=Weather(stalled=True))
        stage.links[door.name, other].reset()
        await door.until(lambda: door.when(name, "silent") is not None)
        await door.until(lambda: door.when(other, "disconnected") is not None)
        way.set_weather(up=Weather(), down=Weather())
        await door.until(lambda: door.view(name) is not None and door.view(other) is not None)
        with faults.frozen(stage.replicas[other].pid):
            await door.until(lambda: door.when(other, "silent") is not None)
        await door.until(lambda: door.view(other) is not None)


@pytest.mark.thorough
async def test_who_leaves_frees_what_was_held_and_who_finds_nobody_is_refused() -> None:
    async with sim_stage(SimPlan(roles=(Role.DECODE,))) as stage:
        door, name = stage.doors[0], stage.named(Role.DECODE)[0]
        leaver = Exchange(request_id="leaver", prompt=(3, 4, 5), max_tokens=2000)
        asking = asyncio.create_task(door.ask(leaver))
        await door.until(lambda: (view := door.view(name)) is not None and view.inflight_legs > 0)
        door.leave(leaver)
        await asking
        assert not any((await stage.quiet()).values())
        stage.kill(name)
        await door.until(lambda: door.view(name) is None)
        late = Exchange(request_id="late", prompt=(3, 4, 5), max_tokens=5)
        await door.ask(late)
        assert (leaver.ending, late.ending) == (Ending.LEFT, Ending.REFUSED)
        assert (late.status, (late.retry_after_s or 0) > 0) == (503, True)


@pytest.mark.thorough
async def test_a_coordinator_in_a_process_of_its_own_is_killed_and_the_other_serves_on() -> None:
    async with sim_stage(SimPlan(roles=_PAIR, doors=0, fronts=2)) as stage:
        first, other = stage.fronts.values()
        async with HttpClient(first.url) as dying, HttpClient(other.url) as living:
            exchanges = await open_loop(_FEW, living.ask)
            assert judged(History(exchanges=exchanges, wanted=stage.wanted))[1] == ""
            assert len(await other.records()) == 20
            left = Exchange(request_id="left", prompt=(3, 4), max_tokens=4000)
            await one_by_one([left], living.ask, deadline_s=0.3)
            assert not any((await stage.quiet(within_s=5)).values()), "its client has left"
            cut = Exchange(request_id="cut", prompt=(3, 4), max_tokens=2000)
            async with asyncio.TaskGroup() as group:
                group.create_task(dying.ask(cut))
                while not cut.tokens:  # noqa: ASYNC110 - clients tell nobody
                    await asyncio.sleep(0.01)
                stage.kill_front(first.name)
            assert cut.ending is Ending.CUT
            assert [tuple(one.tokens) for one in exchanges] == [*map(stage.wanted, exchanges)]
            assert not any((await stage.quiet()).values())
