from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from baton.domain.events import (
    Event,
    LegFailed,
    LoadReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
)
from baton.domain.fleet import Load, LossReason
from baton.domain.handoff import LegFailure, LegOutput
from baton.runtime.link import codec, frames
from baton.runtime.link.client import LinkClient
from baton.runtime.link.frames import CloseReason
from baton.runtime.link.options import LinkOptions
from tests.fakes.link_rig import (
    FAST_LINK,
    EventLog,
    RawPeer,
    SessionIds,
    accept_session,
    joined_client,
    raw_replica,
    running_client,
    running_host,
)
from tests.fakes.scripted_engine import ScriptedEngine, make_facts, make_kv_handle, make_leg


async def converse() -> None:
    """Two coordinators stream from one replica at once."""
    async with (
        running_host(ScriptedEngine(step_s=0.001)) as (host, _),
        joined_client(host, "c1") as (one, log1),
        joined_client(host, "c2") as (two, log2),
    ):
        for n in range(8):
            prompt = (1000 * n,)
            assert one.submit("decode-1", make_leg(f"a{n}", prompt=prompt, max_tokens=50)) is None
            assert two.submit("decode-1", make_leg(f"b{n}", prompt=prompt, max_tokens=50)) is None
        for n in range(8):
            wanted = [1000 * n + 1 + i for i in range(50)]
            assert await log1.wait_tokens(f"a{n}", 50) == wanted
            assert await log2.wait_tokens(f"b{n}", 50) == wanted
        assert not any(log1.tokens(f"b{n}") or log2.tokens(f"a{n}") for n in range(8))
        assert host.live_legs == 0


async def test_two_coordinators_stream_in_order_without_mixing() -> None:
    await converse()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_link_runs_on_either_event_loop(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    run(converse())


async def test_a_leg_arrives_whole() -> None:
    leg = make_leg("a", prompt=tuple(range(100_000)), payload=bytes(range(256)) * 1000)
    async with running_host() as (host, engine), joined_client(host) as (client, _):
        assert client.submit("decode-1", leg) is None
        await engine.watch.wait_until(lambda: bool(engine.submitted))
    assert engine.submitted == [leg]


async def test_the_facts_and_then_the_load_are_reported() -> None:
    engine = ScriptedEngine(make_facts("r7"))
    engine.current_load = Load(queued_requests=3, kv_used_fraction=0.5)
    async with running_host(engine) as (host, _), joined_client(host) as (client, log):
        assert (await log.wait_joined()).facts == engine.facts
        assert (await log.wait(LoadReported, 3)).load == engine.current_load
        assert client.joined_ids == {"r7"}


async def test_a_load_of_nan_is_held_back_but_the_replica_stays() -> None:
    engine = ScriptedEngine()
    engine.current_load = Load(step_s=float("nan"))
    async with running_host(engine) as (host, _), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: bool(engine.submitted))
        engine.step_all()
        await log.wait_tokens("a", 1)
        assert client.counters.bad_frames > 0
        assert not log.of_type(LoadReported)
        assert not log.of_type(ReplicaLost)


async def test_an_unknown_replica_is_unreachable() -> None:
    async with running_client() as (client, _):
        assert client.submit("nobody", make_leg("a")) is LegFailure.UNREACHABLE
        client.abort("nobody", ["a"])
        client.release("nobody", make_kv_handle())


async def test_a_replica_that_has_not_joined_is_unreachable() -> None:
    async with running_client() as (client, log):
        client.connect("r1", "tcp://127.0.0.1:1")
        assert client.submit("r1", make_leg("a")) is LegFailure.UNREACHABLE
    assert log.events == []


async def test_a_leg_that_cannot_be_sent_is_invalid_and_keeps_the_session() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, max_part_bytes=10_000)
    async with (
        running_host(link=link) as (host, engine),
        joined_client(host, link=link) as (client, log),
    ):
        submit = client.submit
        assert submit("decode-1", make_leg("x" * 10_000)) is LegFailure.INVALID
        assert submit("decode-1", make_leg("a", prompt=(2**40,))) is LegFailure.INVALID
        assert submit("decode-1", make_leg("b", payload=bytes(10_001))) is LegFailure.INVALID
        assert submit("decode-1", make_leg("c")) is None
        await engine.watch.wait_until(lambda: len(engine.submitted) == 1)
        assert not log.of_type(ReplicaLost)


