from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import pytest

from baton.domain.errors import EngineDied, EngineStartFailed, TransferFailed
from baton.domain.fleet import Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind
from baton.domain.kv_events import BlocksCleared, BlocksStored, KvEventBatch
from baton.domain.request import FinishReason
from baton.engine.sim import OnTransferFailure, SimEngine, SimSettings, expected_tokens
from baton.engine.sim.engine import InboundLink, KvEventFeed
from tests.contracts import step_budgets as two_budgets
from tests.contracts.engine_contract import DEADLINE_S, EngineListener, running_engine

SETTINGS = SimSettings(max_len_tokens=1024, kv_blocks=512, max_waiting_requests=8, speed=10.0)
SLOW = 1e6
"""Slows a transfer of milliseconds down to hours."""
PROMPT = tuple(range(3, 90))


def new_engine(settings: SimSettings = SETTINGS, replica_id: str = "e0") -> SimEngine:
    return SimEngine(settings, replica_id=replica_id, pool="test", role=Role.MIXED, model="tiny")


def engine_of(listener: EngineListener) -> SimEngine:
    assert isinstance(listener.engine, SimEngine)
    return listener.engine


@asynccontextmanager
async def running_two(
    source: SimSettings = SETTINGS, target: SimSettings = SETTINGS
) -> AsyncIterator[tuple[EngineListener, EngineListener]]:
    async with (
        running_engine(new_engine(source, "p0")) as prefill,
        running_engine(new_engine(target, "d0")) as decode,
    ):
        yield prefill, decode


def leg(
    leg_id: str,
    kind: LegKind = LegKind.LOCAL,
    *,
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 5,
    ticket: KvHandle | None = None,
) -> Leg:
    return Leg(
        leg_id=leg_id,
        request_id="r",
        kind=kind,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        kv_handle=ticket,
    )


