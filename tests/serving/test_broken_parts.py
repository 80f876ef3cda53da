"""Parts that live and cannot do their work say so, and Serve replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.domain.errors import Broken, RdmaMissing, TransferFailed
from baton.runtime.link.client import LinkClient
from baton.runtime.replica_host import ReplicaHost
from baton.serving.ingress.model_ingress import IngressBody
from baton.serving.replica.deployment import EngineReplica, own_side_channel
from baton.serving.replica.side_channel_watch import OwnCheckTiming, OwnSideChannel
from tests.fakes.link_rig import FAST, EventLog, hosting
from tests.fakes.scripted_engine import ScriptedEngine, make_facts, make_leg
from tests.serving.configs import simulated

FAILURES = OwnCheckTiming().failures


class Answers:
    """A side channel that does what it is told."""

    def __init__(self) -> None:
        self.fails: Exception | None = None

    async def __call__(self) -> None:
        if self.fails is not None:
            raise self.fails


async def test_one_that_is_silent_for_a_moment_is_not_given_up() -> None:
    answers = Answers()
    watch = OwnSideChannel("decode-1", answers)
    answers.fails = TransferFailed("decode-1", "nobody listens")
    for _ in range(FAILURES - 1):
        await watch.look()
    assert watch.trouble == ""
    answers.fails = None
    await watch.look()
    answers.fails = OSError("no route")
    for _ in range(FAILURES - 1):
        await watch.look()
    assert watch.trouble == ""


async def test_one_that_stays_silent_is_given_up_and_said_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = Answers()
    answers.fails = TransferFailed("decode-1", "nobody listens")
    watch = OwnSideChannel("decode-1", answers)
    for _ in range(FAILURES + 3):
        await watch.look()
    assert "nobody listens" in watch.trouble
    assert [record.message for record in caplog.records] == ["side_channel_dead"]


async def test_one_whose_blocks_would_take_a_wrong_way_is_alive() -> None:
    answers = Answers()
    answers.fails = RdmaMissing("decode-1", "they come by tcp")
    watch = OwnSideChannel("decode-1", answers)
    for _ in range(FAILURES):
        await watch.look()
    assert watch.trouble == ""


async def test_a_check_that_never_ends_has_failed() -> None:
    engine = ScriptedEngine()
    engine.check_gate.clear()

    async def never() -> None:
        await engine.check_gate.wait()

    watch = OwnSideChannel("decode-1", never, timing=OwnCheckTiming(failures=1, deadline_s=0.001))
    await watch.look()
    assert watch.trouble


async def test_it_is_asked_again_and_again_until_it_is_closed() -> None:
    engine = ScriptedEngine()
    watch = OwnSideChannel(
        "decode-1",
        lambda: engine.check_side_channel("decode-1", "here", 1.0),
        timing=OwnCheckTiming(every_s=0.001),
    )
    watch.start()
    await engine.watch.until(lambda: len(engine.checks) >= 3)
    await watch.close()
    assert set(engine.checks) == {("decode-1", "here")}


async def test_a_replica_without_a_side_channel_asks_nobody() -> None:
    watch = own_side_channel(ScriptedEngine(), make_facts())
    assert watch._task is None
    await watch.close()


class Body:
    """What Serve asks of a replica whether it is well."""

    check_health = EngineReplica.check_health
    _started = EngineReplica._started

    def __init__(self, host: ReplicaHost, watch: OwnSideChannel) -> None:
        self._host, self._side_channel = host, watch
        self._facts, self._pool = make_facts(), "decode"
        self._config = simulated()


@asynccontextmanager
async def running_one(engine: ScriptedEngine) -> AsyncIterator[ReplicaHost]:
    """The host of an engine that runs a leg with one more token."""
    async with hosting(engine) as (host, _):
        log = EventLog()
        client = LinkClient("ingress-1", log, options=FAST)
        client.connect("decode-1", host.address)
        await log.wait_joined()
        assert client.submit("decode-1", make_leg("leg-1", max_tokens=1)) is None
        await engine.watch.until(lambda: "leg-1" in engine.running)
        yield host
        await client.close()


async def dead(engine: ScriptedEngine) -> OwnSideChannel:
    """What watches a side channel that has not answered for long enough."""
    watch = own_side_channel(engine, engine.facts)
    engine.unreachable["decode-1"] = "its thread hangs"
    for _ in range(FAILURES):
        await watch.look()
    return watch


async def test_serve_hears_of_a_side_channel_that_is_dead_though_the_engine_lives() -> None:
    engine = ScriptedEngine(replace(make_facts(), side_channel="127.0.0.1:1"))
    async with hosting(engine) as (host, _):
        well = Body(host, own_side_channel(engine, engine.facts))
        await well.check_health()  # type: ignore[misc]
        await well._side_channel.close()
        body = Body(host, await dead(engine))
        with pytest.raises(Broken, match=r"decode-1 is broken .* its thread hangs"):
            await body.check_health()  # type: ignore[misc]
        await body._side_channel.close()


async def test_what_runs_where_it_is_dead_ends_before_serve_ends_the_replica() -> None:
    engine = ScriptedEngine(replace(make_facts(), side_channel="127.0.0.1:1"))
    async with running_one(engine) as host:
        body = Body(host, await dead(engine))
        await body.check_health()  # type: ignore[misc]
        assert not host.drained.is_set()
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        with pytest.raises(Broken):
            await body.check_health()  # type: ignore[misc]
        await body._side_channel.close()


async def test_a_replica_that_drains_for_it_stays_broken_though_it_answers_again() -> None:
    engine = ScriptedEngine(replace(make_facts(), side_channel="127.0.0.1:1"))
    async with running_one(engine) as host:
        body = Body(host, await dead(engine))
        await body.check_health()  # type: ignore[misc]
        engine.unreachable.clear()
        await body._side_channel.look()
        assert body._side_channel.trouble == ""
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        with pytest.raises(Broken, match="its thread hangs"):
            await body.check_health()  # type: ignore[misc]
        await body._side_channel.close()


async def test_serve_hears_of_an_agent_that_pulls_from_nobody_once_nothing_runs() -> None:
    engine = ScriptedEngine()
    async with running_one(engine) as host:
        body = Body(host, own_side_channel(engine, engine.facts))
        await body.check_health()  # type: ignore[misc]
        host.agent_broken("it pulls from nobody")
        await body.check_health()  # type: ignore[misc]
        engine.step_all()
        async with asyncio.timeout(5):
            await host.drained.wait()
        with pytest.raises(Broken, match="it pulls from nobody"):
            await body.check_health()  # type: ignore[misc]


async def test_serve_hears_of_an_engine_that_died() -> None:
    engine = ScriptedEngine()
    async with hosting(engine) as (host, _):
        body = Body(host, own_side_channel(engine, engine.facts))
        engine.die()
        failure = await host.failed
        with pytest.raises(type(failure)):
            await body.check_health()  # type: ignore[misc]


@dataclass
class Frontend:
    """As much of a frontend as its ingress asks for."""

    broken: bool = False


class Door:
    """What Serve asks of an ingress whether it is well."""

    check = IngressBody.check

    def __init__(self, frontend: Frontend | None) -> None:
        self._frontend = frontend
        self.rust: Frontend | None = None


def test_serve_hears_of_an_ingress_that_will_never_serve_again() -> None:
    Door(None).check()  # type: ignore[misc]  # it is starting
    Door(Frontend()).check()  # type: ignore[misc]
    with pytest.raises(Broken, match="ingress is broken"):
        Door(Frontend(broken=True)).check()  # type: ignore[misc]
    gated = Door(Frontend())
    gated.rust = Frontend(broken=True)
    with pytest.raises(Broken, match="the gate before its frontend has died"):
        gated.check()  # type: ignore[misc]
