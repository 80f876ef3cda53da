"""At most so many legs fetch blocks into a replica at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from baton.domain.events import LegFailed, LoadReported
from baton.domain.fleet import Load
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.runtime.link.client import LinkClient
from baton.runtime.replica_host import HostOptions, ReplicaHost
from tests.fakes.link_rig import EventLog, hosting, joined
from tests.fakes.scripted_engine import ScriptedEngine, make_leg, make_ticket


def pulling_leg(leg_id: str, *, prompt_tokens: int = 40) -> Leg:
    leg = make_leg(leg_id, prompt=(1,) * prompt_tokens)
    return evolve(leg, kind=LegKind.DECODE, ticket=make_ticket(leg_id, tokens=32))


@asynccontextmanager
async def limited(
    max_pulls: int | None,
) -> AsyncIterator[tuple[ReplicaHost, ScriptedEngine, LinkClient, EventLog]]:
    options = HostOptions(max_concurrent_pulls=max_pulls, pull_s=60.0)
    async with hosting(options=options) as (host, engine), joined(host) as (client, log):
        yield host, engine, client, log


async def settled(client: LinkClient, engine: ScriptedEngine, leg_id: str) -> None:
    """All that was sent before has been dealt with: a leg that pulls nothing gets through."""
    client.submit("decode-1", make_leg(leg_id))
    await engine.watch.until(lambda: leg_id in engine.running)


async def reported(log: EventLog, holds: Callable[[Load], bool]) -> Load:
    """Wait for a load report of which something holds, and return it."""
    await log.until(lambda: any(holds(event.load) for event in log.of(LoadReported)))
    return next(event.load for event in log.of(LoadReported) if holds(event.load))


def pulling(engine: ScriptedEngine) -> list[str]:
    return [leg.leg_id for leg in engine.submitted if leg.ticket is not None]


async def test_legs_beyond_the_limit_wait_and_others_pass_them() -> None:
    async with limited(2) as (_, engine, client, _):
        for leg_id in "abcd":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        assert pulling(engine) == ["a", "b"]


async def test_without_a_limit_none_waits() -> None:
    async with limited(None) as (_, engine, client, _):
        for leg_id in "abcd":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        assert pulling(engine) == ["a", "b", "c", "d"]


async def test_a_first_output_lets_the_next_one_pull_in_order_of_arrival() -> None:
    async with limited(1) as (_, engine, client, log):
        for leg_id in "abc":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        engine.emit(LegOutput("local", (1,)))
        await log.wait_tokens("local", 1)
        assert pulling(engine) == ["a"]
        engine.emit(LegOutput("a", (1,)))
        await engine.watch.until(lambda: pulling(engine) == ["a", "b"])
        engine.emit(LegOutput("a", (2,)))
        await log.wait_tokens("a", 2)
        await settled(client, engine, "another")
        assert pulling(engine) == ["a", "b"]
        engine.emit(LegOutput("b", (), FinishReason.ERROR))
        await engine.watch.until(lambda: pulling(engine) == ["a", "b", "c"])


async def test_a_pull_that_never_ends_holds_up_the_others_for_a_while_only() -> None:
    options = HostOptions(max_concurrent_pulls=1, pull_s=0.1)
    async with hosting(options=options) as (host, engine), joined(host) as (client, log):
        for leg_id in "abc":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        assert pulling(engine) == ["a"]
        await engine.watch.until(lambda: pulling(engine) == ["a", "b", "c"])
        assert not log.of(LegFailed)
        assert set(engine.running) == {"a", "b", "c", "local"}


@pytest.mark.parametrize("answer", [LegFailure.KV_LOAD_FAILED, RuntimeError("no")])
async def test_a_leg_that_the_engine_does_not_take_lets_the_next_one_pull(
    answer: LegFailure | Exception,
) -> None:
    async with limited(1) as (_, engine, client, log):
        engine.answer = answer
        client.submit("decode-1", pulling_leg("a"))
        await log.wait(LegFailed)
        engine.answer = None
        client.submit("decode-1", pulling_leg("b"))
        await engine.watch.until(lambda: pulling(engine) == ["b"])


async def test_an_aborted_pull_lets_the_next_one_pull_once_it_is_over() -> None:
    async with limited(1) as (_, engine, client, log):
        for leg_id in "ab":
            client.submit("decode-1", pulling_leg(leg_id))
        await engine.watch.until(lambda: pulling(engine) == ["a"])
        engine.abort_gate.clear()
        client.abort("decode-1", ["a"])
        await settled(client, engine, "local")
        assert pulling(engine) == ["a"]
        engine.abort_gate.set()
        await engine.watch.until(lambda: pulling(engine) == ["a", "b"])
        await log.wait_aborted("a")


async def test_aborting_a_leg_that_waits_frees_the_source_and_never_starts_it() -> None:
    async with limited(1) as (host, engine, client, log):
        for leg_id in "abc":
            client.submit("decode-1", pulling_leg(leg_id))
        client.abort("decode-1", ["b"])
        await log.wait_aborted("b")
        await engine.watch.until(lambda: engine.released == [make_ticket("b")])
        engine.emit(LegOutput("a", (1,)))
        await engine.watch.until(lambda: pulling(engine) == ["a", "c"])
        assert engine.aborted == []
        assert host.live_legs == 2


async def test_an_abort_that_follows_the_permit_reaches_the_engine() -> None:
    async with limited(1) as (_, engine, client, log):
        for leg_id in "ab":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        engine.submit_gate.clear()
        engine.emit(LegOutput("a", (1,)))
        await log.wait_tokens("a", 1)
        client.abort("decode-1", ["b"])
        await log.wait(LoadReported, len(log.of(LoadReported)) + 2)
        engine.submit_gate.set()
        await log.wait_aborted("b")
        assert pulling(engine) == ["a", "b"]
        assert engine.aborted == ["b"]
        assert engine.released == []


async def test_a_coordinator_that_goes_takes_its_waiting_legs_along() -> None:
    options = HostOptions(max_concurrent_pulls=1)
    async with hosting(options=options) as (host, engine), joined(host, "stays") as (client, _):
        async with joined(host, "goes") as (going, _):
            for leg_id in "ab":
                going.submit("decode-1", pulling_leg(leg_id))
            await settled(going, engine, "local")
            client.submit("decode-1", pulling_leg("c"))
        await engine.watch.until(lambda: pulling(engine) == ["a", "c"])
        assert engine.released == [make_ticket("b")]
        assert set(engine.aborted) == {"a", "local"}


async def test_a_leg_that_lost_its_coordinator_on_the_way_frees_its_source() -> None:
    async with hosting() as (host, engine):
        async with joined(host) as (client, _):
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
        await engine.watch.until(lambda: set(engine.aborted) >= {"a", "b"})
        await engine.watch.until(lambda: engine.released == [make_ticket("b")])
        assert pulling(engine) == ["a"]


async def test_a_waiting_leg_is_reported_as_queued_not_as_pulling() -> None:
    async with limited(1) as (_, engine, client, log):
        engine.current_load = Load(pulling_requests=1)
        for leg_id in "abc":
            client.submit("decode-1", pulling_leg(leg_id, prompt_tokens=40))
        load = await reported(log, lambda load: load.queued_requests == 2)
        assert load.pulling_requests == 1
        assert load.queued_tokens == 2 * 8  # the rest arrives as blocks


async def test_a_drain_waits_for_those_that_wait() -> None:
    async with limited(1) as (host, engine, client, _):
        for leg_id in "ab":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        host.drain()
        for leg_id in ("local", "a"):
            engine.emit(LegOutput(leg_id, (1,), FinishReason.LENGTH))
        await engine.watch.until(lambda: "b" in engine.running)
        assert not host.drained.is_set()
        engine.emit(LegOutput("b", (1,), FinishReason.LENGTH))
        async with asyncio.timeout(5):
            await host.drained.wait()


async def test_aborting_the_last_waiting_leg_ends_a_drain() -> None:
    async with limited(1) as (host, engine, client, log):
        for leg_id in "ab":
            client.submit("decode-1", pulling_leg(leg_id))
        await settled(client, engine, "local")
        host.drain()
        engine.emit(
            LegOutput("local", (1,), FinishReason.LENGTH),
        )
        client.abort("decode-1", ["a", "b"])
        await log.wait_aborted("a", "b")
        async with asyncio.timeout(5):
            await host.drained.wait()


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrent_pulls is 0"):
        HostOptions(max_concurrent_pulls=0)
