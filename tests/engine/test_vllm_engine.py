"""Real vLLM engines behind the port: the contract, and what only they can show."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from baton.domain.errors import EngineDied, EngineStartFailed
from baton.domain.fleet import Load, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind
from baton.domain.kv_events import BlocksStored
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.engine.vllm.core.settings import OnLoadFailure
from baton.runtime.ports import Engine
from tests.contracts import step_budgets as two_budgets
from tests.contracts.engine_contract import (
    DEADLINE_S,
    EngineContract,
    EngineListener,
    RunningPair,
    running_engine,
    running_pair,
)
from tests.engine.vllm_engines import (
    VllmEngine,
    VllmLegs,
    VllmSeries,
    engine_settings,
    engine_with_checks,
    uncompilable_outputs,
    with_payload,
)
from tests.fakes.free_ports import free_port
from tests.fakes.scripted_engine import make_leg

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

IDLE_CORES = 0.1
"""A NIXL worker that polls without pause uses 0.25 on a crowded machine and 1.0 on a free one; one
with a pause 0.02, but for a few seconds after its last step."""
IDLE_WINDOW_S = 2.0
IDLE_WINDOWS = 10


def stray_sockets() -> set[Path]:
    """Sockets right among the temporary files, where vLLM has them unless it is told otherwise."""
    return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


@pytest.mark.asyncio(loop_scope="module")
class TestVllmEngine(VllmLegs, EngineContract):
    @pytest.fixture(scope="class", autouse=True)
    def _model(self, model: Path, request: pytest.FixtureRequest) -> None:
        request.cls.model = model
        # Python's own helper for spawned processes; it stays as long as this process, so it must
        # be there before anybody counts what an engine leaves behind.
        resource_tracker.ensure_running()

    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def engine_pair(self, model: Path) -> AsyncIterator[RunningPair]:
        prefill_series, decode_series = self.series
        prefill = engine_with_checks(engine_settings(model, Role.PREFILL), series=prefill_series)
        decode = engine_with_checks(engine_settings(model, Role.DECODE), series=decode_series)
        async with running_pair(prefill, decode) as pair:
            yield pair

    model: Path
    series = (VllmSeries(), VllmSeries())
    """Of the prefill and of the decode engine."""

    def new_engine(self) -> Engine:
        return VllmEngine(engine_settings(self.model, Role.MIXED))

    def make_invalid_leg(
        self, kind: LegKind, prompt: tuple[int, ...], ticket: KvHandle | None
    ) -> Leg:
        leg = super().make_leg(kind, prompt, max_tokens=3, ticket=ticket)
        return with_payload(leg, structured_outputs=uncompilable_outputs())

    @pytest.mark.parametrize("backend", [None, "xgrammar"])
    async def test_prepared_or_compiled_what_is_wrong_with_a_request_is_told(
        self, engine_pair: RunningPair, backend: str | None
    ) -> None:
        leg = super().make_leg(LegKind.LOCAL, self.new_prompt(9), max_tokens=3)
        asked = uncompilable_outputs(backend)
        assert (
            await engine_pair.decode.engine.submit(with_payload(leg, structured_outputs=asked))
            is None
        )
        output = await engine_pair.decode.wait_finished(leg.leg_id)
        assert output.finish is FinishReason.INVALID
        # The first request of an engine chooses its backend: only that one's is looked for.
        assert "grammar" in str(output.stop_reason) or "backend" in str(output.stop_reason)

    # Two engines start for it, which takes a busy machine longer than a test may.
    @pytest.mark.thorough
    @pytest.mark.timeout(300)
    async def test_closed_engines_end_their_steps_and_leave_nothing_behind(self) -> None:
        before = stray_sockets()
        await super().test_closed_engines_end_their_steps_and_leave_nothing_behind()
        assert stray_sockets() <= before

    async def test_both_engines_of_a_pair_say_that_they_fit_together(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, decode = engine_pair.prefill.facts, engine_pair.decode.facts
        assert prefill.layout == decode.layout
        assert prefill.block_size_tokens == 32
        assert prefill.kv_blocks * prefill.kv_block_bytes == 64 << 20

    async def test_tokens_after_a_handoff_are_those_of_one_engine_and_every_block_moved(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, decode = engine_pair.prefill, engine_pair.decode
        before = decode.engine.load().transfers
        blocks = 0
        for tokens in (31, 64, 200, 777):
            prompt = self.new_prompt(tokens)
            ticket = await self.run_prefill(engine_pair, prompt)
            blocks += ticket.blocks
            leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=16, ticket=ticket)
            handed_off = await decode.run(leg)
            local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=16)
            assert handed_off == await prefill.run(local)
        await self.wait_load(
            decode, lambda: decode.engine.load().transfers.pulls >= before.pulls + 4
        )
        moved = decode.engine.load().transfers.moved_bytes - before.moved_bytes
        assert moved == blocks * decode.facts.kv_block_bytes

    async def test_an_engine_told_to_consume_prefills_for_one_told_to_produce(
        self, engine_pair: RunningPair
    ) -> None:
        # The day this fails, vLLM enforces `kv_role`, and a replica cannot change its role alive.
        swapped = RunningPair(prefill=engine_pair.decode, decode=engine_pair.prefill)
        before = swapped.decode.engine.load().transfers
        prompt = self.new_prompt(100)
        ticket = await self.run_prefill(swapped, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=8, ticket=ticket)
        handed_off = await swapped.decode.run(leg)
        local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=8)
        assert handed_off == await swapped.prefill.run(local)
        load = swapped.decode.engine.load
        await self.wait_load(swapped.decode, lambda: load().transfers.pulls > before.pulls)

    async def test_a_prompt_whose_blocks_cannot_be_fetched_is_recomputed(
        self, engine_pair: RunningPair
    ) -> None:
        prompt = self.new_prompt(70)
        ticket = await self.run_prefill(engine_pair, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=6, ticket=_to_nowhere(ticket))
        recomputed = await engine_pair.decode.run(leg)
        local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=6)
        assert recomputed == await engine_pair.prefill.run(local)
        assert engine_pair.decode.engine.load().transfers.failures > 0
        await engine_pair.decode.engine.release(ticket)

    async def test_logprobs_come_as_detail(self, engine_pair: RunningPair) -> None:
        leg = self.make_leg(LegKind.LOCAL, self.new_prompt(10), max_tokens=3)
        await engine_pair.decode.run(with_payload(leg, logprobs=2))
        details = [output.engine_payload for output in engine_pair.decode.outputs(leg.leg_id)]
        assert len(details) == 3
        assert all(details)

    async def test_a_leg_under_an_id_in_use_is_refused(self, engine_pair: RunningPair) -> None:
        decode = engine_pair.decode
        leg = self.make_leg(LegKind.LOCAL, self.new_prompt(10), max_tokens=200)
        assert await decode.engine.submit(leg) is None
        assert await decode.engine.submit(leg) is not None
        await decode.wait_finished(leg.leg_id)
        assert len(decode.tokens(leg.leg_id)) == 200

    async def test_the_load_counts_legs_tokens_and_step_time(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        leg = self.make_leg(LegKind.LOCAL, self.new_prompt(300), max_tokens=1500)
        assert await decode.engine.submit(leg) is None
        assert decode.engine.load().queued_tokens == 300
        assert decode.engine.load().queued_requests == 1
        await decode.wait_started(leg.leg_id)
        running_load = decode.engine.load()
        assert (running_load.queued_tokens, running_load.running_requests) == (0, 1)
        assert running_load.kv_used_fraction > 0
        assert 0 < running_load.step_s < DEADLINE_S
        await self._abort_and_check(decode, leg)
        assert decode.engine.load().running_requests == 0

    async def test_the_load_adds_up_what_was_computed(self, engine_pair: RunningPair) -> None:
        decode = engine_pair.decode
        await self.step_once(decode)
        before = decode.engine.load().steps
        await decode.run(self.make_leg(LegKind.LOCAL, self.new_prompt(300), max_tokens=10))
        after = decode.engine.load().steps
        assert after.prefill_tokens - before.prefill_tokens == 300
        assert after.decode_tokens - before.decode_tokens == 9
        assert after.context_tokens - before.context_tokens == sum(range(301, 310))
        assert 1 + 9 <= after.steps - before.steps <= 1 + 9 + 1
        assert after.busy_s > before.busy_s

    async def test_vllms_own_metrics_are_separate_for_each_engine(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, decode = engine_pair.prefill, engine_pair.decode
        for listener in (prefill, decode):
            await self.step_once(listener)
        of_prefill, of_decode = self.series
        before = told(of_prefill), told(of_decode)
        pulls = decode.engine.load().transfers.pulls
        prompt = self.new_prompt(320)
        ticket = await self.run_prefill(engine_pair, prompt)
        await decode.run(self.make_leg(LegKind.DECODE, prompt, max_tokens=16, ticket=ticket))
        prefilled, decoded = more(of_prefill, before[0]), more(of_decode, before[1])
        assert prefilled["vllm:prompt_tokens_total"] == 320
        assert prefilled["vllm:generation_tokens_total"] == 1
        assert prefilled["vllm:request_success_total length"] == 1
        assert decoded["vllm:generation_tokens_total"] == 16
        assert decoded["vllm:prompt_tokens_by_source_total external_kv_transfer"] >= 288
        await self.wait_load(decode, lambda: decode.engine.load().transfers.pulls > pulls)
        moved = more(of_decode, before[1])["vllm:nixl_bytes_transferred_sum"]
        assert moved == 10 * decode.facts.kv_block_bytes
        assert "vllm:time_to_first_token_seconds_sum" not in decoded, "nobody feeds it"
        assert not [name for name in vars(REGISTRY)["_names_to_collectors"] if "vllm" in name]

    # ------------------------------------------------------------------ what is where
    async def test_engines_say_what_they_can_do_and_where_they_are(
        self, engine_pair: RunningPair
    ) -> None:
        addresses = set()
        for facts in (engine_pair.prefill.facts, engine_pair.decode.facts):
            assert facts.cache_events
            assert facts.supports_prefix_fetch
            host, _, port = facts.side_channel.partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            await writer.wait_closed()
            addresses.add(facts.side_channel)
        assert len(addresses) == 2

    async def test_every_stored_block_is_told_with_its_tokens_and_salt(
        self, engine_pair: RunningPair
    ) -> None:
        prefill = engine_pair.prefill
        assert isinstance(prefill.engine, VllmEngine)
        plain, salted = self.new_prompt(70), self.new_prompt(64)
        await prefill.run(self.make_leg(LegKind.LOCAL, plain, max_tokens=2))
        leg = self.make_leg(LegKind.LOCAL, salted, max_tokens=2)
        await prefill.run(with_payload(evolve(leg, cache_salt="tenant-1")))
        told: dict[tuple[int, ...], BlocksStored] = {}
        numbers = []
        # Read only now, and still from the first on.
        async with asyncio.timeout(DEADLINE_S), aclosing(prefill.engine.kv_events()) as batches:
            async for batch in batches:
                numbers.append(batch.sequence)
                told |= {e.token_ids: e for e in batch.events if isinstance(e, BlocksStored)}
                if salted in told:
                    break
        assert numbers == list(range(len(numbers)))
        assert told[plain[:64]].cache_salt is None
        assert told[salted].cache_salt == "tenant-1"
        for stored in (told[plain[:64]], told[salted]):
            assert (stored.block_size_tokens, len(stored.block_hashes)) == (32, 2)
            assert (stored.tier, stored.has_hidden_content, stored.parent_hash) == (
                "gpu",
                False,
                None,
            )

    async def test_a_kv_handle_for_the_front_of_a_prompt_is_fetched_and_the_rest_computed(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, decode = engine_pair.prefill, engine_pair.decode
        for tokens in (64, 65):  # whole blocks, and one that is not full
            prompt = self.new_prompt(150)
            free = await self.kv_used(prefill)
            ticket = await self.run_prefill(engine_pair, prompt[:tokens])
            before = decode.engine.load()
            leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=8, ticket=ticket)
            fetched = await decode.run(leg)
            local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=8)
            assert fetched == await prefill.run(local)
            assert decode.outputs(leg.leg_id)[0].cached_tokens == tokens
            after = decode.engine.load()
            assert after.steps.prefill_tokens - before.steps.prefill_tokens == 150 - tokens
            assert self._pulled_blocks(decode, before) == ticket.blocks
            await self.wait_freed(prefill, free)

    async def test_only_missing_blocks_are_pulled(self, engine_pair: RunningPair) -> None:
        prefill, decode = engine_pair.prefill, engine_pair.decode
        prompt = self.new_prompt(150)
        await decode.run(self.make_leg(LegKind.LOCAL, prompt[:97], max_tokens=1))
        free = await self.kv_used(prefill)
        for tokens, missing_blocks in ((64, 0), (150, 2)):
            ticket = await self.run_prefill(engine_pair, prompt[:tokens])
            before = decode.engine.load()
            leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=8, ticket=ticket)
            fetched = await decode.run(leg)
            assert decode.outputs(leg.leg_id)[0].cached_tokens == max(tokens, 96)
            assert self._pulled_blocks(decode, before) == missing_blocks
            local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=8)
            assert fetched == await prefill.run(local)
            await self.wait_freed(prefill, free)
            # What it has computed meanwhile would be found in the next round.
            prompt = prompt[:96] + self.new_prompt(54)

    async def test_pulls_and_failures_count_for_the_replica_they_were_from(
        self, engine_pair: RunningPair
    ) -> None:
        decode = engine_pair.decode
        prompts = [self.new_prompt(70) for _ in range(4)]
        tickets = [await self.run_prefill(engine_pair, prompt) for prompt in prompts]
        source_ids = ("here", "nowhere", "here", "here")
        legs = [
            evolve(
                self.make_leg(LegKind.DECODE, prompt, max_tokens=2, ticket=ticket),
                kv_handle=_to_nowhere(ticket) if source_id == "nowhere" else ticket,
                source_id=source_id,
            )
            for prompt, ticket, source_id in zip(prompts, tickets, source_ids, strict=True)
        ]
        await asyncio.gather(*(decode.run(leg) for leg in legs))
        links = {link.source_id: link for link in decode.engine.links()}
        assert links["here"].pulls == 3
        assert links["here"].moved_bytes == 9 * decode.facts.kv_block_bytes
        assert links["here"].busy_s > 0
        assert links["here"].failures == links["nowhere"].pulls == 0
        assert links["nowhere"].failures > 0
        await decode.engine.release(tickets[1])

    async def test_legs_without_payload_are_greedy_and_can_be_handed_off(
        self, engine_pair: RunningPair
    ) -> None:
        prefill, decode = engine_pair.prefill, engine_pair.decode
        prompt = self.new_prompt(40)
        local = self.make_leg(LegKind.LOCAL, prompt, max_tokens=6)
        wanted = await prefill.run(local)
        first = self._bare(self.make_leg(LegKind.PREFILL, prompt, max_tokens=1))
        await prefill.run(first)
        ticket = prefill.outputs(first.leg_id)[-1].kv_handle
        second = self._bare(self.make_leg(LegKind.DECODE, prompt, max_tokens=6, ticket=ticket))
        assert await decode.run(second) == wanted

    def _bare(self, leg: Leg) -> Leg:
        return evolve(leg, payload=b"")

    def _pulled_blocks(self, listener: EngineListener, before: Load) -> float:
        moved = listener.engine.load().transfers.moved_bytes - before.transfers.moved_bytes
        return moved / listener.facts.kv_block_bytes

    async def test_idle_engines_leave_the_processor_alone_after_a_transfer(
        self, engine_pair: RunningPair
    ) -> None:
        prompt = self.new_prompt(100)
        ticket = await self.run_prefill(engine_pair, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=4, ticket=ticket)
        await engine_pair.decode.run(leg)
        for listener in (engine_pair.prefill, engine_pair.decode):
            await self.step_once(listener)
        members = [
            psutil.Process(pid)
            for listener in (engine_pair.prefill, engine_pair.decode)
            for pid in _processes(listener)
        ]
        assert len(members) >= 4
        busiest = []
        for _ in range(IDLE_WINDOWS):
            before = {member.pid: _cpu_s(member) for member in members}
            await asyncio.sleep(IDLE_WINDOW_S)
            used_s = max(_cpu_s(member) - before[member.pid] for member in members)
            busiest.append(used_s / IDLE_WINDOW_S)
            if busiest[-1] < IDLE_CORES:
                return
        pytest.fail(f"an idle engine process still uses cores: {busiest}")


@pytest.mark.thorough
@pytest.mark.asyncio(loop_scope="function")
async def test_an_engine_whose_process_is_killed_fails_its_steps_and_its_legs(model: Path) -> None:
    settings = engine_settings(model, Role.DECODE, on_load_failure=OnLoadFailure.FAIL)
    engine = VllmEngine(settings)
    listener = EngineListener(engine, await engine.start())
    listening = asyncio.create_task(listener.listen())
    try:
        leg = _leg(LegKind.LOCAL, "alive", (5, 6, 7), max_tokens=2)
        await listener.run(leg)
        doomed = _leg(LegKind.LOCAL, "doomed", (5, 6, 7), max_tokens=2000)
        assert await engine.submit(doomed) is None
        await listener.wait_started(doomed.leg_id)
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        with pytest.raises(EngineDied, match="died"):
            async with asyncio.timeout(5):
                await listening
        late = _leg(LegKind.LOCAL, "late", (5, 6, 7), max_tokens=2)
        assert await engine.submit(late) is LegFailure.ENGINE_ERROR
        async with asyncio.timeout(5):
            await engine.abort([doomed.leg_id])
    finally:
        await engine.close()
    assert engine.process_ids() == ()


@pytest.mark.thorough
@pytest.mark.asyncio(loop_scope="function")
async def test_a_prompt_beside_a_stream_is_computed_in_smaller_pieces(model: Path) -> None:
    settings = replace(
        engine_settings(model, Role.MIXED),
        max_running_requests=8,
        max_batched_tokens=two_budgets.MAX_BATCHED_TOKENS,
        max_batched_tokens_while_decoding=two_budgets.DECODE_STEP_TOKENS,
    )
    async with running_engine(VllmEngine(settings)) as listener:
        await two_budgets.check_smaller_chunks_beside_streams(
            listener,
            lambda name, prompt, tokens: _leg(LegKind.LOCAL, name, prompt, max_tokens=tokens),
        )


@pytest.mark.thorough
@pytest.mark.asyncio(loop_scope="function")
async def test_a_leg_whose_blocks_cannot_be_fetched_ends_in_error_where_that_is_asked_for(
    model: Path,
) -> None:
    settings = engine_settings(model, Role.MIXED, on_load_failure=OnLoadFailure.FAIL)
    async with running_engine(VllmEngine(settings)) as listener:
        prompt = tuple(range(5, 75))
        prefill = _leg(LegKind.PREFILL, "prefill", prompt, max_tokens=1)
        await listener.run(prefill)
        ticket = listener.outputs(prefill.leg_id)[-1].kv_handle
        assert ticket is not None
        other = tuple(range(6, 76))
        decode = _leg(LegKind.DECODE, "decode", other, max_tokens=4, ticket=_to_nowhere(ticket))
        assert await listener.engine.submit(decode) is None
        assert (await listener.wait_finished(decode.leg_id)).finish is FinishReason.ERROR


# vLLM leaves the ZMQ context of a client whose construction failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.asyncio(loop_scope="function")
async def test_a_start_that_takes_too_long_is_given_up_and_leaves_no_process(model: Path) -> None:
    settings = replace(engine_settings(model, Role.MIXED), start_deadline_s=3.0)
    engine = VllmEngine(settings)
    with pytest.raises(EngineStartFailed, match="not ready within 3 s"):
        await engine.start()
    assert engine.process_ids() == ()


def _leg(
    kind: LegKind,
    leg_id: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int,
    ticket: KvHandle | None = None,
) -> Leg:
    return with_payload(
        make_leg(leg_id, kind, prompt=prompt, max_tokens=max_tokens, kv_handle=ticket)
    )


def _to_nowhere(ticket: KvHandle) -> KvHandle:
    """The KV handle, but issued by an engine that is not there."""
    params = msgspec.msgpack.decode(ticket.params)
    params |= {"remote_engine_id": "nobody", "remote_port": free_port()}
    return KvHandle(
        tokens=ticket.tokens, blocks=ticket.blocks, params=msgspec.msgpack.encode(params)
    )


def _processes(listener: EngineListener) -> tuple[int, ...]:
    assert isinstance(listener.engine, VllmEngine)
    return listener.engine.process_ids()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def more(series: VllmSeries, before: dict[str, float]) -> dict[str, float]:
    """What samples have grown by."""
    return {name: value - before.get(name, 0.0) for name, value in told(series).items()}


def told(series: VllmSeries) -> dict[str, float]:
    """Samples by name, and by source or reason where they have one."""
    found: dict[str, float] = {}
    for family in series.collect():
        for sample in family.samples:
            which = sample.labels.get("source") or sample.labels.get("finished_reason")
            found[f"{sample.name} {which}" if which else sample.name] = sample.value
    return found
