from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.domain.events import LegFailed, LoadReported, ReplicaLost
from baton.domain.fleet import LossReason
from baton.domain.handoff import LegFailure, LegOutput
from baton.runtime.link import codec, frames
from baton.runtime.link.frames import CloseReason
from baton.runtime.link.options import LinkOptions
from tests.fakes.link_rig import (
    ANY_PORT,
    FAST_LINK,
    joined_client,
    raw_coordinator,
    running_client,
    running_host,
    running_subprocess,
)
from tests.fakes.scripted_engine import make_leg

PATIENT = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=30.0)


# ---------------------------------------------------------------------- a replica's process


async def test_a_killed_replica_is_lost_within_a_second_and_then_unreachable() -> None:
    async with (
        running_subprocess("host_process.py", "r1", ANY_PORT) as (process, address),
        running_client(link=PATIENT) as (client, log),
    ):
        client.connect("r1", address)
        await log.wait_joined()
        assert client.submit("r1", make_leg("a", max_tokens=100_000)) is None
        await log.wait_tokens("a", 5)
        process.kill()
        assert (await log.wait_lost(timeout_s=1.0)).reason is LossReason.DISCONNECTED
        assert client.submit("r1", make_leg("b")) is LegFailure.UNREACHABLE
        tokens = log.tokens("a")
        assert tokens == list(range(4, 4 + len(tokens)))


async def test_a_replica_that_comes_back_joins_again_and_was_lost_only_once() -> None:
    async with running_client() as (client, log):
        async with running_subprocess("host_process.py", "r1", ANY_PORT) as (process, address):
            client.connect("r1", address)
            await log.wait_joined()
            process.kill()
            await log.wait_lost()
        async with running_subprocess("host_process.py", "r1", address):
            await log.wait_joined(2, timeout_s=10)
            assert len(log.of_type(ReplicaLost)) == 1
            assert client.submit("r1", make_leg("a")) is None
            assert await log.wait_tokens("a", 8) == list(range(4, 12))


async def test_a_frozen_replica_is_lost_as_unresponsive_and_joins_again_when_it_thaws() -> None:
    async with (
        running_subprocess("host_process.py", "r1", ANY_PORT) as (process, address),
        running_client() as (client, log),
    ):
        client.connect("r1", address)
        await log.wait_joined()
        client.submit("r1", make_leg("old", max_tokens=1_000_000))
        await log.wait_tokens("old", 1)
        process.send_signal(signal.SIGSTOP)
        lost = await log.wait_lost(timeout_s=FAST_LINK.heartbeat_timeout_s + 2)
        assert lost.reason is LossReason.UNRESPONSIVE
        assert client.submit("r1", make_leg("b")) is LegFailure.UNREACHABLE
        seen = len(log.tokens("old"))
        process.send_signal(signal.SIGCONT)
        await log.wait_joined(2, timeout_s=10)
        assert client.submit("r1", make_leg("new")) is None
        await log.wait_tokens("new", 8)
        assert len(log.tokens("old")) == seen


# ---------------------------------------------------------------------- a coordinator's process


@asynccontextmanager
async def coordinator_process(
    address: str, leg_id: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ("decode-1", address, leg_id)
    async with running_subprocess("coordinator_process.py", *arguments) as (process, said):
        assert said == "None"
        yield process


async def test_the_legs_of_a_killed_coordinator_are_aborted_and_no_others() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, _):
        client.submit("decode-1", make_leg("mine"))
        async with coordinator_process(host.address, "theirs") as process:
            await engine.watch.wait_until(lambda: set(engine.running) == {"mine", "theirs"})
            process.kill()
            await engine.watch.wait_until(lambda: engine.aborted == ["theirs"])
        assert set(engine.running) == {"mine"}
        assert host.coordinators == 1


async def test_the_legs_of_a_frozen_coordinator_are_aborted() -> None:
    async with (
        running_host() as (host, engine),
        coordinator_process(host.address, "theirs") as process,
    ):
        await engine.watch.wait_until(lambda: "theirs" in engine.running)
        process.send_signal(signal.SIGSTOP)
        await engine.watch.wait_until(lambda: engine.aborted == ["theirs"])
        assert host.coordinators == 0


async def test_a_process_that_did_not_run_for_a_while_blames_no_peer() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        time.sleep(2 * FAST_LINK.heartbeat_timeout_s)  # noqa: ASYNC251 - the stall is what is tested
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 3)
        engine.step_all()
        assert await log.wait_tokens("a", 1) == [4]
        assert not log.of_type(ReplicaLost)
        assert engine.aborted == []


