"""Who is not of the deployment: kept out of its links, counted, and told of once."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
import zmq
import zmq.asyncio

from baton.domain.events import ReplicaLost
from baton.runtime.link import codec, frames
from baton.runtime.link.keys import FleetKeys
from baton.runtime.process.log_events import FIELDS
from baton.runtime.replica_host import ReplicaHost
from tests.fakes.link_rig import (
    FAST_LINK,
    RawPeer,
    SessionIds,
    joined_client,
    raw_replica,
    running_client,
    running_host,
)
from tests.fakes.scripted_engine import make_leg

KEYS = FleetKeys.generate()
OTHERS = FleetKeys.generate()
GUARDED = replace(FAST_LINK, keys=KEYS, handshake_s=0.3)
HELLO = codec.encode(frames.Open(frames.PROTOCOL_VERSION, "stranger", "s"))
CANARY = b"the-merger-closes-on-friday"


async def until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for what no event tells of: counters."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - counters tell nobody
            await asyncio.sleep(0.005)


@contextmanager
def unauthenticated_peer(
    address: str, guard: Callable[[zmq.Socket[bytes]], None]
) -> Iterator[RawPeer]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"stranger")
        guard(socket)
        socket.connect(address)
        yield RawPeer(socket)


def knock(peer: RawPeer, *messages: Sequence[bytes]) -> None:
    """Say all this at once, as far as there is anybody to say it to."""
    with suppress(zmq.Again):  # hung up on between two messages
        for message in messages:
            peer.socket.send_multipart(message, zmq.NOBLOCK)


def no_key(_socket: zmq.Socket[bytes]) -> None:
    """Speaks in clear."""


def keys_of_another_deployment(socket: zmq.Socket[bytes]) -> None:
    OTHERS.apply_curve(socket)


def a_key_of_its_own(socket: zmq.Socket[bytes]) -> None:
    """Knows by what replicas are known, as whoever has seen a configuration might."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(KEYS.replica_secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)


# ---------------------------------------------------------------------- those of the deployment


async def test_a_coordinator_with_the_keys_streams_as_usual() -> None:
    async with (
        running_host(link=GUARDED) as (host, engine),
        joined_client(host, link=GUARDED) as (client, log),
    ):
        assert client.submit("decode-1", make_leg("a")) is None
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.step_all()
        assert await log.wait_tokens("a", 1) == [4]
        assert host.link_counters.rejected_connections == 0


async def test_a_part_as_large_as_may_be_arrives_encrypted_too() -> None:
    link = replace(GUARDED, max_part_bytes=10_000)
    async with (
        running_host(link=link) as (host, engine),
        joined_client(host, link=link) as (client, log),
    ):
        assert client.submit("decode-1", make_leg("a", payload=bytes(10_000))) is None
        await engine.watch.wait_until(lambda: "a" in engine.running)
        assert not log.of_type(ReplicaLost)


# ---------------------------------------------------------------------- those who are not


@pytest.mark.parametrize("guard", [no_key, keys_of_another_deployment, a_key_of_its_own])
async def test_an_unauthenticated_peer_gets_no_session_and_no_answer(
    guard: Callable[[zmq.Socket[bytes]], None],
) -> None:
    async with (
        running_host(link=GUARDED) as (host, engine),
        joined_client(host, link=GUARDED) as (client, log),
    ):
        with unauthenticated_peer(host.address, guard) as peer:
            knock(peer, HELLO, codec.encode(frames.Submit(make_leg("theirs"))))
            await until(lambda: host.link_counters.rejected_connections >= 1)
            assert not await asyncio.to_thread(peer.socket.poll, 50)
        assert host.link_counters.sessions == 1
        assert host.link_counters.bad_frames == 0
        client.submit("decode-1", make_leg("ours"))
        await engine.watch.wait_until(lambda: "ours" in engine.running)
        assert [leg.leg_id for leg in engine.submitted] == ["ours"]
        assert not log.of_type(ReplicaLost)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        # ZMTP's greeting for CURVE, then a command of 2**40 bytes.
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(55, b"\x00") + b"\x06" + bytes([0, 0, 1])
        + bytes(5),
    ],
    ids=["garbage", "HTTP", "a command of a terabyte"],
)  # fmt: skip
async def test_a_peer_with_another_protocol_is_disconnected(said: bytes) -> None:
    async with (
        running_host(link=GUARDED) as (host, _),
        joined_client(host, link=GUARDED) as (_, log),
    ):
        reader, writer = await _connected(host)
        writer.write(said)
        async with asyncio.timeout(5):
            await _hung_up(reader)
        writer.close()
        await until(lambda: host.link_counters.rejected_connections == 1)
        assert not log.of_type(ReplicaLost)


@pytest.mark.parametrize("drip", [b"", b"\xff"], ids=["silent", "a byte at a time"])
async def test_a_peer_with_a_slow_handshake_is_disconnected(drip: bytes) -> None:
    async with running_host(link=GUARDED) as (host, _):
        reader, writer = await _connected(host)
        began_s = asyncio.get_running_loop().time()

        async def dripping() -> None:
            for byte in drip + bytes(500):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        task = asyncio.create_task(dripping()) if drip else None
        async with asyncio.timeout(5):
            await _hung_up(reader)
        assert asyncio.get_running_loop().time() - began_s < 3.0
        if task is not None:
            task.cancel()
        writer.close()
        await until(lambda: host.link_counters.rejected_connections == 1)


