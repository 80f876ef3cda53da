from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from baton.domain.errors import AdapterFailed, EngineDied
from baton.domain.events import (
    LegFailed,
    LegsAborted,
    LinksReported,
    LoadReported,
    ReplicaLost,
    SideChannelChecked,
    StepCompleted,
)
from baton.domain.fleet import LinkTotals, Load, LossReason
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.replica_host import HostOptions, ReplicaHost
from baton.runtime.side_channel_checks import WORKERS
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
        assert "no such adapter" in failed.reason
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
        assert failed.reason == "adapter ada: /adapters/ada: no such folder"


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


async def test_a_leg_that_waits_for_the_engine_is_reported_as_queued_with_its_tokens() -> None:
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


# ---------- the adapters that a replica may be asked for
async def test_adapters_of_the_file_stay_and_others_come_and_go() -> None:
    known = KnownAdapters({"ada": "/a"})
    known.replace_added({"sql@1": "/s"})
    assert [await known.source(name) for name in ("ada", "sql@1")] == ["/a", "/s"]
    known.replace_added({})
    assert await known.source("ada") == "/a"
    with pytest.raises(AdapterFailed, match="no adapter of that name; it has ada"):
        await known.source("sql@1")


async def test_a_leg_that_is_faster_than_the_word_of_its_adapter_finds_it() -> None:
    looked = 0

    async def look() -> None:
        nonlocal looked
        looked += 1
        known.replace_added({"sql@1": "/s"})

    known = KnownAdapters(refresh=look)
    assert await known.source("sql@1") == "/s"
    assert await known.source("sql@1") == "/s"
    assert looked == 1


async def test_where_no_side_channel_can_be_asked_the_leg_fails_with_the_reason() -> None:
    async def look() -> None:
        raise ConnectionError("the store is away")

    with pytest.raises(AdapterFailed, match="the store is away"):
        await KnownAdapters(refresh=look).source("sql@1")


# ---------- pulls, other replicas' side channels, and legs on their way
P0 = LinkTotals("p0", pulls=3, moved_bytes=4096, busy_s=0.5, transport="tcp")
P1 = LinkTotals("p1", failures=1)


# ---------------------------------------------------------------------- pulls


async def test_only_links_of_which_something_is_new_are_reported() -> None:
    async with running_host() as (host, engine), joined_client(host) as (_, log):
        engine.current_links = (P0, P1)
        assert (await log.wait(LinksReported)).links == (P0, P1)
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 3)
        assert len(log.of_type(LinksReported)) == 1
        more = P1._replace(pulls=1)
        engine.current_links = (P0, more)
        assert (await log.wait(LinksReported, 2)).links == (more,)


async def test_a_coordinator_that_joins_is_told_of_all_links() -> None:
    async with running_host() as (host, engine), joined_client(host, "first") as (_, first):
        engine.current_links = (P0, P1)
        await first.wait(LinksReported)
        async with joined_client(host, "second") as (_, second):
            assert (await second.wait(LinksReported)).links == (P0, P1)
        assert len(first.of_type(LinksReported)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        P0._replace(busy_s=float("nan")),
        P0._replace(busy_s=float("inf")),
        P0._replace(pulls=-1),
        P0._replace(source_id="x" * 999),
    ],
)
async def test_links_that_cannot_be_are_held_back_and_the_replica_stays(wrong: LinkTotals) -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.current_links = (wrong,)
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 3)
        assert not log.of_type(LinksReported)
        assert client.counters.bad_frames == 1
        assert client.joined_ids == {"decode-1"}


# ---------------------------------------------------------------------- broken agents


async def test_a_replica_keeps_why_its_agent_is_broken_and_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_host() as (host, _), joined_client(host) as (client, log):
        client.report_broken_agent("decode-1", "it pulls from nobody")
        client.report_broken_agent("decode-1", "x" * 10_000)
        client.check_side_channel("decode-1", "p0", "host:1")
        await log.wait(SideChannelChecked)  # it was asked after that
        assert host.agent_failure == "it pulls from nobody"
        assert client.counters.bad_frames == 0
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "agent_broken"
    ]


# ---------------------------------------------------------------------- side channels


async def test_a_side_channel_that_answers_is_reported_as_reachable() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.check_side_channel("decode-1", "p0", "host:1")
        checked = await log.wait(SideChannelChecked)
        assert (checked.replica_id, checked.source_id) == ("decode-1", "p0")
        assert (checked.is_reachable, checked.reason) == (True, "")
        assert engine.checks == [("p0", "host:1")]


async def test_a_side_channel_that_fails_is_reported_with_the_reason() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.unreachable["p0"] = "its layout is another"
        client.check_side_channel("decode-1", "p0", "host:1")
        checked = await log.wait(SideChannelChecked)
        assert (checked.is_reachable, checked.reason) == (False, "its layout is another")


async def test_an_unresponsive_side_channel_fails_at_the_deadline() -> None:
    async with (
        running_host(options=HostOptions(check_timeout_s=0.05)) as (host, engine),
        joined_client(host) as (client, log),
    ):
        engine.check_gate.clear()
        client.check_side_channel("decode-1", "p0", "host:1")
        checked = await log.wait(SideChannelChecked)
        assert not checked.is_reachable
        assert "0.05 s" in checked.reason
        assert checked.elapsed_s >= 0.05


