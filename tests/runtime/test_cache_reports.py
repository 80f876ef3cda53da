"""A replica's prefix cache as coordinators see it, over the real link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.domain.cache import CacheChange, CacheChangeKind, CacheTier, CacheUpdate, unpack_hashes
from baton.domain.events import CacheChanged, Event, LoadReported, ReplicaJoined, ReplicaLost
from baton.domain.fleet import LinkTotals, Load
from baton.domain.handoff import KvHandle, Leg, LegOutput
from baton.domain.kv_events import BlocksRemoved, BlocksStored, KvEventBatch
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.runtime.link import codec, frames
from baton.runtime.link.options import LinkOptions
from baton.runtime.link.server import LinkServer
from tests.fakes.link_rig import (
    ANY_PORT,
    EventLog,
    RawPeer,
    joined_client,
    raw_coordinator,
    running_client,
    running_host,
)
from tests.fakes.scripted_engine import ScriptedEngine, make_facts, make_leg

SIZE = make_facts().block_size_tokens


def telling_engine() -> ScriptedEngine:
    return ScriptedEngine(replace(make_facts(), cache_events=True))


def prompt(n: int) -> tuple[int, ...]:
    return (n,) * SIZE


def stored(*numbers: int, tier: str | None = None) -> BlocksStored:
    """One-block prompts, told as separate chains would be: each in an event of its own."""
    (n,) = numbers
    return BlocksStored(
        block_hashes=(b"%d" % n,),
        parent_hash=None,
        token_ids=prompt(n),
        block_size_tokens=SIZE,
        tier=tier,
    )


def removed(n: int) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=(b"%d" % n,))


def hashes(*numbers: int) -> set[int]:
    root = chain_root(model=make_facts().model, block_size_tokens=SIZE)
    return {chain_hashes(root, prompt(n), SIZE)[0] for n in numbers}


class Reader:
    """Believes what a coordinator was told, and insists on numbers without holes."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._read = 0
        self.sequence: int | None = None
        self.held: set[int] = set()

    def read(self) -> set[int]:
        updates = [event.update for event in self._log.of_type(CacheChanged)]
        for update in updates[self._read :]:
            if update.is_snapshot:
                self.held.clear()
            else:
                assert self.sequence is not None, "an update came before the first snapshot"
                assert update.sequence == self.sequence + 1
            self.sequence = update.sequence
            self._apply(update)
        self._read = len(updates)
        return self.held

    def _apply(self, update: CacheUpdate) -> None:
        for change in update.changes:
            match change.kind:
                case CacheChangeKind.STORED:
                    self.held |= set(unpack_hashes(change.packed_hashes))
                case CacheChangeKind.REMOVED:
                    self.held -= set(unpack_hashes(change.packed_hashes))
                case CacheChangeKind.CLEARED:
                    self.held.clear()

    async def until(self, wanted: set[int]) -> None:
        await self._log.wait_until(lambda: self.read() == wanted)


async def test_all_that_a_host_memory_larger_than_the_kv_cache_holds_is_told() -> None:
    facts = replace(make_facts(), cache_events=True, kv_blocks=8, host_blocks=16)
    engine = ScriptedEngine(facts)
    async with running_host(engine) as (host, _), joined_client(host, "first") as (_, log):
        engine.emit_cache_events(*(stored(n, tier="cpu") for n in range(32)))
        await Reader(log).until(hashes(*range(32)))
        assert host.cache_counters.forgotten == 0


async def test_a_coordinator_gets_a_snapshot_when_it_joins_and_then_every_change() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host, "first") as (_, first_log):
        engine.emit_cache_events(stored(1))
        engine.emit_cache_events(stored(2))
        first = Reader(first_log)
        await first.until(hashes(1, 2))
        async with joined_client(host, "second") as (_, second_log):
            second = Reader(second_log)
            await second.until(hashes(1, 2))
            assert second_log.of_type(CacheChanged)[0].update.is_snapshot
            engine.emit_cache_events(removed(1))
            engine.emit_cache_events(stored(3))
            await first.until(hashes(2, 3))
            await second.until(hashes(2, 3))
            assert first.sequence == second.sequence


