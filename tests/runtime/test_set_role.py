"""A replica that is told what it is meant for: who hears of it, and what it does not touch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import RoleUnsupported
from baton.domain.events import Event, LoadReported, ReplicaLost, RoleChanged
from baton.domain.fleet import Role
from baton.domain.handoff import LegOutput
from baton.runtime.link import codec, frames
from baton.runtime.link.frames import CloseReason
from baton.runtime.replica_host import HostOptions, ReplicaHost
from baton.runtime.roles import check_role, parse_role
from tests.fakes.link_rig import (
    ANY_PORT,
    EventLog,
    joined_client,
    raw_replica,
    running_client,
    running_host,
)
from tests.fakes.scripted_engine import ScriptedEngine, make_facts, make_leg

HANDS_OVER = replace(make_facts(), side_channel="127.0.0.1:1")


def flippable() -> ScriptedEngine:
    return ScriptedEngine(HANDS_OVER)


def roles(log: EventLog) -> list[Role]:
    return [event.role for event in log.of_type(RoleChanged)]


async def test_every_coordinator_gets_a_new_role() -> None:
    async with (
        running_host(flippable()) as (host, _),
        joined_client(host, "c1") as (_, one),
        joined_client(host, "c2") as (_, two),
    ):
        assert host.set_role(Role.PREFILL)
        for log in (one, two):
            events_of = await log.wait(RoleChanged)
            assert events_of == RoleChanged(replica_id="decode-1", role=Role.PREFILL)
        assert host.facts == replace(HANDS_OVER, role=Role.PREFILL)
        assert host.counters.role_changes == 1


async def test_a_coordinator_that_comes_later_is_told_the_present_role() -> None:
    async with running_host(flippable()) as (host, _):
        assert host.set_role(Role.PREFILL)
        async with joined_client(host) as (client, log):
            assert (await log.wait_joined()).facts.role is Role.PREFILL
            assert host.set_role(Role.DECODE)
            assert (await log.wait(RoleChanged)).role is Role.DECODE
            client.disconnect("decode-1")
            client.connect("decode-1", host.address)
            assert (await log.wait_joined(2)).facts.role is Role.DECODE
            assert host.set_role(Role.MIXED)
            assert (await log.wait(RoleChanged, 2)).role is Role.MIXED


async def test_the_same_role_again_changes_nothing_and_is_not_said() -> None:
    async with running_host(flippable()) as (host, _), joined_client(host) as (_, log):
        assert not host.set_role(Role.DECODE)
        assert host.set_role(Role.MIXED)
        assert not host.set_role(Role.MIXED)
        assert host.set_role(Role.DECODE)
        await log.wait(RoleChanged, 2)
        assert roles(log) == [Role.MIXED, Role.DECODE]
        assert host.counters.role_changes == 2


async def test_running_legs_continue_when_a_replicas_role_changes() -> None:
    async with running_host(flippable()) as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a", max_tokens=4))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.step_all()
        assert host.set_role(Role.PREFILL)
        for _ in range(3):
            engine.step_all()
        assert await log.wait_tokens("a", 4) == [4, 5, 6, 7]
        assert not log.of_type(ReplicaLost)
        assert not engine.aborted


async def test_legs_sent_before_a_coordinator_knows_of_a_flip_are_accepted() -> None:
    async with running_host(flippable()) as (host, engine), joined_client(host) as (client, log):
        assert host.set_role(Role.PREFILL)
        assert client.submit("decode-1", make_leg("late")) is None
        await engine.watch.wait_until(lambda: "late" in engine.running)
        engine.emit(LegOutput("late", (9,)))
        assert await log.wait_tokens("late", 1) == [9]


async def test_an_engine_without_a_side_channel_cannot_become_a_prefill_replica() -> None:
    async with running_host() as (host, _), joined_client(host) as (_, log):
        with pytest.raises(RoleUnsupported, match="no side channel") as refused:
            host.set_role(Role.PREFILL)
        assert "decode-1" in str(refused.value)
        assert refused.value.remedy
        assert host.set_role(Role.MIXED)
        await log.wait(RoleChanged)
        assert roles(log) == [Role.MIXED]


async def test_a_replica_that_has_not_started_has_no_role_to_change() -> None:
    host = ReplicaHost(flippable(), bind=ANY_PORT)
    with pytest.raises(RoleUnsupported, match="yet"):
        host.set_role(Role.DECODE)


async def test_a_replica_that_drains_goes_on_draining_in_its_new_role() -> None:
    async with running_host(flippable()) as (host, _), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await log.wait(LoadReported)
        host.drain()
        assert host.set_role(Role.PREFILL)
        await log.wait(RoleChanged)
        client.abort("decode-1", ["a"])
        await log.wait_aborted("a")
        assert host.drained.is_set()


def test_a_name_that_is_no_role_is_refused_with_those_that_are() -> None:
    assert parse_role("r", "mixed") is Role.MIXED
    with pytest.raises(RoleUnsupported, match=r"'chef'.*prefill, decode, mixed"):
        parse_role("r", "chef")


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_any_engine_can_decode(role: Role) -> None:
    check_role(make_facts(), role)


async def test_a_replica_says_how_many_gpus_it_takes() -> None:
    async with (
        running_host(options=HostOptions(devices=4.0)) as (host, _),
        joined_client(host) as (_, log),
    ):
        assert (await log.wait_joined()).facts.devices == 4.0


# ------------------------------------------------------------------ late frames


async def events_of(epochs: list[tuple[int, Role]]) -> list[Event]:
    """What a coordinator makes of changes that arrive in this order."""
    with raw_replica() as (peer, address):
        async with running_client() as (client, log):
            client.connect("decode-1", address)
            sender, *hello = await peer.receive()
            said = codec.decode_from_coordinator(hello)
            assert isinstance(said, frames.Open)
            welcome = frames.Accept(frames.PROTOCOL_VERSION, said.session_id, HANDS_OVER)
            said_then: list[frames.FromReplica] = [welcome]
            said_then += [frames.RoleChanged(role, epoch) for epoch, role in epochs]
            for frame in (*said_then, frames.Close(CloseReason.CLOSED)):
                await peer.send(sender, *codec.encode(frame))
            await log.wait_lost()
            return list(log.of_type(RoleChanged))


async def test_a_late_frame_does_not_undo_a_newer_change() -> None:
    said = await events_of([(2, Role.PREFILL), (1, Role.MIXED), (2, Role.DECODE), (3, Role.MIXED)])
    assert said == [
        RoleChanged(replica_id="decode-1", role=Role.PREFILL),
        RoleChanged(replica_id="decode-1", role=Role.MIXED),
    ]
