from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from baton.domain.errors import AdapterFailed, EngineDied
from baton.domain.events import LegFailed, LegsAborted, LoadReported, ReplicaLost, StepCompleted
from baton.domain.fleet import Load, LossReason
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.runtime.replica_host import HostOptions, ReplicaHost
from tests.fakes.link_rig import ANY_PORT, FAST_LINK, joined_client, running_host
from tests.fakes.scripted_engine import ScriptedEngine, make_kv_handle, make_leg


async def test_a_leg_that_the_engine_refuses_is_reported_as_failed() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.submit_result = LegFailure.REJECTED
        client.submit("decode-1", make_leg("a"))
        failed = await log.wait(LegFailed)
        assert (failed.leg_id, failed.failure) == ("a", LegFailure.REJECTED)
        assert host.live_legs == 0


async def test_an_engine_that_raises_on_submit_fails_one_leg_only() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.submit_result = RuntimeError("no such adapter")
        client.submit("decode-1", make_leg("a"))
        failed = await log.wait(LegFailed)
        assert failed.failure is LegFailure.ENGINE_ERROR
        assert "no such adapter" in failed.why
        engine.submit_result = None
        client.submit("decode-1", make_leg("b"))
        await engine.watch.wait_until(lambda: "b" in engine.running)
        assert not log.of_type(ReplicaLost)


async def test_a_leg_whose_adapter_cannot_be_loaded_is_refused_with_the_reason() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.submit_result = AdapterFailed("ada", "/adapters/ada: no such folder")
        client.submit("decode-1", make_leg("a"))
        failed = await log.wait(LegFailed)
        # Not an engine's failure: another try would end the same, and the replica is well.
        assert failed.failure is LegFailure.REJECTED
        assert failed.why == "adapter ada: /adapters/ada: no such folder"


async def test_an_engine_that_never_accepts_fails_the_leg_at_the_deadline() -> None:
    async with (
        running_host(options=HostOptions(submit_timeout_s=0.05)) as (host, engine),
        joined_client(host) as (client, log),
    ):
        engine.submit_gate.clear()
        client.submit("decode-1", make_leg("a"))
        assert (await log.wait(LegFailed)).failure is LegFailure.ENGINE_ERROR
        await engine.watch.wait_until(lambda: "a" in engine.aborted)


async def test_an_abort_never_overtakes_its_leg() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.submit_gate.clear()
        client.submit("decode-1", make_leg("a"))
        client.submit("decode-1", make_leg("b"))
        client.abort("decode-1", ["b"])
        client.submit("decode-1", make_leg("c"))
        client.abort("decode-1", ["unknown"])
        await log.wait_aborted("unknown")  # so the replica has received all of the above
        engine.submit_gate.set()
        await log.wait_aborted("b")
        await engine.watch.wait_until(lambda: len(engine.submitted) == 3)
        assert [leg.leg_id for leg in engine.submitted] == ["a", "b", "c"]
        assert set(engine.running) == {"a", "c"}


async def test_an_abort_is_confirmed_after_the_last_output_of_its_leg() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.abort_gate.clear()
        client.abort("decode-1", ["a"])
        engine.emit(LegOutput("a", (1,)))
        engine.emit(LegOutput("a", (2,)))
        engine.abort_gate.set()
        await log.wait_aborted("a")
        kinds = [type(e) for e in log.events if isinstance(e, StepCompleted | LegsAborted)]
        assert kinds == [StepCompleted, StepCompleted, LegsAborted]
        engine.emit(LegOutput("a", (3,)))
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 2)
        assert log.tokens("a") == [1, 2]
        assert host.link_counters.unowned_outputs == 1


async def test_a_slow_abort_does_not_hold_up_other_legs() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.abort_gate.clear()
        client.abort("decode-1", ["a"])
        client.submit("decode-1", make_leg("b", prompt=(7,)))
        await engine.watch.wait_until(lambda: "b" in engine.running)
        engine.emit(LegOutput("b", (8,)))
        assert await log.wait_tokens("b", 1) == [8]
        assert not log.aborted
        engine.abort_gate.set()
        await log.wait_aborted("a")


@pytest.mark.parametrize("leg_id", ["never-seen", "finished"])
async def test_an_abort_of_a_leg_that_does_not_live_is_confirmed(leg_id: str) -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("finished", max_tokens=1))
        await engine.watch.wait_until(lambda: "finished" in engine.running)
        engine.step_all()
        await log.wait_tokens("finished", 1)
        client.abort("decode-1", [leg_id])
        await log.wait_aborted(leg_id)


