"""Engines of several workers on CPUs: tokens as of one worker, blocks by each, one end for all.

vLLM's build for CPUs splits by tensor parallelism alone. What a wide engine hands over it holds in
parts, one for each worker, and each worker of the other side pulls its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baton.domain.errors import EngineDied
from baton.domain.fleet import Role
from baton.domain.handoff import LegFailure, LegKind
from baton.domain.value import evolve
from tests.contracts.engine_contract import EngineListener, running_pair
from tests.engine.test_vllm_features import leg
from tests.engine.vllm_engines import (
    VllmEngine,
    engine_settings,
    engine_with_checks,
    make_engine_and_peers,
)
from tests.fakes.tiny_model import tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def split(model: Path, role: Role, workers: int) -> VllmEngine:
    """An engine of so many workers, as a pool on CPUs has it."""
    mp = {"distributed_executor_backend": "mp"} if workers > 1 else {}
    return engine_with_checks(
        replace(engine_settings(model, role), tensor_parallel=workers, dtype="float32", extra=mp)
    )


@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(2, 2, marks=pytest.mark.thorough), (2, 1), (1, 2)]
)
async def test_blocks_from_one_or_two_workers_continue_as_in_one_engine(
    source: int, target: int, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path)
    prefill, decode = split(model, Role.PREFILL, source), split(model, Role.DECODE, target)
    async with running_pair(prefill, decode) as pair:
        by_source = await pair.prefill.run(leg("by the source"))
        by_target = await pair.decode.run(leg("by the target"))
        assert by_source == by_target, "however it is split"
        await pair.prefill.run(evolve(leg("handed"), leg_id="p", kind=LegKind.PREFILL))
        ticket = pair.prefill.outputs("p")[-1].kv_handle
        assert ticket is not None
        handed = evolve(leg("handed"), kind=LegKind.DECODE, kv_handle=ticket)
        assert await pair.decode.run(handed) == by_target
        facts = pair.decode.facts
        assert pair.prefill.facts.kv_block_bytes == facts.kv_block_bytes
        blocks = -(-len(handed.prompt_token_ids) // facts.block_size_tokens)
        moved = decode.load().transfers
        # One transfer for each pair of workers that share heads; together they are every block.
        assert (moved.pulls, moved.failures, moved.invalidated_pulls) == (2, 0, 0)
        assert moved.moved_bytes == blocks * facts.kv_block_bytes


async def test_every_worker_says_what_carries_its_pulls(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    wide = replace(
        engine_settings(model, Role.DECODE),
        tensor_parallel=2,
        dtype="float32",
        extra={"distributed_executor_backend": "mp"},
    )
    decode, peers = make_engine_and_peers(wide)
    async with running_pair(split(model, Role.PREFILL, 2), decode) as pair:
        source = pair.prefill.facts
        await pair.prefill.run(evolve(leg("handed"), leg_id="p", kind=LegKind.PREFILL))
        ticket = pair.prefill.outputs("p")[-1].kv_handle
        await pair.decode.run(evolve(leg("handed"), kind=LegKind.DECODE, kv_handle=ticket))
        async with asyncio.timeout(60):
            while not peers.transport(source.replica_id):
                await decode.check_side_channel(source.replica_id, source.side_channel, 20.0)
                await asyncio.sleep(0.5)  # UCX's log comes out once a second
        assert [rank.rank for rank in peers.ranks()] == [0, 1]
        assert {rank.node for rank in peers.ranks()} == {socket.gethostname()}
        assert all(rank.transports for rank in peers.ranks())


async def test_a_wide_engine_of_which_one_worker_is_killed_ends_as_a_whole(tmp_path: Path) -> None:
    engine = split(tiny_model(tmp_path), Role.DECODE, 2)
    listener = EngineListener(engine, await engine.start())
    listening = asyncio.create_task(listener.listen())
    try:
        doomed = evolve(leg("doomed"), max_tokens=1500)
        assert await engine.submit(doomed) is None
        await listener.wait_started(doomed.leg_id)
        (core, *_) = engine.process_ids()
        family = [psutil.Process(core), *psutil.Process(core).children(recursive=True)]
        workers = [
            process
            for process in family
            if "Worker" in process.name() or "Worker" in _title(process)
        ]
        assert len(workers) == 2, [_title(process) for process in family]
        os.kill(workers[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="died"):
            async with asyncio.timeout(30):
                await listening
        late = leg("late")
        assert await engine.submit(late) is LegFailure.ENGINE_ERROR
    finally:
        await engine.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=20)
    assert alive == []
    assert engine.process_ids() == ()


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