async def test_the_first_load_report_names_no_update_that_has_not_come_yet() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host, "first") as (_, first):
        engine.emit_cache_events(stored(1))
        await Reader(first).until(hashes(1))
        async with joined_client(host, "second") as (_, log):
            await log.wait(LoadReported)
            kinds: list[type[Event]] = [type(event) for event in log.events[:3]]
            assert kinds == [ReplicaJoined, CacheChanged, LoadReported]
            snapshot = log.of_type(CacheChanged)[0].update
            assert log.of_type(LoadReported)[0].load.cache_sequence == snapshot.sequence == 1


async def test_an_engine_that_does_not_tell_is_not_reported_as_holding_nothing() -> None:
    engine = ScriptedEngine()
    async with running_host(engine) as (host, _), joined_client(host) as (client, log):
        engine.emit_cache_events(stored(1))
        client.sync_cache("decode-1")
        await log.wait(LoadReported, 4)
        assert not log.of_type(CacheChanged)
        assert log.of_type(LoadReported)[-1].load.cache_sequence == 0


async def test_many_changes_at_once_travel_in_few_frames() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host) as (_, log):
        reader = Reader(log)
        for n in range(500):
            engine.emit_cache_events(stored(n))
        for n in range(0, 500, 2):
            engine.emit_cache_events(removed(n))
        await reader.until(hashes(*range(1, 500, 2)))
        assert len(log.of_type(CacheChanged)) < 50


async def test_an_unchanged_cache_is_not_reported() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host) as (_, log):
        await Reader(log).until(set())
        for _ in range(3):
            engine.emit_cache_events()
            await log.wait(LoadReported, len(log.of_type(LoadReported)) + 2)
        assert len(log.of_type(CacheChanged)) == 1


async def test_a_snapshot_is_sent_again_when_it_is_asked_for() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host) as (client, log):
        engine.emit_cache_events(stored(1), stored(2, tier="cpu"))
        await Reader(log).until(hashes(1, 2))
        told = len(log.of_type(CacheChanged))
        client.sync_cache("decode-1")
        snapshot = (await log.wait(CacheChanged, told + 1)).update
        assert (snapshot.is_snapshot, snapshot.sequence) == (True, 1)
        assert [change.tier for change in snapshot.changes] == list(CacheTier)


async def test_events_lost_in_the_engine_retract_earlier_claims() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host) as (_, log):
        reader = Reader(log)
        engine.emit_cache_events(stored(1))
        await reader.until(hashes(1))
        engine.emit_cache_events(removed(1), is_lost=True)
        engine.emit_cache_events(stored(2))
        await reader.until(hashes(2))
        assert host.cache_counters.gaps == 1


async def test_broken_cache_events_retract_earlier_claims_and_fail_no_leg() -> None:
    class Breaking(ScriptedEngine):
        async def kv_events(self) -> AsyncIterator[KvEventBatch]:
            async for batch in super().kv_events():
                yield batch
                await self.submit_gate.wait()
                raise ConnectionError("the publisher is gone")

    engine = Breaking(replace(make_facts(), cache_events=True))
    engine.submit_gate.clear()
    async with running_host(engine) as (host, _), joined_client(host) as (client, log):
        reader = Reader(log)
        engine.emit_cache_events(stored(1))
        await reader.until(hashes(1))
        engine.submit_gate.set()
        await reader.until(set())
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        engine.step_all()
        assert await log.wait_tokens("a", 1) == [4]
        assert not log.of_type(ReplicaLost)


async def test_a_snapshot_too_long_for_a_frame_is_cut_off() -> None:
    link = LinkOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, max_part_bytes=2048)
    engine = telling_engine()
    async with running_host(engine, link=link) as (host, _):
        async with joined_client(host, "first", link=link) as (_, log):
            reader = Reader(log)
            for told in (100, 200, 300):
                engine.emit_cache_events(*(stored(n) for n in range(told - 100, told)))
                await reader.until(hashes(*range(told)))
        async with joined_client(host, "second", link=link) as (client, log):
            client.sync_cache("decode-1")
            await log.wait(CacheChanged, 2)
            assert Reader(log).read() == hashes(*range(128))