def wanted(count: int = 5, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    return expected_tokens(prompt, count, model="tiny", settings=SETTINGS)


async def prefilled(listener: EngineListener) -> KvHandle:
    await listener.run(leg("p", LegKind.PREFILL))
    ticket = listener.outputs("p")[-1].kv_handle
    assert ticket is not None
    return ticket


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what no event tells; nothing is sent to any engine meanwhile."""
    for _ in range(int(DEADLINE_S / 0.005)):
        if holds():
            return
        await asyncio.sleep(0.005)
    pytest.fail("did not become true in time")


async def until_free(listener: EngineListener) -> None:
    """Wait until an engine holds no block."""
    await eventually(lambda: listener.engine.load().kv_used_fraction == 0)


async def until_transferring(listener: EngineListener) -> None:
    """Wait until an idle engine's new leg has left the queue for its transfer."""
    await eventually(lambda: listener.engine.load().kv_used_fraction > 0)


# ---------------------------------------------------------------------- tokens and time


async def test_a_step_takes_its_time() -> None:
    settings = replace(SETTINGS, speed=1.0, decode_step_s=0.004, step_overhead_s=0.001)
    async with running_engine(new_engine(settings)) as listener:
        begun_at_s = time.monotonic()
        await listener.run(leg("a", max_tokens=21))
        # 20 of the 21 tokens are decode steps; a timer may be early by its resolution.
        assert time.monotonic() - begun_at_s > 20 * 0.005 * 0.95


async def test_a_prompt_beside_a_stream_is_computed_in_smaller_pieces() -> None:
    settings = replace(
        SETTINGS,
        max_len_tokens=2048,
        max_running_requests=8,
        max_batched_tokens=two_budgets.MAX_BATCHED_TOKENS,
        max_batched_tokens_while_decoding=two_budgets.DECODE_STEP_TOKENS,
    )
    async with running_engine(new_engine(settings)) as listener:
        await two_budgets.check_smaller_chunks_beside_streams(
            listener, lambda name, prompt, tokens: leg(name, prompt=prompt, max_tokens=tokens)
        )


async def test_a_transfer_takes_the_time_of_its_bytes_and_counts_them() -> None:
    settings = replace(SETTINGS, speed=1.0, transfer_setup_s=0.0)
    blocks = -(-len(PROMPT) // settings.block_size_tokens)
    settings = replace(settings, transfer_bytes_per_s=blocks * settings.kv_block_bytes / 0.05)
    async with running_two(target=settings) as (prefill, decode):
        ticket = await prefilled(prefill)
        await decode.run(leg("d", LegKind.DECODE, ticket=ticket))
        totals = decode.engine.load().transfers
        assert totals.moved_bytes == blocks * settings.kv_block_bytes
        assert totals.busy_s >= 0.05 * 0.95


async def test_pulls_at_the_same_time_share_the_bandwidth() -> None:
    wire = InboundLink(
        replace(SETTINGS, speed=1.0, transfer_setup_s=0.0, transfer_bytes_per_s=2000.0)
    )
    begun_at_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        pulls = [await stack.enter_async_context(wire.transfer(100, slowdown=1.0)) for _ in "ab"]
        for arrived in pulls:
            await arrived.wait()
    assert time.monotonic() - begun_at_s > 2 * 100 / 2000 * 0.95


async def test_a_pull_that_is_given_up_leaves_its_bandwidth_to_the_others() -> None:
    wire = InboundLink(
        replace(SETTINGS, speed=1.0, transfer_setup_s=0.0, transfer_bytes_per_s=2000.0)
    )
    async with asyncio.timeout(DEADLINE_S), wire.transfer(20, slowdown=1.0) as arrived:
        async with wire.transfer(10**9, slowdown=1.0):
            pass
        await arrived.wait()
    assert len(wire._network) == 0


async def test_a_slow_transfer_does_not_stall_the_batch() -> None:
    async with running_two() as (prefill, decode):
        ticket = await prefilled(prefill)
        engine_of(decode).transfer_slowdown(SLOW)
        assert await decode.engine.submit(leg("d", LegKind.DECODE, ticket=ticket)) is None
        assert await decode.run(leg("a", max_tokens=50)) == wanted(50)
        assert decode.outputs("d") == ()
        await decode.engine.abort(["d"])


async def test_a_hundred_idle_engines_use_no_cpu() -> None:
    engines = [new_engine(replica_id=str(n)) for n in range(100)]
    try:
        for engine in engines:
            await engine.start()
        await asyncio.sleep(0.1)
        # Of this thread alone: other tests may have left threads that are busy with their own end.
        begun_s = time.thread_time()
        await asyncio.sleep(0.5)
        # Engines that looked around a hundred times a second would take several times as long.
        assert time.thread_time() - begun_s < 0.05
    finally:
        for engine in engines:
            await engine.close()


# ---------------------------------------------------------------------- refusals
async def test_a_leg_too_many_and_a_leg_twice_are_rejected() -> None:
    async with running_engine(new_engine()) as listener:
        engine = engine_of(listener)
        engine.freeze()
        assert await engine.submit(leg("0")) is None
        assert await engine.submit(leg("0")) is LegFailure.REJECTED
        failures = [await engine.submit(leg(str(n))) for n in range(1, 9)]
        assert failures == [None] * 7 + [LegFailure.OVERLOADED]
        engine.thaw()


async def test_a_foreign_kv_handle_fails_to_load_and_releasing_it_is_harmless() -> None:
    foreign = KvHandle(tokens=4, blocks=1, params=b"\x81\xa1a\x01")
    async with running_engine(new_engine()) as listener:
        decode = leg("d", LegKind.DECODE, ticket=foreign)
        assert await listener.engine.submit(decode) is LegFailure.KV_LOAD_FAILED
        await listener.engine.release(foreign)
        assert await listener.run(leg("a")) == wanted()


async def test_a_taken_port_is_one_clear_error() -> None:
    async with asyncio.timeout(DEADLINE_S):
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineStartFailed, match=f"127.0.0.1:{port}.*side_channel_port"):
            await new_engine(replace(SETTINGS, side_channel_port=port)).start()


# ---------------------------------------------------------------------- abort and back-pressure
async def test_aborting_a_leg_in_its_transfer_frees_both_engines() -> None:
    async with running_two() as (prefill, decode):
        ticket = await prefilled(prefill)
        engine_of(decode).transfer_slowdown(SLOW)
        assert await decode.engine.submit(leg("d", LegKind.DECODE, ticket=ticket)) is None
        await until_transferring(decode)
        await decode.engine.abort(["d"])
        assert decode.engine.load().kv_used_fraction == 0
        await until_free(prefill)
        assert decode.outputs("d") == ()
        assert decode.engine.load().transfers.failures == 0


async def test_an_output_under_way_is_yielded_before_abort_returns() -> None:
    engine = new_engine()
    await engine.start()
    steps = engine.steps()
    try:
        assert await engine.submit(leg("a", LegKind.PREFILL)) is None
        await eventually(lambda: bool(engine._outbox._steps))
        async with asyncio.timeout(DEADLINE_S):
            aborting = asyncio.create_task(engine.abort(["a"]))
            await asyncio.sleep(0)
            assert not aborting.done()
            (output,) = await anext(steps)
            assert output.kv_handle is not None
            await aborting
        assert engine.load().kv_used_fraction > 0
    finally:
        await engine.close()


async def test_an_abort_of_an_unread_leg_drops_the_output_and_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.engine.sim.engine._FLUSH_DEADLINE_S", 0.02)
    engine = new_engine()
    await engine.start()
    try:
        assert await engine.submit(leg("a", LegKind.PREFILL)) is None
        await eventually(lambda: bool(engine._outbox._steps))
        async with asyncio.timeout(DEADLINE_S):
            await engine.abort(["a"])
        assert engine.load().kv_used_fraction == 0
    finally:
        await engine.close()
    assert [outputs async for outputs in engine.steps()] == []


async def test_an_engine_stops_without_a_reader_of_its_steps_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.engine.sim.engine._OUTBOX_STEPS", 4)
    engine = new_engine()
    await engine.start()
    try:
        assert await engine.submit(leg("a", max_tokens=30)) is None
        await eventually(lambda: len(engine._outbox._steps) == 4)
        async with running_engine(new_engine()) as other:
            await other.run(leg("b", max_tokens=30))
        assert len(engine._outbox._steps) == 4
        async with asyncio.timeout(DEADLINE_S):
            tokens: list[int] = []
            async for (output,) in engine.steps():
                tokens += output.token_ids
                if output.finish is not None:
                    break
        assert tuple(tokens) == wanted(30)
    finally:
        await engine.close()


# ---------------------------------------------------------------------- leases and sources


async def test_blocks_read_while_their_lease_ends_are_computed_again() -> None:
    # It is renewed after 5 s only: the decode engine believes in leases of 30 s.
    async with running_two(source=replace(SETTINGS, lease_s=0.1)) as (prefill, decode):
        ticket = await prefilled(prefill)
        engine_of(decode).transfer_slowdown(0.2 / SETTINGS.transfer_s(6 * 2 * 1024 * 1024))
        assert await decode.run(leg("d", LegKind.DECODE, ticket=ticket)) == wanted()
        assert decode.engine.load().transfers.invalidated_pulls == 1


async def test_a_released_lease_lets_a_waiting_leg_start() -> None:
    tight = replace(SETTINGS, max_len_tokens=128, kv_blocks=8, lease_s=1000.0)
    async with running_two(source=tight) as (prefill, decode):
        ticket = await prefilled(prefill)
        waiting = leg("w", prompt=PROMPT[::-1])
        assert await prefill.engine.submit(waiting) is None
        await decode.engine.release(ticket)
        await prefill.wait_finished("w")
        assert prefill.tokens("w") == wanted(prompt=PROMPT[::-1])


async def test_a_broken_agent_pulls_nothing_and_still_answers_others() -> None:
    async with running_two() as (prefill, decode):
        ticket = await prefilled(prefill)
        engine_of(decode).break_agent()
        assert await decode.run(leg("d", LegKind.DECODE, ticket=ticket)) == wanted()
        assert decode.engine.load().transfers.failures == 1
        assert decode.engine.load().transfers.pulls == 0
        await decode.engine.check_side_channel("p0", prefill.facts.side_channel, DEADLINE_S)
        await prefill.engine.check_side_channel("d0", decode.facts.side_channel, DEADLINE_S)


async def test_a_source_that_is_gone_means_recomputing() -> None:
    async with running_two() as (prefill, decode):
        ticket = await prefilled(prefill)
        await prefill.engine.close()
        assert await decode.run(leg("d", LegKind.DECODE, ticket=ticket)) == wanted()
        assert decode.engine.load().transfers.failures == 1
        await decode.engine.release(ticket)


async def test_a_source_that_dies_during_the_transfer_means_recomputing_at_once() -> None:
    source = new_engine(replica_id="p0")
    await source.start()
    steps = source.steps()
    async with running_engine(new_engine()) as decode:
        assert await source.submit(leg("p", LegKind.PREFILL)) is None
        async with asyncio.timeout(DEADLINE_S):
            (output,) = await anext(steps)
        engine_of(decode).transfer_slowdown(SLOW)
        handoff = leg("d", LegKind.DECODE, ticket=output.kv_handle)
        assert await decode.engine.submit(handoff) is None
        await until_transferring(decode)
        source.die()
        await decode.wait_finished("d")
        assert decode.tokens("d") == wanted()
        assert decode.engine.load().transfers.failures == 1
    await source.close()


async def test_a_frozen_source_means_recomputing_after_the_deadline() -> None:
    impatient = replace(SETTINGS, side_channel_deadline_s=0.05)
    async with running_two(target=impatient) as (prefill, decode):
        ticket = await prefilled(prefill)
        engine_of(prefill).freeze()
        assert await decode.run(leg("d", LegKind.DECODE, ticket=ticket)) == wanted()
        assert decode.engine.load().transfers.failures == 1
        engine_of(prefill).thaw()


async def test_a_failed_pull_ends_the_leg_where_it_is_set_so() -> None:
    failing = replace(SETTINGS, on_transfer_failure=OnTransferFailure.FAIL)
    async with running_two(target=failing) as (prefill, decode):
        ticket = await prefilled(prefill)
        await prefill.engine.close()
        assert await decode.run(leg("d", LegKind.DECODE, ticket=ticket)) == ()
        assert decode.outputs("d")[-1].finish is FinishReason.ERROR
        assert decode.engine.load().kv_used_fraction == 0


SOURCE_PROCESS = """
import asyncio, sys
from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegKind
from baton.engine.sim import SimEngine, SimSettings

async def main():
    settings = SimSettings(max_len_tokens=1024, kv_blocks=512)
    engine = SimEngine(settings, replica_id="far", pool="test", role=Role.PREFILL, model="tiny")
    await engine.start()
    for leg_id in ("one", "two"):
        leg = Leg(leg_id=leg_id, request_id="r", kind=LegKind.PREFILL,
                  prompt_token_ids=tuple(range(3, 90)), max_tokens=1)
        assert await engine.submit(leg) is None
    tickets = []
    async for outputs in engine.steps():
        tickets += [output.kv_handle.params.hex() for output in outputs]
        if len(tickets) == 2:
            print(*tickets, flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_blocks_are_pulled_from_another_process_until_it_is_killed() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SOURCE_PROCESS, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = await process.stdout.readline()
        first, second = (
            KvHandle(tokens=87, blocks=6, params=bytes.fromhex(text))
            for text in line.decode().split()
        )
        async with running_engine(new_engine()) as one, running_engine(new_engine()) as two:
            assert await one.run(leg("d", LegKind.DECODE, ticket=first)) == wanted()
            assert one.engine.load().transfers.pulls == 1
            engine_of(two).transfer_slowdown(SLOW)
            await two.engine.submit(leg("d", LegKind.DECODE, ticket=second))
            await until_transferring(two)
            os.kill(process.pid, signal.SIGKILL)
            await two.wait_finished("d")
            assert two.tokens("d") == wanted()
            assert two.engine.load().transfers.failures == 1
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_garbage_on_the_side_channel_disturbs_no_other_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = random.Random(7)
    async with running_two() as (prefill, decode):
        ticket = await prefilled(prefill)
        address = engine_of(prefill)._side_channel._server
        assert address is not None
        port = address.sockets[0].getsockname()[1]
        framed = [b"\x00\x00\x00\x04" + rng.randbytes(4) for _ in range(20)]
        for garbage in [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, rng.randbytes(5000), *framed]:
            async with asyncio.timeout(DEADLINE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(garbage)
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
        assert await decode.run(leg("d", LegKind.DECODE, ticket=ticket)) == wanted()
        assert decode.engine.load().transfers.pulls == 1
    assert caplog.records == []


# ---------------------------------------------------------------------- freezing and dying
async def test_a_frozen_engine_says_nothing_and_goes_on_when_thawed() -> None:
    async with running_engine(new_engine()) as listener, running_engine(new_engine()) as other:
        assert await listener.engine.submit(leg("a", max_tokens=60)) is None
        await listener.wait_started("a")
        engine_of(listener).freeze()
        said = listener.outputs("a")
        await other.run(leg("b", max_tokens=60))
        assert len(listener.outputs("a")) <= len(said) + 1  # one may have been on its way
        assert listener.outputs("a")[-1].finish is None
        engine_of(listener).thaw()
        await listener.wait_finished("a")
        assert listener.tokens("a") == wanted(60)


async def test_a_dead_engine_fails_its_steps_and_takes_no_legs() -> None:
    engine = new_engine()
    await engine.start()
    server = engine._side_channel._server
    assert server is not None
    port = server.sockets[0].getsockname()[1]
    engine.die("test")
    with pytest.raises(EngineDied, match=r"replica e0 died: test"):
        await anext(engine.steps())
    assert await engine.submit(leg("a")) is LegFailure.ENGINE_ERROR
    with pytest.raises(OSError, match=r"refused|reset|Connect"):
        await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), DEADLINE_S)
    await engine.abort(["a"])
    await engine.close()


async def test_a_dead_engine_takes_its_outputs_with_it() -> None:
    engine = new_engine()
    await engine.start()
    assert await engine.submit(leg("a")) is None
    await eventually(lambda: bool(engine._outbox._steps))
    engine.die()
    with pytest.raises(EngineDied):
        await anext(engine.steps())
    await engine.close()


async def test_a_defect_in_the_engine_fails_its_steps_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    engine = new_engine()
    await engine.start()
    monkeypatch.setattr(engine._core, "finish_step", broken)
    await engine.submit(leg("a"))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineDied, match="a defect"):
            await anext(engine.steps())
    await engine.close()
    assert "simulated engine of replica e0 failed" in caplog.text


async def test_an_engine_that_was_never_started_can_be_closed() -> None:
    engine = new_engine()
    assert await engine.submit(leg("a")) is LegFailure.ENGINE_ERROR
    await engine.close()
    assert [outputs async for outputs in engine.steps()] == []


# ---------------------------------------------------------------------- KV events
async def test_kv_events_report_stored_and_pulled_blocks() -> None:
    async with running_two() as (prefill, decode):
        feeds = [engine_of(listener).kv_events() for listener in (prefill, decode)]
        ticket = await prefilled(prefill)
        await decode.run(leg("d", LegKind.DECODE, ticket=ticket, max_tokens=1))
        batches = [await anext(feed) for feed in feeds]
        assert [(batch.replica_id, batch.sequence) for batch in batches] == [("p0", 0), ("d0", 0)]
        (stored,), (pulled,) = (batch.events for batch in batches)
        assert isinstance(stored, BlocksStored)
        assert stored.token_ids == PROMPT[:80]
        assert stored.parent_hash is None
        assert pulled == stored
        for feed in feeds:
            await feed.aclose()


async def test_a_feed_ends_when_the_engine_closes() -> None:
    engine = new_engine()
    await engine.start()
    feed = engine.kv_events()
    await engine.close()
    assert [batch async for batch in feed] == []


async def test_a_reader_that_comes_late_misses_nothing() -> None:
    async with running_engine(new_engine()) as listener:
        await listener.run(leg("a"))
        feed = engine_of(listener).kv_events()
        assert (await anext(feed)).sequence == 0


async def test_a_closed_feed_takes_nothing_more() -> None:
    feed = KvEventFeed(2)
    feed.put(KvEventBatch(replica_id="e0", sequence=0, events=()))
    await feed.aclose()
    await feed.aclose()
    feed.put(KvEventBatch(replica_id="e0", sequence=1, events=()))
    assert [batch async for batch in feed] == []


async def test_an_unread_feed_drops_the_oldest_and_shows_the_gap() -> None:
    feed = KvEventFeed(2)
    for sequence in range(5):
        feed.put(KvEventBatch(replica_id="e0", sequence=sequence, events=()))
    feed.end()
    assert [batch.sequence async for batch in feed] == [3, 4]


async def test_a_reset_cache_is_told_and_refused_while_blocks_are_in_use() -> None:
    async with running_two() as (prefill, decode):
        engine = engine_of(prefill)
        ticket = await prefilled(prefill)
        assert not engine.reset_cache()
        await decode.engine.release(ticket)
        assert engine.reset_cache()
        feed = engine.kv_events()
        (stored,), (cleared,) = (await anext(feed)).events, (await anext(feed)).events
        assert isinstance(stored, BlocksStored)
        assert cleared == BlocksCleared()
        await prefill.run(leg("again"))
        assert prefill.outputs("again")[0].cached_tokens == 0


async def test_blocks_come_back_from_the_hosts_memory_and_delay_only_their_own_leg() -> None:
    room = replace(SETTINGS, max_len_tokens=128, kv_blocks=8, host_blocks=64)
    async with running_engine(new_engine(room)) as listener:
        await listener.run(leg("a"))
        await listener.run(leg("other", prompt=PROMPT[::-1]))  # evicts the first one's blocks
        assert await listener.run(leg("b")) == wanted()
        assert listener.outputs("b")[0].cached_tokens == 80


async def test_a_slow_load_from_the_host_can_be_aborted() -> None:
    room = replace(SETTINGS, max_len_tokens=128, kv_blocks=8, host_blocks=64, host_bytes_per_s=1.0)
    async with running_engine(new_engine(room)) as listener:
        await listener.run(leg("a"))
        await listener.run(leg("other", prompt=PROMPT[::-1]))
        assert await listener.engine.submit(leg("b")) is None
        await until_transferring(listener)
        await listener.engine.abort(["b"])
        assert listener.engine.load().kv_used_fraction == 0


# ---------------------------------------------------------------------- side channel checks


async def test_the_side_channel_of_another_layout_fails_its_check_with_both_layouts() -> None:
    async with running_two(source=replace(SETTINGS, kv_dtype="fp8")) as (prefill, decode):
        address = prefill.facts.side_channel
        with pytest.raises(TransferFailed, match=r"its blocks are 'sim/tiny/fp8.*bfloat16"):
            await decode.engine.check_side_channel("p0", address, DEADLINE_S)


async def test_a_side_channel_that_belongs_to_another_replica_now_fails_its_check() -> None:
    async with running_two() as (prefill, decode):
        address = prefill.facts.side_channel
        with pytest.raises(TransferFailed, match=r"replica 'p0' answers there, expected 'p9'"):
            await decode.engine.check_side_channel("p9", address, DEADLINE_S)


async def test_a_frozen_side_channel_fails_its_check_after_the_deadline() -> None:
    async with running_two() as (prefill, decode):
        engine_of(prefill).freeze()
        with pytest.raises(TransferFailed, match=r"replica p0: .*within|replica p0: .*Timeout"):
            await decode.engine.check_side_channel("p0", prefill.facts.side_channel, 0.05)
        engine_of(prefill).thaw()


async def test_a_check_of_a_side_channel_that_answers_garbage_fails() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x01\xc3")
        await writer.drain()
        writer.close()

    async with asyncio.timeout(DEADLINE_S):
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, running_engine(new_engine()) as listener:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransferFailed):
            await listener.engine.check_side_channel("p0", f"127.0.0.1:{port}", DEADLINE_S)