async def test_a_leg_that_finishes_while_it_is_aborted_gets_both_answers() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.abort_gate.clear()
        client.abort("decode-1", ["a", "a"])
        client.abort("decode-1", ["a"])
        engine.emit(LegOutput("a", (1,), FinishReason.STOP, kv_handle=make_kv_handle()))
        await log.wait_tokens("a", 1)
        engine.abort_gate.set()
        await log.wait_aborted("a")
        assert host.live_legs == 0


async def test_an_engine_that_does_not_stop_a_leg_is_taken_for_dead() -> None:
    async with (
        running_host(options=HostOptions(abort_timeout_s=0.05)) as (host, engine),
        joined_client(host) as (client, log),
    ):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.abort_gate.clear()
        client.abort("decode-1", ["a"])
        assert (await log.wait_lost()).reason is LossReason.ENGINE_DEAD
        assert host.failed.done()


async def test_a_release_reaches_the_engine() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, _):
        client.release("decode-1", make_kv_handle("t9"))
        await engine.watch.wait_until(lambda: engine.released == [make_kv_handle("t9")])


async def test_a_leg_id_that_runs_already_is_refused_and_the_first_goes_on() -> None:
    async with (
        running_host() as (host, engine),
        joined_client(host, "c1") as (one, log1),
        joined_client(host, "c2") as (two, log2),
    ):
        one.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        two.submit("decode-1", make_leg("a"))
        assert (await log2.wait(LegFailed)).failure is LegFailure.REJECTED
        engine.step_all()
        assert await log1.wait_tokens("a", 1) == [4]
        assert log2.tokens("a") == []


async def test_more_legs_than_the_bound_are_refused_as_overload() -> None:
    async with (
        running_host(options=HostOptions(max_live_legs=2)) as (host, _),
        joined_client(host) as (client, log),
    ):
        for leg_id in "abc":
            client.submit("decode-1", make_leg(leg_id))
        failed = await log.wait(LegFailed)
        assert (failed.leg_id, failed.failure) == ("c", LegFailure.OVERLOADED)


async def test_a_draining_replica_takes_no_new_leg_and_finishes_its_own() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a", max_tokens=2))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        host.drain()
        client.submit("decode-1", make_leg("b"))
        failed = await log.wait(LegFailed)
        assert (failed.leg_id, failed.failure) == ("b", LegFailure.DRAINING)
        engine.step_all()
        await log.wait_tokens("a", 1)
        assert not host.drained.is_set()
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        assert await log.wait_tokens("a", 2) == [4, 5]


async def test_an_idle_replica_is_drained_at_once() -> None:
    async with running_host() as (host, _):
        host.drain()
        assert host.drained.is_set()


async def test_a_drain_that_does_not_end_by_itself_ends_at_its_deadline() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, _):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        host.drain(deadline_s=0.05)
        async with asyncio.timeout(5):
            await host.drained.wait()
        assert host.live_legs == 1


async def finish_a_prefill(host: ReplicaHost, engine: ScriptedEngine) -> None:
    async with joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("p"))
        await engine.watch.wait_until(lambda: "p" in engine.running)
        engine.emit(LegOutput("p", (1,), FinishReason.LENGTH, kv_handle=make_kv_handle("t1")))
        await log.wait_tokens("p", 1)


async def test_a_drain_waits_for_a_lease_until_the_engine_holds_no_blocks() -> None:
    async with running_host() as (host, engine), joined_client(host, "watcher") as (_, log):
        engine.current_load = Load(kv_used_fraction=0.1)
        await finish_a_prefill(host, engine)
        host.drain()
        assert host.leases == 1
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 5)
        assert not host.drained.is_set()
        engine.current_load = Load(kv_used_fraction=0.0)
        async with asyncio.timeout(5):
            await host.drained.wait()


async def test_a_lease_holds_a_drain_for_as_long_as_the_engine_keeps_blocks() -> None:
    """Whoever waits for the blocks renews it, and only the engine hears of that."""
    async with (
        running_host(options=HostOptions(lease_s=0.1)) as (host, engine),
        joined_client(host, "other") as (_, log),
    ):
        engine.current_load = Load(kv_used_fraction=0.1)
        await finish_a_prefill(host, engine)
        host.drain()
        async with asyncio.timeout(5):
            while host.leases:  # noqa: ASYNC110 - nobody tells when one has expired
                await asyncio.sleep(0.01)
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 2)
        assert not host.drained.is_set()
        engine.current_load = Load()
        async with asyncio.timeout(5):
            await host.drained.wait()