async def test_an_engine_that_breaks_in_a_check_fails_that_check_only() -> None:
    class Breaking(ScriptedEngine):
        async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
            if source_id == "p0":
                raise ArithmeticError("a bug")
            await super().check_side_channel(source_id, address, deadline_s)

    async with running_host(Breaking()) as (host, _), joined_client(host) as (client, log):
        for source_id in ("p0", "p1"):
            client.check_side_channel("decode-1", source_id, "host:1")
        await log.wait(SideChannelChecked, 2)
        said = {checked.source_id: checked.reason for checked in log.of_type(SideChannelChecked)}
        assert said == {"p0": "ArithmeticError: a bug", "p1": ""}
        assert not host.failed.done()


async def test_coordinators_with_the_same_question_share_one_check_and_its_result() -> None:
    async with (
        running_host() as (host, engine),
        joined_client(host, "c1") as (one, log1),
        joined_client(host, "c2") as (two, log2),
        joined_client(host, "c3") as (_, log3),
    ):
        engine.check_gate.clear()
        for client in (one, one, two):
            client.check_side_channel("decode-1", "p0", "host:1")
        await engine.watch.wait_until(lambda: bool(engine.checks))
        one.submit("decode-1", make_leg("a"))
        two.submit("decode-1", make_leg("b"))
        await engine.watch.wait_until(lambda: len(engine.running) == 2)  # so all three have arrived
        engine.check_gate.set()
        await log1.wait(SideChannelChecked)
        await log2.wait(SideChannelChecked)
        two.check_side_channel("decode-1", "p0", "host:1")  # soon enough to be answered by the same
        again = await log2.wait(SideChannelChecked, 2)
        assert again == log2.of_type(SideChannelChecked)[0]
        assert len(log1.of_type(SideChannelChecked)) == 1
        assert not log3.of_type(SideChannelChecked)
        assert engine.checks == [("p0", "host:1")]


async def test_an_old_result_is_not_given_again() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.check_side_channel("decode-1", "p0", "host:1")
        await log.wait(SideChannelChecked)
        engine.unreachable["p0"] = "gone"
        await asyncio.sleep(0.55)  # a result is good for half a second
        client.check_side_channel("decode-1", "p0", "host:1")
        assert (await log.wait(SideChannelChecked, 2)).reason == "gone"


async def test_another_address_of_a_source_is_another_check() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        for address in ("host:1", "host:2"):
            client.check_side_channel("decode-1", "p0", address)
        await log.wait(SideChannelChecked, 2)
        assert engine.checks == [("p0", "host:1"), ("p0", "host:2")]


async def test_a_few_checks_run_at_a_time_and_the_others_wait() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.check_gate.clear()
        for n in range(3 * WORKERS):
            client.check_side_channel("decode-1", f"p{n}", "host:1")
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(
            lambda: "a" in engine.running and len(engine.checks) == WORKERS
        )
        engine.check_gate.set()
        await log.wait(SideChannelChecked, 3 * WORKERS)
        assert {c.source_id for c in log.of_type(SideChannelChecked)} == {
            f"p{n}" for n in range(3 * WORKERS)
        }


async def test_more_checks_than_can_wait_are_left_out_and_may_be_asked_for_again() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.check_gate.clear()
        for n in range(WORKERS):
            client.check_side_channel("decode-1", f"running{n}", "host:1")
        await engine.watch.wait_until(lambda: len(engine.checks) == WORKERS)
        accepted = [host.check_side_channel(f"p{n}", "host:1") for n in range(2000)]
        assert sum(accepted) == 1024
        assert host.check_side_channel("running0", "host:1")
        client.check_side_channel("decode-1", "late", "host:1")
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.check_gate.set()
        await log.wait(SideChannelChecked, WORKERS)
        client.check_side_channel("decode-1", "late", "host:1")
        assert (await log.wait(SideChannelChecked, WORKERS + 1)).source_id == "late"


# ---------------------------------------------------------------------- legs on their way


async def test_a_load_report_says_how_many_of_ones_own_legs_it_knows_of() -> None:
    async with (
        running_host() as (host, engine),
        joined_client(host, "c1") as (one, log1),
        joined_client(host, "c2") as (_, log2),
    ):
        assert (await log1.wait(LoadReported)).received_legs == 0
        for leg_id in "ab":
            one.submit("decode-1", make_leg(leg_id))
        await engine.watch.wait_until(lambda: len(engine.running) == 2)
        engine.submit_result = LegFailure.REJECTED
        one.submit("decode-1", make_leg("c"))
        await log1.wait(LegFailed)
        for log in (log1, log2):
            await log.wait(LoadReported, len(log.of_type(LoadReported)) + 2)
        assert log1.of_type(LoadReported)[-1].received_legs == 3
        assert log2.of_type(LoadReported)[-1].received_legs == 0


async def test_legs_that_the_engine_has_not_taken_yet_are_reported_as_queued() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.current_load = Load(queued_requests=1, queued_tokens=5)
        engine.submit_gate.clear()
        for n in range(3):
            client.submit("decode-1", make_leg(f"a{n}", prompt=(1,) * 10))
        await log.wait_until(lambda: any(e.received_legs == 3 for e in log.of_type(LoadReported)))
        load = log.of_type(LoadReported)[-1].load
        assert (load.queued_requests, load.queued_tokens) == (3, 25)
        engine.submit_gate.set()