async def test_disconnecting_loses_the_replica_once_and_frees_its_legs() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        client.disconnect("decode-1")
        client.disconnect("decode-1")
        assert [e.reason for e in log.of_type(ReplicaLost)] == [LossReason.LEFT]
        assert client.submit("decode-1", make_leg("b")) is LegFailure.UNREACHABLE
        await engine.watch.wait_until(lambda: "a" in engine.aborted)
        assert host.coordinators == 0


async def test_connecting_twice_to_the_same_address_changes_nothing() -> None:
    async with running_host() as (host, _), joined_client(host) as (client, log):
        client.connect("decode-1", host.address)
        await log.wait(LoadReported, 3)
        assert len(log.of_type(ReplicaJoined)) == 1
        assert not log.of_type(ReplicaLost)


async def test_a_replica_that_moved_is_followed() -> None:
    async with (
        running_host() as (old, _),
        running_host() as (new, engine),
        joined_client(old) as (client, log),
    ):
        client.connect("decode-1", new.address)
        await log.wait_joined(2)
        assert [e.reason for e in log.of_type(ReplicaLost)] == [LossReason.LEFT]
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)


async def test_another_replica_at_the_address_is_refused() -> None:
    sessions = SessionIds()
    async with (
        running_host(ScriptedEngine(make_facts("r2"))) as (host, _),
        running_client(new_session=sessions) as (client, log),
    ):
        client.connect("r1", host.address)
        await sessions.wait_opened(2)
        assert "r2 answers there, expected r1" in client.rejection_reasons["r1"]
        assert log.events == []


async def test_a_closing_replica_is_lost_and_joins_again_under_a_new_session() -> None:
    async with running_client() as (client, log):
        async with running_host() as (host, _):
            address = host.address
            client.connect("decode-1", address)
            await log.wait_joined()
        assert (await log.wait_lost()).reason is LossReason.LEFT
        assert client.submit("decode-1", make_leg("a")) is LegFailure.UNREACHABLE
        async with running_host(bind=address) as (_, engine):
            await log.wait_joined(2)
            assert client.submit("decode-1", make_leg("b")) is None
            await engine.watch.wait_until(lambda: "b" in engine.running)
        await log.wait_lost(2)
        assert client.counters.sessions >= 2


async def test_a_dead_engine_is_reported_as_such_once() -> None:
    sessions = SessionIds()
    async with (
        running_host() as (host, engine),
        running_client(new_session=sessions) as (client, log),
    ):
        client.connect("decode-1", host.address)
        await log.wait_joined()
        engine.crash()
        assert (await log.wait_lost()).reason is LossReason.ENGINE_DEAD
        assert "cuda error" in str(await host.failed)
        await sessions.wait_opened(3)
        assert "cuda error" in client.rejection_reasons["decode-1"]
        assert len(log.of_type(ReplicaLost)) == 1
        assert len(log.of_type(ReplicaJoined)) == 1


async def test_a_replica_of_another_version_is_refused_in_plain_words() -> None:
    sessions = SessionIds()
    with raw_replica() as (peer, address):
        async with running_client(new_session=sessions) as (client, log):
            client.connect("r1", address)
            identity, *_ = await peer.receive()
            reason = codec.mismatch_message(peer_version=1, own_version=2)
            await peer.send(
                identity, *codec.encode(frames.Close(CloseReason.PROTOCOL_MISMATCH, reason))
            )
            await sessions.wait_opened(2)
            assert client.rejection_reasons == {"r1": reason}
            assert log.events == []


async def test_a_gap_in_the_steps_loses_the_replica_as_out_of_step() -> None:
    with raw_replica() as (peer, address):
        async with running_client() as (client, log):
            client.connect("r1", address)
            identity = await accept_session(peer, await peer.receive())
            for seq in (1, 2, 4, 5):
                step = frames.Step(seq, (LegOutput("a", (seq,)),))
                await peer.send(identity, *codec.encode(step))
            assert (await log.wait_lost()).reason is LossReason.OUT_OF_SYNC
            assert log.tokens("a") == [1, 2]


async def test_garbage_from_a_replica_loses_it_and_is_counted() -> None:
    with raw_replica() as (peer, address):
        async with running_client() as (client, log):
            client.connect("r1", address)
            identity = await accept_session(peer, await peer.receive())
            await log.wait_joined()
            await peer.send(identity, b"T", b"\xc1garbage")
            assert (await log.wait_lost()).reason is LossReason.OUT_OF_SYNC
            assert client.counters.bad_frames == 1


