"""What every engine behind `baton.runtime.ports.Engine` must do, real or simulated.

Subclass `EngineContract`, name the subclass `Test...`, and give it `engine_pair` (an async fixture
that yields `running_pair(prefill, decode)`) and `new_engine`; override `make_leg` where the engine
needs a payload. Both engines of the pair serve all tests, in any order. Where the fixture has
module scope, mark the subclass `pytest.mark.asyncio(loop_scope="module")`.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import psutil
import pytest

from baton.control.fleet.cache_feed import CacheFeed
from baton.domain.cache import unpack_hashes
from baton.domain.errors import LegInvalid, TransferFailed
from baton.domain.fleet import LinkTotals, ReplicaFacts
from baton.domain.handoff import CacheUse, KvHandle, Leg, LegKind, LegOutput
from baton.domain.kv_events import KvEventBatch
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.runtime.ports import Engine

DEADLINE_S = 60.0
"""For anything awaited here: generous, a real engine on a busy CPU is slow."""
POLL_S = 0.02


class EngineListener:
    """An engine, its facts, and everything that its steps have yielded so far."""

    def __init__(self, engine: Engine, facts: ReplicaFacts) -> None:
        self.engine = engine
        self.facts = facts
        self._outputs: defaultdict[str, list[LegOutput]] = defaultdict(list)
        self._changed = asyncio.Condition()

    async def listen(self) -> None:
        """Collect outputs until the engine closes."""
        async for outputs in self.engine.steps():
            for output in outputs:
                self._outputs[output.leg_id].append(output)
            async with self._changed:
                self._changed.notify_all()

    def outputs(self, leg_id: str) -> tuple[LegOutput, ...]:
        """What came for a leg so far."""
        return tuple(self._outputs[leg_id])

    def tokens(self, leg_id: str) -> tuple[int, ...]:
        """The tokens that came for a leg so far."""
        return tuple(token for output in self._outputs[leg_id] for token in output.token_ids)

    async def wait(self, predicate: Callable[[], bool]) -> None:
        """Wait for outputs until `predicate`."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(predicate)

    async def wait_started(self, leg_id: str) -> None:
        """Wait for a leg's first output."""
        await self.wait(lambda: bool(self._outputs[leg_id]))

    async def wait_finished(self, leg_id: str) -> LegOutput:
        """Wait for a leg's last output and return it."""
        outputs = self._outputs[leg_id]
        await self.wait(lambda: bool(outputs) and outputs[-1].finish is not None)
        return outputs[-1]

    async def run(self, leg: Leg) -> tuple[int, ...]:
        """Run a leg to its end and return its tokens."""
        failure = await self.engine.submit(leg)
        assert failure is None, f"leg {leg.leg_id} was not accepted: {failure}"
        await self.wait_finished(leg.leg_id)
        return self.tokens(leg.leg_id)


@dataclass(frozen=True, kw_only=True)
class RunningPair:
    """A prefill engine and a decode engine, started and listened to."""

    prefill: EngineListener
    decode: EngineListener


@asynccontextmanager
async def running_engine(engine: Engine) -> AsyncIterator[EngineListener]:
    """Start an engine and listen to it; close it at the end."""
    facts = await engine.start()
    listener = EngineListener(engine, facts)
    listening = asyncio.create_task(listener.listen())
    try:
        yield listener
    finally:
        await engine.close()
        async with asyncio.timeout(DEADLINE_S):
            await listening


@asynccontextmanager
async def running_pair(prefill: Engine, decode: Engine) -> AsyncIterator[RunningPair]:
    """Start a prefill and a decode engine and listen to them; close both at the end."""
    async with running_engine(prefill) as prefilling, running_engine(decode) as decoding:
        yield RunningPair(prefill=prefilling, decode=decoding)