# ---------------------------------------------------------------------- raw peers


async def test_a_new_session_of_a_coordinator_aborts_the_legs_of_its_old_one() -> None:
    async with running_host() as (host, engine):
        with (
            raw_coordinator(host.address, b"c/1") as old,
            raw_coordinator(host.address, b"c/2") as new,
        ):
            assert isinstance(await old.open_session("c", "1"), frames.Accept)
            await old.send(*codec.encode(frames.Submit(make_leg("a"))))
            await engine.watch.wait_until(lambda: "a" in engine.running)
            assert isinstance(await new.open_session("c", "2"), frames.Accept)
            await engine.watch.wait_until(lambda: engine.aborted == ["a"])
            goodbye = await old.next_frame(frames.ReplicaBeat)
            assert isinstance(goodbye, frames.Close)
            assert goodbye.reason is CloseReason.REPLACED


async def test_a_repeated_hello_changes_nothing() -> None:
    async with running_host() as (host, engine):
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            await peer.send(*codec.encode(frames.Submit(make_leg("a"))))
            await engine.watch.wait_until(lambda: "a" in engine.running)
            await peer.send(*codec.encode(frames.Open(frames.PROTOCOL_VERSION, "raw", "s")))
            assert isinstance(await peer.next_frame(frames.ReplicaBeat), frames.Accept)
            engine.emit(LegOutput("a", (1,)))
            step = await peer.next_frame(frames.ReplicaBeat)
            assert step == frames.Step(1, (LegOutput("a", (1,)),))
            assert host.link_counters.sessions == 1


async def test_a_leg_from_a_peer_without_a_session_never_runs_and_the_peer_is_told() -> None:
    async with running_host() as (host, engine):
        with raw_coordinator(host.address) as peer:
            await peer.send(*codec.encode(frames.Submit(make_leg("late"))))
            assert await peer.next_frame() == frames.Close(CloseReason.NO_SESSION)
        assert engine.submitted == []


async def test_a_coordinator_of_another_version_is_told_both_versions() -> None:
    async with running_host() as (host, _):
        with raw_coordinator(host.address) as peer:
            await peer.send(b"H", msgspec.msgpack.encode([99, "c", "s"]))
            goodbye = await peer.next_frame()
            assert isinstance(goodbye, frames.Close)
            assert goodbye.reason is CloseReason.PROTOCOL_MISMATCH
            assert "protocol 99" in goodbye.detail
            assert f"expected {frames.PROTOCOL_VERSION};" in goodbye.detail


async def test_a_bad_frame_ends_its_session_and_hurts_no_other() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("good"))
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            await peer.send(*codec.encode(frames.Submit(make_leg("bad"))))
            await engine.watch.wait_until(lambda: set(engine.running) == {"good", "bad"})
            await peer.send(b"S", b"\xc1", b"", b"")
            goodbye = await peer.next_frame(frames.ReplicaBeat)
            assert isinstance(goodbye, frames.Close)
            assert goodbye.reason is CloseReason.BAD_FRAME
            await engine.watch.wait_until(lambda: engine.aborted == ["bad"])
        engine.step_all()
        assert await log.wait_tokens("good", 1) == [4]
        assert host.link_counters.bad_frames == 1


async def test_more_coordinators_than_the_bound_are_told_so() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, max_coordinators=1)
    async with running_host(link=link) as (host, _), joined_client(host):
        with raw_coordinator(host.address) as peer:
            goodbye = await peer.open_session()
            assert isinstance(goodbye, frames.Close)
            assert goodbye.reason is CloseReason.TOO_MANY_COORDINATORS


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=5), max_size=8))
def test_a_session_survives_every_message_of_another_peer(messages: list[list[bytes]]) -> None:
    async def scenario() -> None:
        async with running_host() as (host, engine), joined_client(host) as (client, log):
            client.submit("decode-1", make_leg("a"))
            await engine.watch.wait_until(lambda: "a" in engine.running)
            with raw_coordinator(host.address) as peer:
                await peer.open_session()
                for parts in messages:
                    await peer.send(*parts)
                await peer.send(*codec.encode(frames.Open(frames.PROTOCOL_VERSION, "raw", "s")))
                while not isinstance(await peer.next_frame(), frames.Accept):
                    pass
            engine.step_all()
            assert await log.wait_tokens("a", 1) == [4]
            assert not log.of_type(ReplicaLost)

    asyncio.run(scenario())


