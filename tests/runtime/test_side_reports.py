"""What a replica says of its pulls, of other replicas' side channels, and of legs on their way."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.events import LegFailed, LinksReported, LoadReported, SideChannelChecked
from baton.domain.fleet import LinkTotals, Load
from baton.domain.handoff import LegFailure
from baton.runtime.replica_host import HostOptions
from baton.runtime.side_channel_checks import WORKERS
from tests.fakes.link_rig import joined_client, running_host
from tests.fakes.scripted_engine import ScriptedEngine, make_leg

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
        assert (checked.is_reachable, checked.why) == (True, "")
        assert engine.checks == [("p0", "host:1")]


async def test_a_side_channel_that_fails_is_reported_with_the_reason() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        engine.unreachable["p0"] = "its layout is another"
        client.check_side_channel("decode-1", "p0", "host:1")
        checked = await log.wait(SideChannelChecked)
        assert (checked.is_reachable, checked.why) == (False, "its layout is another")


async def test_a_silent_side_channel_fails_at_the_deadline() -> None:
    async with (
        running_host(options=HostOptions(check_timeout_s=0.05)) as (host, engine),
        joined_client(host) as (client, log),
    ):
        engine.check_gate.clear()
        client.check_side_channel("decode-1", "p0", "host:1")
        checked = await log.wait(SideChannelChecked)
        assert not checked.is_reachable
        assert "0.05 s" in checked.why
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
        said = {checked.source_id: checked.why for checked in log.of_type(SideChannelChecked)}
        assert said == {"p0": "ArithmeticError: a bug", "p1": ""}
        assert not host.failed.done()


async def test_coordinators_that_ask_the_same_share_one_check_and_all_hear_of_it() -> None:
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
        assert (await log.wait(SideChannelChecked, 2)).why == "gone"


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