async def test_a_released_kv_handle_is_no_lease_any_more() -> None:
    async with running_host() as (host, engine), joined_client(host, "other") as (client, _):
        engine.current_load = Load(kv_used_fraction=0.1)
        await finish_a_prefill(host, engine)
        client.release("decode-1", make_kv_handle("t1"))
        await engine.watch.wait_until(lambda: bool(engine.released))
        engine.current_load = Load()
        host.drain()
        async with asyncio.timeout(5):
            await host.drained.wait()


async def test_a_drain_after_the_engines_death_waits_for_nothing() -> None:
    """Neither for a leg that no coordinator owns, nor for a KV handle that may be in use."""
    async with running_host(options=HostOptions(lease_s=60.0)) as (host, engine):
        async with joined_client(host) as (client, log):
            engine.current_load = engine.current_load._replace(kv_used_fraction=0.4)
            for leg_id in ("held", "orphan"):
                client.submit("decode-1", make_leg(leg_id))
            await engine.watch.wait_until(lambda: {"held", "orphan"} <= engine.running.keys())
            engine.emit(LegOutput("held", (1,), FinishReason.STOP, kv_handle=make_kv_handle()))
            await log.wait_until(lambda: bool(log.of_type(StepCompleted)))
            engine.abort_gate.clear()  # it answers no abort from now on
        async with asyncio.timeout(10):
            while host.coordinators:  # noqa: ASYNC110 - the host has no event for it
                await asyncio.sleep(0.01)
        engine.crash()
        await asyncio.wait_for(asyncio.shield(host.failed), 10)
        assert host.live_legs + host.leases == 2
        host.drain(deadline_s=60.0)
        assert host.drained.is_set()


async def test_an_engine_that_dies_while_draining_ends_the_drain() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, _):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        host.drain()
        engine.crash()
        async with asyncio.timeout(5):
            await host.drained.wait()
        assert isinstance(await host.failed, EngineDied)


async def test_an_address_in_use_is_named_and_the_engine_is_closed_again() -> None:
    async with running_host() as (host, _):
        second = ScriptedEngine()
        rival = ReplicaHost(second, bind=host.address, link=FAST_LINK)
        with pytest.raises(OSError, match=re.escape(host.address)):
            await rival.start()
        assert second.closed


async def test_closing_leaves_no_task_and_no_descriptor_behind(
    open_descriptors: Callable[[], int],
) -> None:
    async with running_host():
        pass
    before, tasks = open_descriptors(), asyncio.all_tasks()
    for _ in range(5):
        engine = ScriptedEngine()
        host = ReplicaHost(engine, bind=ANY_PORT, link=FAST_LINK)
        await host.start()
        async with joined_client(host):
            await host.close()
            await host.close()
        assert engine.closed
    assert asyncio.all_tasks() == tasks
    assert open_descriptors() <= before


def pulling_leg(leg_id: str) -> Leg:
    leg = make_leg(leg_id, prompt=(1,) * 40)
    return evolve(leg, kind=LegKind.DECODE, kv_handle=make_kv_handle(leg_id, tokens=32))


async def test_a_leg_that_waits_for_the_engine_is_reported_as_queued_with_what_it_computes() -> (
    None
):
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.submit_gate.clear()
        for leg_id in "abc":
            client.submit("decode-1", pulling_leg(leg_id))
        await log.wait_until(
            lambda: any(event.load.queued_requests == 2 for event in log.of_type(LoadReported))
        )
        load = next(e.load for e in log.of_type(LoadReported) if e.load.queued_requests == 2)
        assert load.queued_tokens == 2 * 8  # the rest arrives as blocks
        assert host.live_legs == 3
        engine.submit_gate.set()


async def test_a_leg_that_lost_its_coordinator_on_the_way_frees_its_source() -> None:
    async with running_host() as (host, engine):
        async with joined_client(host) as (client, _):
            engine.submit_gate.clear()
            for leg_id in "ab":
                client.submit("decode-1", pulling_leg(leg_id))
            async with asyncio.timeout(5):
                while host.live_legs < 2:  # noqa: ASYNC110 - nobody tells when a leg has arrived
                    await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            while host.coordinators:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engine.submit_gate.set()
        await engine.watch.wait_until(lambda: set(engine.aborted) >= {"a", "b"})
        await engine.watch.wait_until(lambda: engine.released == [make_kv_handle("b")])
        assert [leg.leg_id for leg in engine.submitted] == ["a"]