class EngineTests:
    """Legs and prompts for tests of engines. A leg is awaited by its outputs, never by time."""

    _ids = 0

    def make_leg(
        self,
        kind: LegKind,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        ticket: KvHandle | None = None,
        resumed_tokens: int = 0,
    ) -> Leg:
        """A greedy leg that ends by length only, under a new id."""
        leg_id = self.new_leg_id()
        return Leg(
            leg_id=leg_id,
            request_id=f"request-of-{leg_id}",
            kind=kind,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            kv_handle=ticket,
            resumed_tokens=resumed_tokens,
        )

    def new_leg_id(self) -> str:
        """An id that no other leg of these tests has."""
        EngineTests._ids += 1
        return f"leg-{EngineTests._ids}"

    def make_invalid_leg(
        self, kind: LegKind, prompt: tuple[int, ...], ticket: KvHandle | None
    ) -> Leg:
        """A leg that is accepted, and that the engine then finds to ask for what it has not."""
        raise NotImplementedError

    def new_prompt(self, tokens: int) -> tuple[int, ...]:
        """A prompt that no other test has sent, so that no prefix cache knows it."""
        EngineTests._ids += 1
        rng = random.Random(EngineTests._ids)
        return tuple(rng.randrange(3, 97) for _ in range(tokens))

    async def run_prefill(self, pair: RunningPair, prompt: tuple[int, ...]) -> KvHandle:
        """Run a prefill leg and return its KV handle."""
        leg = self.make_leg(LegKind.PREFILL, prompt, max_tokens=1)
        await pair.prefill.run(leg)
        ticket = pair.prefill.outputs(leg.leg_id)[-1].kv_handle
        assert ticket is not None
        return ticket

    async def step_once(self, listener: EngineListener) -> None:
        """Make an engine step: it may say what its load is only when it does."""
        await listener.run(self.make_leg(LegKind.LOCAL, self.new_prompt(3), max_tokens=2))

    async def wait_load(self, listener: EngineListener, predicate: Callable[[], bool]) -> None:
        """Wait for something to become true of an engine's load."""
        async with asyncio.timeout(DEADLINE_S):
            await self.step_once(listener)
            while not predicate():
                await asyncio.sleep(POLL_S)
                await self.step_once(listener)

    async def kv_used(self, listener: EngineListener) -> float:
        """An engine's current share of used blocks."""
        await self.step_once(listener)
        return listener.engine.load().kv_used_fraction

    async def wait_freed(self, listener: EngineListener, before: float) -> None:
        """Wait until an engine uses no more blocks than before."""
        load = listener.engine.load
        await self.wait_load(listener, lambda: load().kv_used_fraction <= before)