async def test_frames_of_an_old_session_never_reach_the_new_one() -> None:
    with raw_replica() as (peer, address):
        async with running_client() as (client, log):
            client.connect("r1", address)
            old = await accept_session(peer, await peer.receive())
            await log.wait_joined()
            await peer.send(old, *codec.encode(frames.Close(CloseReason.NO_SESSION)))
            await log.wait_lost()
            new = await next_hello(peer, old)
            step = codec.encode(frames.Step(1, (LegOutput("a", (9,)),)))
            await peer.send(old, *step)
            await peer.send(new[0], *step)  # before the welcome: no session to belong to
            await accept_session(peer, new)
            await peer.send(new[0], *codec.encode(frames.Step(1, (LegOutput("b", (1,)),))))
            assert await log.wait_tokens("b", 1) == [1]
            assert log.tokens("a") == []
            assert client.counters.dropped_frames == 1


async def next_hello(peer: RawPeer, old: bytes) -> list[bytes]:
    while True:
        parts = await peer.receive()
        if parts[0] != old and parts[1] == b"H":
            return parts


async def test_an_unresponsive_replica_is_lost_after_the_heartbeat_timeout() -> None:
    with raw_replica() as (peer, address):
        async with running_client() as (client, log):
            client.connect("r1", address)
            await accept_session(peer, await peer.receive())
            await log.wait_joined()
            joined_at_s = asyncio.get_running_loop().time()
            assert (await log.wait_lost()).reason is LossReason.UNRESPONSIVE
            waited_s = asyncio.get_running_loop().time() - joined_at_s
            assert waited_s >= FAST_LINK.heartbeat_timeout_s - FAST_LINK.heartbeat_interval_s
            assert client.submit("r1", make_leg("a")) is LegFailure.UNREACHABLE


async def test_a_full_queue_answers_overloaded_and_aborts_are_sent_once_there_is_room() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=60.0, queue_frames=4)
    with raw_replica() as (peer, address):
        async with running_client(link=link) as (client, log):
            client.connect("r1", address)
            await accept_session(peer, await peer.receive())
            await log.wait_joined()
            sent: list[str] = []
            payload = bytes(1_000_000)

            def submit_another() -> LegFailure | None:
                return client.submit("r1", make_leg(f"a{len(sent)}", payload=payload))

            # The queue is emptied by another thread: only the answer itself says that it was full.
            while (answer := submit_another()) is None:
                sent.append(f"a{len(sent)}")
                assert len(sent) < 10_000
            assert answer is LegFailure.OVERLOADED
            client.abort("r1", [sent[0]])
            got: list[frames.FromCoordinator] = []
            while not got or not isinstance(got[-1], frames.Abort):
                got.append(codec.decode_from_coordinator((await peer.receive())[1:]))
            legs = [frame.leg.leg_id for frame in got if isinstance(frame, frames.Submit)]
            assert legs == sent
            assert got[-1] == frames.Abort((sent[0],))


async def test_a_consumer_that_raises_does_not_stop_the_link() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    class Touchy(EventLog):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if isinstance(event, LegFailed):
                raise ArithmeticError("consumer")  # noqa: TRY004 - any error will do

    log = Touchy()
    quiet = LinkOptions(
        heartbeat_interval_s=10.0, heartbeat_timeout_s=30.0
    )  # no beat comes to the rescue
    async with running_host(link=quiet) as (host, engine):
        client = LinkClient("c1", log, options=quiet)
        client.connect("decode-1", host.address)
        await log.wait_joined()
        client.submit("decode-1", make_leg("b"))
        await engine.watch.wait_until(lambda: "b" in engine.running)
        engine.submit_result = LegFailure.REJECTED
        client.submit("decode-1", make_leg("a"))
        await log.wait(LegFailed)
        engine.step_all()
        assert await log.wait_tokens("b", 1) == [4]
        await client.close()
    assert len(errors) == 1


async def test_draining_is_announced_once() -> None:
    async with running_host() as (host, engine), joined_client(host) as (client, log):
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        host.drain()
        assert (await log.wait(ReplicaDraining)).replica_id == "decode-1"
        reported = len(log.of_type(LoadReported))
        await log.wait(LoadReported, reported + 3)
        assert len(log.of_type(ReplicaDraining)) == 1


async def test_closing_the_client_frees_every_descriptor(
    open_descriptors: Callable[[], int],
) -> None:
    async with running_host() as (host, _):
        async with joined_client(host, "warm-up"):
            pass
        before = open_descriptors()
        for n in range(5):
            async with joined_client(host, f"c{n}"):
                pass
        # The replica hears of the last goodbye a moment later.
        async with asyncio.timeout(5):
            while open_descriptors() > before:  # noqa: ASYNC110 - nobody tells when one is closed
                await asyncio.sleep(0.01)