async def test_garbage_bytes_on_the_port_disturb_no_session() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        name, port = host.address.removeprefix("tcp://").split(":")
        for garbage in (b"", b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(65_536)):
            with socket.create_connection((name, int(port)), timeout=5) as connection:
                await asyncio.to_thread(_send_all, connection, garbage)
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.step_all()
        assert await log.wait_tokens("a", 1) == [4]
        assert not log.of_type(ReplicaLost)


def _send_all(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except ConnectionError:
        return  # the replica hung up on it, as it should


async def test_an_oversized_part_costs_only_its_sender_the_connection() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, max_part_bytes=10_000)
    async with (
        running_host(link=link) as (host, engine),
        joined_client(host, link=link) as (client, log),
    ):
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            await peer.send(*codec.encode(frames.Submit(make_leg("bad"))))
            await engine.watch.wait_until(lambda: "bad" in engine.running)
            large = make_leg("large", payload=bytes(10_001))
            await peer.send(*codec.encode(frames.Submit(large)))
            await engine.watch.wait_until(lambda: engine.aborted == ["bad"])
        client.submit("decode-1", make_leg("good"))
        await engine.watch.wait_until(lambda: "good" in engine.running)
        assert [leg.leg_id for leg in engine.submitted] == ["bad", "good"]
        assert not log.of_type(ReplicaLost)


async def test_an_output_too_large_for_a_frame_fails_its_leg_only() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, max_part_bytes=10_000)
    async with (
        running_host(link=link) as (host, engine),
        joined_client(host, link=link) as (client, log),
    ):
        for leg_id in "abc":
            client.submit("decode-1", make_leg(leg_id))
        await engine.watch.wait_until(lambda: len(engine.running) == 3)
        large = LegOutput("b", (2,), engine_payload=bytes(20_000))
        fits = bytes(6_000)
        engine.emit(
            LegOutput("a", (1,), engine_payload=fits),
            large,
            LegOutput("c", (3,), engine_payload=fits),
        )
        failed = await log.wait(LegFailed)
        assert (failed.leg_id, failed.failure) == ("b", LegFailure.ENGINE_ERROR)
        await engine.watch.wait_until(lambda: engine.aborted == ["b"])
        assert await log.wait_tokens("a", 1) == [1]
        assert await log.wait_tokens("c", 1) == [3]
        assert not log.of_type(ReplicaLost)


async def test_a_coordinator_that_does_not_read_is_dropped_and_blocks_no_other() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=30.0, queue_frames=8)
    async with (
        running_host(link=link) as (host, engine),
        joined_client(host, "fast", link=link) as (client, log),
    ):
        with raw_coordinator(host.address) as slow:
            await slow.open_session("slow")
            await slow.send(*codec.encode(frames.Submit(make_leg("s"))))
            client.submit("decode-1", make_leg("f"))
            await engine.watch.wait_until(lambda: len(engine.running) == 2)
            sent = 0
            while "s" not in engine.aborted:
                sent += 1
                assert sent < 1000
                heavy = LegOutput("s", (sent,), engine_payload=bytes(1_000_000))
                engine.emit(heavy, LegOutput("f", (sent,)))
                await log.wait_tokens("f", sent)
            assert log.tokens("f") == list(range(1, sent + 1))
            assert not log.of_type(ReplicaLost)
            await log.wait(LoadReported, len(log.of_type(LoadReported)) + 2)


async def test_a_dropped_coordinator_learns_of_it_with_its_next_beat() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3)
    async with running_host(link=link) as (host, _):
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            goodbye = await peer.next_frame(frames.ReplicaBeat)
            assert isinstance(goodbye, frames.Close)
            assert goodbye.reason is CloseReason.UNRESPONSIVE
            assert goodbye.detail.startswith("an ingress stood still"), "it blames the replica"
            await peer.send(*codec.encode(frames.CoordinatorBeat()))
            assert await peer.next_frame() == frames.Close(CloseReason.NO_SESSION)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:99999", "tcp://not an address", "nonsense"])
async def test_an_address_that_is_none_is_refused_when_connecting(address: str) -> None:
    async with running_client() as (client, _):
        with pytest.raises(ValueError, match="address"):
            client.connect("r1", address)
        assert client.replica_ids == frozenset()
