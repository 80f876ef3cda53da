"""A stage without Ray is up in seconds, takes faults, and leaves nothing running."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from baton.domain.fleet import Role
from baton.runtime.link.options import LinkOptions
from tests.chaos import faults
from tests.chaos.history import Ending, Exchange, History, check_invariants
from tests.chaos.load import HttpClient, Load, open_loop, send_sequentially
from tests.chaos.proxy import LinkConditions
from tests.chaos.stage import StageSpec, sim_stage

_FEW = Load(rate_per_s=100, requests=20, output_tokens=(8, 24), deadline_s=20)
_PAIR = (Role.PREFILL, Role.DECODE)


async def test_requests_are_served_and_nothing_is_held_or_left_running() -> None:
    async with sim_stage(StageSpec(roles=_PAIR, has_proxies=True)) as stage:
        pids = [replica.pid for replica in stage.replicas.values()]
        exchanges = await open_loop(_FEW, stage.ingresses[0].send)
        history = History(
            exchanges=exchanges,
            expected_tokens=stage.expected_tokens,
            records=stage.records(),
            counters=await stage.wait_idle(),
        )
        assert all(record.prefill_done_at_s is not None for record in stage.records())
        assert stage.side_channels["prefill-0"].connections >= len(exchanges), "pulls went past it"
    bounds, note = check_invariants(history)
    assert all(bound.is_met for bound in bounds), note
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_killed_replica_is_lost_at_once_and_its_streams_go_on() -> None:
    async with sim_stage(StageSpec(roles=(*_PAIR, Role.DECODE))) as stage:
        ingress = stage.ingresses[0]
        load = Load(rate_per_s=100, requests=12, output_tokens=(60, 90), deadline_s=30)
        running = asyncio.create_task(open_loop(load, ingress.send))
        async with asyncio.timeout(20):
            while sum(bool(exchange.tokens) for exchange in ingress.exchanges.values()) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        victim = stage.busiest(Role.DECODE)
        killed_s = stage.kill(victim)
        exchanges = await running
        lost_s = ingress.lost_at_s(victim, since_s=killed_s - 1)
        assert lost_s is not None
        assert lost_s - killed_s < 1.0
        assert any(record.resumes for record in stage.records()), "the kill has hit no stream"
        assert [stage.expected_tokens(exchange) for exchange in exchanges] == [
            tuple(exchange.tokens) for exchange in exchanges
        ]
        assert not any((await stage.wait_idle()).values())


@pytest.mark.thorough
async def test_links_go_through_proxies_and_a_frozen_replica_sends_no_heartbeat() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.8)
    plan = StageSpec(roles=(Role.DECODE, Role.DECODE), has_proxies=True, link=link)
    async with sim_stage(plan) as stage:
        ingress = stage.ingresses[0]
        name, other = stage.replicas_of_role(Role.DECODE)
        way = stage.links[ingress.name, name]
        assert way.passed_bytes > 0
        way.set_conditions(up=LinkConditions(is_stalled=True), down=LinkConditions(is_stalled=True))
        stage.links[ingress.name, other].reset()
        await ingress.wait_until(lambda: ingress.change_at_s(name, "unresponsive") is not None)
        await ingress.wait_until(lambda: ingress.change_at_s(other, "disconnected") is not None)
        way.set_conditions(up=LinkConditions(), down=LinkConditions())
        await ingress.wait_until(
            lambda: ingress.view(name) is not None and ingress.view(other) is not None
        )
        with faults.stopped_processes(stage.replicas[other].pid):
            await ingress.wait_until(lambda: ingress.change_at_s(other, "unresponsive") is not None)
        await ingress.wait_until(lambda: ingress.view(other) is not None)


@pytest.mark.thorough
async def test_a_disconnect_frees_its_slot_and_an_empty_fleet_rejects() -> None:
    async with sim_stage(StageSpec(roles=(Role.DECODE,))) as stage:
        ingress, name = stage.ingresses[0], stage.replicas_of_role(Role.DECODE)[0]
        leaver = Exchange(request_id="leaver", prompt=(3, 4, 5), max_tokens=2000)
        asking = asyncio.create_task(ingress.send(leaver))
        await ingress.wait_until(
            lambda: (view := ingress.view(name)) is not None and view.inflight_legs > 0
        )
        ingress.cancel(leaver)
        await asking
        assert not any((await stage.wait_idle()).values())
        stage.kill(name)
        await ingress.wait_until(lambda: ingress.view(name) is None)
        late = Exchange(request_id="late", prompt=(3, 4, 5), max_tokens=5)
        await ingress.send(late)
        assert (leaver.ending, late.ending) == (Ending.CANCELLED, Ending.REJECTED)
        assert (late.status, (late.retry_after_s or 0) > 0) == (503, True)


@pytest.mark.thorough
async def test_a_coordinator_in_a_process_of_its_own_is_killed_and_the_other_serves_on() -> None:
    async with sim_stage(StageSpec(roles=_PAIR, ingresses=0, ingress_processes=2)) as stage:
        first, other = stage.ingress_processes.values()
        async with HttpClient(first.url) as dying, HttpClient(other.url) as living:
            exchanges = await open_loop(_FEW, living.send)
            assert (
                check_invariants(
                    History(exchanges=exchanges, expected_tokens=stage.expected_tokens)
                )[1]
                == ""
            )
            assert len(await other.records()) == 20
            left = Exchange(request_id="left", prompt=(3, 4), max_tokens=4000)
            await send_sequentially([left], living.send, deadline_s=0.3)
            assert not any((await stage.wait_idle(timeout_s=5)).values()), "its client has left"
            cut = Exchange(request_id="cut", prompt=(3, 4), max_tokens=2000)
            async with asyncio.TaskGroup() as group:
                group.create_task(dying.send(cut))
                while not cut.tokens:  # noqa: ASYNC110 - clients have no event
                    await asyncio.sleep(0.01)
                stage.kill_ingress(first.name)
            assert cut.ending is Ending.CUT
            assert [tuple(exchange.tokens) for exchange in exchanges] == [
                *map(stage.expected_tokens, exchanges)
            ]
            assert not any((await stage.wait_idle()).values())