async def test_an_impostor_of_a_replica_gets_no_message_and_is_named() -> None:
    link = replace(GUARDED, reconnect_s=0.01, reconnect_max_s=0.02)
    with raw_replica() as (peer, address):
        sessions = SessionIds()
        async with running_client(link=link, new_session=sessions) as (client, log):
            client.connect("decode-1", address)
            await sessions.wait_opened(4)
            await until(lambda: "link keys" in client.rejection_reasons.get("decode-1", ""))
            assert not await asyncio.to_thread(peer.socket.poll, 50)
            assert log.events == []


async def test_a_replica_that_hangs_is_not_said_to_have_other_keys() -> None:
    link = replace(GUARDED, reconnect_s=0.01, reconnect_max_s=0.02)
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # connections wait in its backlog
        address = f"tcp://127.0.0.1:{hangs.getsockname()[1]}"
        async with running_client(link=link) as (client, log):
            client.connect("decode-1", address)
            await until(lambda: "its process hangs" in client.rejection_reasons.get("decode-1", ""))
            assert log.events == []


async def test_a_socket_with_keys_and_no_authenticator_accepts_no_peer() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as replica:
        KEYS.apply_curve(replica)
        port = replica.bind_to_random_port("tcp://127.0.0.1")
        with unauthenticated_peer(f"tcp://127.0.0.1:{port}", KEYS.apply_curve) as peer:
            knock(peer, HELLO)
            assert not await replica.poll(300)


# ---------------------------------------------------------------------- listening in


@dataclass(slots=True)
class Wire:
    """What went over a connection."""

    said: bytearray = field(default_factory=bytearray)
    """By whoever connected."""
    heard: bytearray = field(default_factory=bytearray)


@asynccontextmanager
async def recorded(host: ReplicaHost) -> AsyncIterator[tuple[str, Wire]]:
    """A wire to a replica with somebody on it; yields its address and what was seen."""
    wire = Wire()
    pumps: set[asyncio.Task[None]] = set()

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
    ) -> None:
        while data := await reader.read(65_536):
            seen += data
            writer.write(data)
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await _connected(host)
        pumps.add(asyncio.create_task(pump(reader, back, wire.said)))
        pumps.add(asyncio.create_task(pump(there, writer, wire.heard)))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", wire
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def test_an_eavesdropper_reads_no_prompt_and_cannot_replay_it() -> None:
    async with running_host(link=GUARDED) as (host, engine), recorded(host) as (address, wire):
        async with running_client(link=GUARDED) as (client, log):
            client.connect("decode-1", address)
            await log.wait_joined()
            leg = make_leg("a", prompt=tuple(range(770, 800)), payload=CANARY)
            client.submit("decode-1", leg)
            await engine.watch.wait_until(lambda: "a" in engine.running)
            engine.step_all()
            await log.wait_tokens("a", 1)
        seen = bytes(wire.said + wire.heard)
        assert len(seen) > 1000
        for secret in (CANARY, b"decode-1", struct.pack("<3i", 780, 781, 782)):
            assert secret not in seen
        await engine.watch.wait_until(lambda: engine.aborted == ["a"])
        strangers = host.link_counters.rejected_connections
        reader, writer = await _connected(host)
        writer.write(wire.said)
        async with asyncio.timeout(5):
            await _hung_up(reader)
        writer.close()
        await until(lambda: host.link_counters.rejected_connections == strangers + 1)
        assert host.link_counters.sessions == 1
        assert [leg.leg_id for leg in engine.submitted] == ["a"]


# ---------------------------------------------------------------------- what is said of it


async def test_a_hundred_unauthenticated_peers_are_counted_and_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="baton")
    async with running_host(link=GUARDED) as (host, _):
        for _ in range(100):
            _, writer = await _connected(host)
            writer.write(b"\x00" * 100)
            writer.close()
        await until(lambda: host.link_counters.rejected_connections == 100)
    told = [record for record in caplog.records if record.message == "stranger_refused"]
    assert len(told) == 1
    assert 1 <= getattr(told[0], FIELDS)["strangers"] <= 100


def test_no_text_of_a_key_or_of_options_shows_it() -> None:
    shown = f"{KEYS!r} {KEYS} {GUARDED!r} {GUARDED}"
    for secret in (KEYS.replica_secret, KEYS.coordinator_secret):
        assert secret.decode() not in shown


def test_keys_are_read_as_they_were_written_and_are_new_each_time() -> None:
    assert FleetKeys.from_bytes(KEYS.to_bytes()) == KEYS
    assert len({FleetKeys.generate().to_bytes() for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "kept", [b"", b"\xff", b"{}", b'["a", "b"]', b"[1, 2]", json.dumps([CANARY.decode()]).encode()]
)
def test_invalid_keys_are_refused_without_being_shown(kept: bytes) -> None:
    with pytest.raises(ValueError, match="link key") as caught:
        FleetKeys.from_bytes(kept)
    assert CANARY.decode() not in str(caught.value)
    assert caught.value.__cause__ is None


async def _connected(host: ReplicaHost) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name, port = host.address.removeprefix("tcp://").split(":")
    return await asyncio.open_connection(name, int(port), family=socket.AF_INET)


async def _hung_up(reader: asyncio.StreamReader) -> None:
    """Read until the other side ends the connection."""
    try:
        while await reader.read(65_536):
            pass
    except ConnectionError:
        return