class EngineContract(EngineTests):
    """The tests."""

    def new_engine(self) -> Engine:
        """An engine that was not started, for the test that closes engines."""
        raise NotImplementedError

    # ------------------------------------------------------------------ legs
    async def test_a_local_leg_streams_exactly_max_tokens_tokens_and_finishes_once(
        self, engine_pair: RunningPair
    ) -> None:
        leg = self.make_leg(LegKind.LOCAL, self.new_prompt(40), max_tokens=12)
        tokens = await engine_pair.decode.run(leg)
        await self.step_once(engine_pair.decode)
        outputs = engine_pair.decode.outputs(leg.leg_id)
        assert len(tokens) == 12
        assert engine_pair.decode.tokens(leg.leg_id) == tokens
        assert [o.finish for o in outputs if o.finish is not None] == [FinishReason.LENGTH]
        assert all(output.kv_handle is None for output in outputs)

    async def test_a_prompt_seen_before_is_reported_as_cached_with_the_first_output_only(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        block_tokens = decode.facts.block_size_tokens
        prompt = self.new_prompt(2 * block_tokens + 1)
        first = self.make_leg(LegKind.LOCAL, prompt, max_tokens=2)
        second = self.make_leg(LegKind.LOCAL, prompt, max_tokens=2)
        assert await decode.run(first) == await decode.run(second)
        assert decode.outputs(first.leg_id)[0].cached_tokens == 0
        assert [o.cached_tokens for o in decode.outputs(second.leg_id)] == [2 * block_tokens, None]
        created = [o.cache_use for leg in (first, second) for o in decode.outputs(leg.leg_id)]
        assert created == [CacheUse(0, 2 * block_tokens), None, CacheUse(0, 0), None]

    async def test_a_prefill_leg_reports_its_hit_and_its_kept_blocks(
        self, engine_pair: RunningPair
    ) -> None:
        prefill = engine_pair.prefill
        block_tokens = prefill.facts.block_size_tokens
        prompt = self.new_prompt(3 * block_tokens + 5)
        cache_uses = []
        for front in (prompt[: block_tokens + 5], prompt):
            leg = self.make_leg(LegKind.PREFILL, front, max_tokens=4)
            await prefill.run(leg)
            (output,) = prefill.outputs(leg.leg_id)
            assert output.kv_handle is not None
            await engine_pair.decode.engine.release(output.kv_handle)
            cache_uses.append((output.cached_tokens, output.cache_use))
        assert cache_uses == [
            (0, CacheUse(0, block_tokens)),
            (block_tokens, CacheUse(0, 2 * block_tokens)),
        ]

    async def test_many_legs_at_once_all_finish(self, engine_pair: RunningPair) -> None:
        legs = [
            self.make_leg(LegKind.LOCAL, self.new_prompt(5 + 7 * n), max_tokens=3 + n)
            for n in range(8)
        ]
        async with asyncio.timeout(DEADLINE_S):
            streams = await asyncio.gather(*(engine_pair.decode.run(leg) for leg in legs))
        assert [len(tokens) for tokens in streams] == [leg.max_tokens for leg in legs]

    async def test_a_resumed_leg_goes_on_with_the_same_tokens(
        self, engine_pair: RunningPair
    ) -> None:
        prompt = self.new_prompt(30)
        whole = await engine_pair.decode.run(self.make_leg(LegKind.LOCAL, prompt, max_tokens=10))
        rest = self.make_leg(LegKind.LOCAL, prompt + whole[:4], max_tokens=6, resumed_tokens=4)
        assert await engine_pair.prefill.run(rest) == whole[4:]

    async def test_a_prompt_longer_than_the_context_is_invalid_and_how_long_it_may_be_is_said(
        self, engine_pair: RunningPair
    ) -> None:
        most = engine_pair.decode.facts.max_len_tokens
        leg = self.make_leg(LegKind.LOCAL, self.new_prompt(most + 1), max_tokens=1)
        with pytest.raises(LegInvalid, match=f"has {most + 1} tokens, expected fewer than {most}"):
            await engine_pair.decode.engine.submit(leg)
        await self.step_once(engine_pair.decode)
        assert engine_pair.decode.outputs(leg.leg_id) == ()

    @pytest.mark.parametrize("kind", [LegKind.LOCAL, LegKind.DECODE])
    async def test_a_leg_that_the_engine_finds_wrong_ends_once_with_why_and_others_run_on(
        self, engine_pair: RunningPair, kind: LegKind
    ) -> None:
        decode = engine_pair.decode
        beside = self.make_leg(LegKind.LOCAL, self.new_prompt(20), max_tokens=12)
        running = asyncio.create_task(decode.run(beside))
        prompt = self.new_prompt(40)
        ticket = None
        if kind is LegKind.DECODE:
            ticket = await self.run_prefill(engine_pair, prompt)
        leg = self.make_invalid_leg(kind, prompt, ticket)
        assert await decode.engine.submit(leg) is None
        (output,) = (await decode.wait_finished(leg.leg_id),)
        assert (output.finish, output.token_ids) == (FinishReason.INVALID, ())
        assert isinstance(output.stop_reason, str)
        assert output.stop_reason
        assert len(await running) == 12
        await self.step_once(decode)
        assert decode.outputs(leg.leg_id) == (output,)

    # ------------------------------------------------------------------ handoff
    async def test_a_prefill_leg_gives_one_token_and_a_kv_handle_for_its_prompt(
        self, engine_pair: RunningPair
    ) -> None:
        prefill = engine_pair.prefill
        prompt = self.new_prompt(3 * prefill.facts.block_size_tokens + 5)
        leg = self.make_leg(LegKind.PREFILL, prompt, max_tokens=1)
        tokens = await prefill.run(leg)
        (output,) = prefill.outputs(leg.leg_id)
        assert len(tokens) == 1
        assert output.finish is FinishReason.LENGTH
        assert output.kv_handle is not None
        assert output.kv_handle.tokens == len(prompt)
        assert output.kv_handle.blocks == 4
        await engine_pair.decode.engine.release(output.kv_handle)

    async def test_a_decode_leg_with_a_kv_handle_gives_the_tokens_of_a_local_leg(
        self, engine_pair: RunningPair
    ) -> None:
        prompt = self.new_prompt(2 * engine_pair.prefill.facts.block_size_tokens + 7)
        ticket = await self.run_prefill(engine_pair, prompt)
        decode = self.make_leg(LegKind.DECODE, prompt, max_tokens=10, ticket=ticket)
        handed_off = await engine_pair.decode.run(decode)
        local = await engine_pair.prefill.run(self.make_leg(LegKind.LOCAL, prompt, max_tokens=10))
        assert handed_off == local

    @pytest.mark.parametrize("more", [7, 0], ids=["within a block", "at the end of one"])
    async def test_decode_goes_on_after_a_token_that_a_prefill_leg_gives(
        self, engine_pair: RunningPair, more: int
    ) -> None:
        block = engine_pair.prefill.facts.block_size_tokens
        prompt = self.new_prompt(2 * block + more)
        leg = evolve(self.make_leg(LegKind.PREFILL, prompt, max_tokens=10), emits_first_token=True)
        first = await engine_pair.prefill.run(leg)
        ticket = engine_pair.prefill.outputs(leg.leg_id)[-1].kv_handle
        assert ticket is not None
        assert ticket.tokens == len(prompt)
        decode = self.make_leg(
            LegKind.DECODE, prompt + first, max_tokens=9, ticket=ticket, resumed_tokens=1
        )
        rest = await engine_pair.decode.run(decode)
        local = await engine_pair.prefill.run(self.make_leg(LegKind.LOCAL, prompt, max_tokens=10))
        assert first + rest == local

    async def test_a_pull_is_counted_with_its_bytes_and_spares_the_prefill(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        before = decode.engine.load().transfers
        prompt = self.new_prompt(3 * decode.facts.block_size_tokens + 1)
        ticket = await self.run_prefill(engine_pair, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=4, ticket=ticket)
        await decode.run(leg)
        await self.wait_load(decode, lambda: decode.engine.load().transfers.pulls > before.pulls)
        after = decode.engine.load().transfers
        assert after.pulls == before.pulls + 1
        assert after.moved_bytes > before.moved_bytes
        assert after.failures == before.failures
        output = decode.outputs(leg.leg_id)[0]
        assert output.cached_tokens is not None
        assert output.cached_tokens >= 3 * decode.facts.block_size_tokens
        assert output.cache_use is not None
        assert output.cache_use.external_tokens == output.cached_tokens, "it held none of it"

    async def test_a_finished_pull_frees_the_source(self, engine_pair: RunningPair) -> None:
        before = await self.kv_used(engine_pair.prefill)
        prompt = self.new_prompt(4 * engine_pair.prefill.facts.block_size_tokens)
        ticket = await self.run_prefill(engine_pair, prompt)
        assert await self.kv_used(engine_pair.prefill) > before
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=4, ticket=ticket)
        await engine_pair.decode.run(leg)
        await self.wait_freed(engine_pair.prefill, before)

    async def test_releasing_an_unpulled_kv_handle_frees_the_source(
        self, engine_pair: RunningPair
    ) -> None:
        before = await self.kv_used(engine_pair.prefill)
        prompt = self.new_prompt(4 * engine_pair.prefill.facts.block_size_tokens)
        ticket = await self.run_prefill(engine_pair, prompt)
        assert await self.kv_used(engine_pair.prefill) > before
        async with asyncio.timeout(DEADLINE_S):
            await engine_pair.decode.engine.release(ticket)
        await self.wait_freed(engine_pair.prefill, before)

    async def test_a_prefix_fetch_spares_what_its_kv_handle_covers_and_gives_the_same_tokens(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        covered = 2 * decode.facts.block_size_tokens
        prompt = self.new_prompt(covered + decode.facts.block_size_tokens + 3)
        ticket = await self.run_prefill(engine_pair, prompt[:covered])
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=6, ticket=ticket)
        fetched = await decode.run(leg)
        output = decode.outputs(leg.leg_id)[0]
        assert output.cached_tokens == covered
        assert output.cache_use == CacheUse(covered, decode.facts.block_size_tokens)
        local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=6)
        assert fetched == await engine_pair.prefill.run(local)

    async def test_links_name_the_source_of_each_pull(self, engine_pair: RunningPair) -> None:
        decode = engine_pair.decode
        source_id = engine_pair.prefill.facts.replica_id

        def link() -> LinkTotals:
            links = {link.source_id: link for link in decode.engine.links()}
            return links.get(source_id, LinkTotals(source_id))

        before = link()
        prompt = self.new_prompt(3 * decode.facts.block_size_tokens + 1)
        ticket = await self.run_prefill(engine_pair, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=2, ticket=ticket)
        await decode.run(evolve(leg, source_id=source_id))
        await self.wait_load(decode, lambda: link().pulls > before.pulls)
        after = link()
        assert after.pulls == before.pulls + 1
        assert after.moved_bytes > before.moved_bytes
        assert after.failures == before.failures

    async def test_the_side_channel_of_the_other_engine_passes_its_check(
        self, engine_pair: RunningPair
    ) -> None:
        source = engine_pair.prefill.facts
        assert source.side_channel
        await engine_pair.decode.engine.check_side_channel(
            source.replica_id, source.side_channel, DEADLINE_S
        )

    async def test_a_side_channel_without_a_listener_fails_its_check(
        self, engine_pair: RunningPair
    ) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound but not listening
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(TransferFailed, match="gone"):
                    await engine_pair.decode.engine.check_side_channel("gone", address, 0.5)

    # ------------------------------------------------------------------ prefix cache
    async def test_cached_blocks_have_hashes_that_are_computable_from_tokens(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, facts = engine_pair.prefill, engine_pair.prefill.facts
        assert facts.cache_events
        size = facts.block_size_tokens
        prompt = self.new_prompt(3 * size + 1)
        await prefill.run(self.make_leg(LegKind.LOCAL, prompt, max_tokens=1))
        root = chain_root(model=facts.model, block_size_tokens=size)
        wanted = set(chain_hashes(root, prompt, size))
        feed = CacheFeed(model=facts.model, block_size_tokens=size, capacity_blocks=facts.kv_blocks)
        batches = cast("AsyncGenerator[KvEventBatch, None]", prefill.engine.kv_events())
        async with asyncio.timeout(DEADLINE_S), aclosing(batches):
            async for batch in batches:
                feed.apply(batch)
                told = feed.snapshot().changes
                if wanted <= {
                    block for change in told for block in unpack_hashes(change.packed_hashes)
                }:
                    break
        assert feed.counters.gaps == 0

    # ------------------------------------------------------------------ abort
    async def test_an_aborted_local_leg_frees_its_blocks_and_says_no_more(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        before = await self.kv_used(decode)
        prompt = self.new_prompt(2 * decode.facts.block_size_tokens)
        leg = self.make_leg(LegKind.LOCAL, prompt, max_tokens=self._many_tokens(decode, prompt))
        assert await decode.engine.submit(leg) is None
        await decode.wait_started(leg.leg_id)
        await self._abort_and_check(decode, leg)
        await self.wait_freed(decode, before)

    async def test_an_aborted_prefill_leg_frees_its_blocks_unless_it_gave_a_kv_handle_first(
        self, engine_pair: RunningPair
    ) -> None:
        prefill = engine_pair.prefill
        before = await self.kv_used(prefill)
        leg = self.make_leg(LegKind.PREFILL, self._long_prompt(prefill), max_tokens=1)
        assert await prefill.engine.submit(leg) is None
        await self._abort_and_check(prefill, leg)
        for output in prefill.outputs(leg.leg_id):
            assert output.kv_handle is not None
            await engine_pair.decode.engine.release(output.kv_handle)
        await self.wait_freed(prefill, before)

    async def test_a_decode_leg_aborted_before_or_in_its_transfer_frees_both_sides(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, decode = engine_pair.prefill, engine_pair.decode
        before = await self.kv_used(prefill), await self.kv_used(decode)
        prompt = self._long_prompt(prefill)
        ticket = await self.run_prefill(engine_pair, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=50, ticket=ticket)
        assert await decode.engine.submit(leg) is None
        await self._abort_and_check(decode, leg)
        async with asyncio.timeout(DEADLINE_S):
            await decode.engine.release(ticket)
        await self.wait_freed(prefill, before[0])
        await self.wait_freed(decode, before[1])

    async def test_a_decode_leg_aborted_in_mid_stream_frees_its_blocks_and_says_no_more(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        before = await self.kv_used(decode)
        prompt = self.new_prompt(2 * decode.facts.block_size_tokens)
        ticket = await self.run_prefill(engine_pair, prompt)
        many = self._many_tokens(decode, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=many, ticket=ticket)
        assert await decode.engine.submit(leg) is None
        await decode.wait_started(leg.leg_id)
        await self._abort_and_check(decode, leg)
        await self.wait_freed(decode, before)

    async def test_aborting_unknown_and_ended_legs_is_ignored(
        self, engine_pair: RunningPair
    ) -> None:
        leg = self.make_leg(LegKind.LOCAL, self.new_prompt(5), max_tokens=2)
        await engine_pair.decode.run(leg)
        async with asyncio.timeout(DEADLINE_S):
            await engine_pair.decode.engine.abort([leg.leg_id, "a-leg-that-never-was"])
        await self.step_once(engine_pair.decode)
        assert len(engine_pair.decode.tokens(leg.leg_id)) == 2

    # ------------------------------------------------------------------ the end
    async def test_closed_engines_end_their_steps_and_leave_nothing_behind(self) -> None:
        before = _open_resources()
        listeners = []
        async with asyncio.timeout(4 * DEADLINE_S):
            for engine in (self.new_engine(), self.new_engine()):
                async with running_engine(engine) as listener:
                    await self.step_once(listener)
                    listeners.append(listener)
            for listener in listeners:
                await listener.engine.close()
        assert not await _leaked_resources(before)

    async def _abort_and_check(self, listener: EngineListener, leg: Leg) -> None:
        """Abort a leg and make sure that nothing comes for it afterwards."""
        async with asyncio.timeout(DEADLINE_S):
            await listener.engine.abort([leg.leg_id])
        outputs = listener.outputs(leg.leg_id)
        await self.step_once(listener)
        await self.step_once(listener)
        assert listener.outputs(leg.leg_id) == outputs
        if leg.kind is not LegKind.PREFILL:
            assert len(listener.tokens(leg.leg_id)) < leg.max_tokens

    def _many_tokens(self, listener: EngineListener, prompt: tuple[int, ...]) -> int:
        """More tokens than an engine generates before it can be told to stop."""
        return listener.facts.max_len_tokens - len(prompt)

    def _long_prompt(self, listener: EngineListener) -> tuple[int, ...]:
        """A prompt that takes a while to prefill and to move."""
        return self.new_prompt(listener.facts.max_len_tokens // 2)


async def _leaked_resources(before: frozenset[str]) -> frozenset[str]:
    """What is still held that was not before, once it is nothing or its time is up."""
    polls = int(DEADLINE_S / POLL_S)
    for _ in range(polls):  # threads and processes end without an event to wait for
        if not _open_resources() - before:
            break
        await asyncio.sleep(POLL_S)
    return _open_resources() - before


def _open_resources() -> frozenset[str]:
    """The threads, child processes and listening ports of this process."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    # The event loop's own pool for blocking calls is nobody's leak.
    threads = {t.name for t in threading.enumerate() if not t.name.startswith("asyncio_")}
    children = {f"process {child.pid}" for child in family[1:]}
    ports = {
        f"port {connection.laddr.port} of {process.pid}"
        for process in family
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    return frozenset(threads | children | ports)