class Nobody:
    """Takes what coordinators ask and does nothing."""

    def submit(self, leg: Leg) -> None: ...
    def abort(self, leg_ids: tuple[str, ...]) -> None: ...
    def orphan(self, leg_ids: tuple[str, ...]) -> None: ...
    def release(self, kv_handle: KvHandle) -> None: ...
    def sync_cache(self, *, immediately: bool) -> None: ...
    def report_broken_agent(self, reason: str) -> None: ...

    def check_side_channel(self, source_id: str, address: str) -> bool:
        return False

    def load_status(self) -> tuple[Load, bool]:
        return Load(), False

    def links(self) -> tuple[LinkTotals, ...]:
        return ()


async def test_a_full_queue_costs_updates_and_neither_steps_nor_the_session() -> None:
    link = LinkOptions(heartbeat_interval_s=10.0, heartbeat_timeout_s=60.0, queue_frames=4)
    server = LinkServer(make_facts(), Nobody(), options=link)
    with raw_coordinator(server.bind(ANY_PORT)) as peer:
        await peer.open_session()
        await peer.send(*codec.encode(frames.Submit(make_leg("a"))))
        await until_frames(server, 2)
        server.reports.send_cache_snapshot(CacheUpdate(0, (), is_snapshot=True))
        sent = 0
        while not server.counters.dropped_frames:
            sent += 1
            assert sent < 1000
            change = CacheChange(CacheChangeKind.STORED, bytes(1_000_000))
            server.reports.send_cache_update(CacheUpdate(sent, (change,)))
        assert server.coordinators == 1
        told = [await next_update(peer) for _ in range(sent)]
        assert [update.sequence for update in told] == list(range(sent))
        server.send_step([LegOutput("a", (1,))])
        server.reports.send_cache_update(CacheUpdate(sent + 1, ()))
        assert await peer.next_frame() == frames.Step(1, (LegOutput("a", (1,)),))
        assert (await next_update(peer)).sequence == sent + 1
    await server.close()


async def test_a_session_that_waits_for_a_snapshot_gets_no_update_before_it() -> None:
    link = LinkOptions(heartbeat_interval_s=10.0, heartbeat_timeout_s=60.0)
    server = LinkServer(make_facts(), Nobody(), options=link)
    with raw_coordinator(server.bind(ANY_PORT)) as peer:
        await peer.open_session()
        server.reports.send_cache_update(CacheUpdate(1, ()))
        for update in (CacheUpdate(1, (), is_snapshot=True), CacheUpdate(2, ())):
            tell = (
                server.reports.send_cache_snapshot
                if update.is_snapshot
                else server.reports.send_cache_update
            )
            tell(update)
            assert await next_update(peer) == update
        await peer.send(*codec.encode(frames.SyncCache()))
        await until_frames(server, 2)
        server.reports.send_cache_update(CacheUpdate(3, ()))
        server.reports.send_cache_snapshot(CacheUpdate(3, (), is_snapshot=True))
        assert (await next_update(peer)).is_snapshot
        assert not server.reports.snapshot_requested
    await server.close()


async def until_frames(server: LinkServer, count: int) -> None:
    async with asyncio.timeout(5):
        while server.counters.frames_in < count:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.001)


async def next_update(peer: RawPeer) -> CacheUpdate:
    while not isinstance(frame := await peer.next_frame(), frames.CacheUpdate):
        pass
    return frame.update


async def test_repeated_demands_for_snapshots_are_answered_with_few() -> None:
    engine = telling_engine()
    async with running_host(engine) as (host, _), joined_client(host) as (client, log):
        for _ in range(200):
            client.sync_cache("decode-1")
        client.submit("decode-1", make_leg("a"))
        await engine.watch.wait_until(lambda: "a" in engine.running)
        await log.wait(LoadReported, len(log.of_type(LoadReported)) + 4)
        assert 2 <= len(log.of_type(CacheChanged)) < 20


@pytest.mark.parametrize("replica_id", ["nobody", "r1"])
async def test_a_replica_that_has_not_joined_is_not_asked(replica_id: str) -> None:
    async with running_client() as (client, log):
        client.connect("r1", "tcp://127.0.0.1:1")
        client.sync_cache(replica_id)
        client.check_side_channel(replica_id, "p0", "host:1")
    assert log.events == []
