"""Parts that live and cannot do their work say so, and Serve replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.domain.errors import ComponentUnhealthy, RdmaMissing, TransferFailed
from baton.runtime.link.client import LinkClient
from baton.runtime.replica_host import ReplicaHost
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.replica.deployment import (
    EngineReplica,
    SideChannelTiming,
    SideChannelWatch,
    start_side_channel_watch,
)
from tests.fakes.link_rig import FAST_LINK, EventLog, running_host
from tests.fakes.scripted_engine import ScriptedEngine, make_facts, make_leg
from tests.serving.configs import simulated

FAILURES = SideChannelTiming().failure_threshold


class Answers:
    """A side channel that does what it is told."""

    def __init__(self) -> None:
        self.fails: Exception | None = None

    async def __call__(self) -> None:
        if self.fails is not None:
            raise self.fails


async def test_a_side_channel_that_fails_for_a_moment_is_not_given_up() -> None:
    answers = Answers()
    watch = SideChannelWatch("decode-1", answers)
    answers.fails = TransferFailed("decode-1", "nobody listens")
    for _ in range(FAILURES - 1):
        await watch.probe()
    assert watch.failure == ""
    answers.fails = None
    await watch.probe()
    answers.fails = OSError("no route")
    for _ in range(FAILURES - 1):
        await watch.probe()
    assert watch.failure == ""


async def test_a_side_channel_that_keeps_failing_is_given_up_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = Answers()
    answers.fails = TransferFailed("decode-1", "nobody listens")
    watch = SideChannelWatch("decode-1", answers)
    for _ in range(FAILURES + 3):
        await watch.probe()
    assert "nobody listens" in watch.failure
    assert [record.message for record in caplog.records] == ["side_channel_dead"]


async def test_one_whose_blocks_would_take_a_wrong_way_is_alive() -> None:
    answers = Answers()
    answers.fails = RdmaMissing("decode-1", "they come by tcp")
    watch = SideChannelWatch("decode-1", answers)
    for _ in range(FAILURES):
        await watch.probe()
    assert watch.failure == ""


async def test_a_check_that_never_ends_has_failed() -> None:
    engine = ScriptedEngine()
    engine.check_gate.clear()

    async def never() -> None:
        await engine.check_gate.wait()

    watch = SideChannelWatch(
        "decode-1", never, timing=SideChannelTiming(failure_threshold=1, timeout_s=0.001)
    )
    await watch.probe()
    assert watch.failure


async def test_it_is_asked_again_and_again_until_it_is_closed() -> None:
    engine = ScriptedEngine()
    watch = SideChannelWatch(
        "decode-1",
        lambda: engine.check_side_channel("decode-1", "here", 1.0),
        timing=SideChannelTiming(period_s=0.001),
    )
    watch.start()
    await engine.watch.wait_until(lambda: len(engine.checks) >= 3)
    await watch.close()
    assert set(engine.checks) == {("decode-1", "here")}


async def test_a_replica_without_a_side_channel_sends_no_probe() -> None:
    watch = start_side_channel_watch(ScriptedEngine(), make_facts())
    assert watch._task._task is None
    await watch.close()


class Body:
    """What Serve asks of a replica whether it is well."""

    check_health = EngineReplica.check_health
    _require_host = EngineReplica._require_host

    def __init__(self, host: ReplicaHost, watch: SideChannelWatch) -> None:
        self._host, self._side_channel = host, watch
        self._facts, self._pool = make_facts(), "decode"
        self._config = simulated()


@asynccontextmanager
async def running_one(engine: ScriptedEngine) -> AsyncIterator[ReplicaHost]:
    """The host of an engine that runs a leg with one more token."""
    async with running_host(engine) as (host, _):
        log = EventLog()
        client = LinkClient("ingress-1", log, options=FAST_LINK)
        client.connect("decode-1", host.address)
        await log.wait_joined()
        assert client.submit("decode-1", make_leg("leg-1", max_tokens=1)) is None
        await engine.watch.wait_until(lambda: "leg-1" in engine.running)
        yield host
        await client.close()


async def dead(engine: ScriptedEngine) -> SideChannelWatch:
    """What watches a side channel that has not answered for long enough."""
    watch = start_side_channel_watch(engine, engine.facts)
    engine.unreachable["decode-1"] = "its thread hangs"
    for _ in range(FAILURES):
        await watch.probe()
    return watch


async def test_serve_is_told_of_a_side_channel_that_is_dead_while_the_engine_lives() -> None:
    engine = ScriptedEngine(replace(make_facts(), side_channel="127.0.0.1:1"))
    async with running_host(engine) as (host, _):
        well = Body(host, start_side_channel_watch(engine, engine.facts))
        await well.check_health()  # type: ignore[misc]
        await well._side_channel.close()
        body = Body(host, await dead(engine))
        with pytest.raises(ComponentUnhealthy, match=r"decode-1 is broken .* its thread hangs"):
            await body.check_health()  # type: ignore[misc]
        await body._side_channel.close()


async def test_legs_on_a_dead_side_channel_end_before_serve_stops_the_replica() -> None:
    engine = ScriptedEngine(replace(make_facts(), side_channel="127.0.0.1:1"))
    async with running_one(engine) as host:
        body = Body(host, await dead(engine))
        await body.check_health()  # type: ignore[misc]
        assert not host.drained.is_set()
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        with pytest.raises(ComponentUnhealthy):
            await body.check_health()  # type: ignore[misc]
        await body._side_channel.close()


async def test_a_replica_that_drains_for_it_stays_broken_though_it_answers_again() -> None:
    engine = ScriptedEngine(replace(make_facts(), side_channel="127.0.0.1:1"))
    async with running_one(engine) as host:
        body = Body(host, await dead(engine))
        await body.check_health()  # type: ignore[misc]
        engine.unreachable.clear()
        await body._side_channel.probe()
        assert body._side_channel.failure == ""
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        with pytest.raises(ComponentUnhealthy, match="its thread hangs"):
            await body.check_health()  # type: ignore[misc]
        await body._side_channel.close()


async def test_serve_is_told_of_an_agent_that_pulls_from_no_source_once_it_is_idle() -> None:
    engine = ScriptedEngine()
    async with running_one(engine) as host:
        body = Body(host, start_side_channel_watch(engine, engine.facts))
        await body.check_health()  # type: ignore[misc]
        host.report_broken_agent("it pulls from nobody")
        await body.check_health()  # type: ignore[misc]
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        with pytest.raises(ComponentUnhealthy, match="it pulls from nobody"):
            await body.check_health()  # type: ignore[misc]


async def test_serve_is_told_of_an_engine_that_died() -> None:
    engine = ScriptedEngine()
    async with running_host(engine) as (host, _):
        body = Body(host, start_side_channel_watch(engine, engine.facts))
        engine.crash()
        failure = await host.failed
        with pytest.raises(type(failure)):
            await body.check_health()  # type: ignore[misc]


@dataclass
class Frontend:
    """As much of a frontend as its ingress asks for."""

    has_failed: bool = False
    broken: bool = False


class IngressHealth:
    """What Serve asks of an ingress whether it is well."""

    check = ModelIngress.check

    def __init__(self, frontend: Frontend | None) -> None:
        self._frontend = frontend
        self.rust_ingress: Frontend | None = None


def test_serve_is_told_of_an_ingress_that_will_never_serve_again() -> None:
    IngressHealth(None).check()  # type: ignore[misc]  # it is starting
    IngressHealth(Frontend()).check()  # type: ignore[misc]
    with pytest.raises(ComponentUnhealthy, match="ingress is broken"):
        IngressHealth(Frontend(has_failed=True)).check()  # type: ignore[misc]
    gated = IngressHealth(Frontend())
    gated.rust_ingress = Frontend(broken=True)
    with pytest.raises(ComponentUnhealthy, match="the gate before its frontend has died"):
        gated.check()  # type: ignore[misc]
