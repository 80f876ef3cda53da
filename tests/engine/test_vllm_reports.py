"""What vLLM reports of itself, in our words: KV events, load, and why it did not start."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import msgspec
import pytest

from baton.domain.errors import EngineStartFailed
from baton.domain.fleet import Load, Role, TransferTotals
from baton.domain.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from baton.engine.vllm.settings import VllmEngineSettings

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
        ZmqEventPublisher,
    )
    from vllm.v1.metrics.stats import SchedulerIterationDetails, SchedulerStats

    from baton.engine.vllm.facts import start_failure
    from baton.engine.vllm.kv_events import decode_batch, subscribe
    from baton.engine.vllm.load import LoadMeter

SETTINGS = VllmEngineSettings(
    replica_id="p0", pool="p", model_source="m", model_name="m", role=Role.PREFILL
)


def stored(hashes: list[int | bytes], **changes: object) -> BlockStored:
    fields: dict[str, object] = {
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(2 * len(hashes))),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**(fields | changes))


def frames(*events: object, sequence: int = 7) -> list[bytes]:
    batch = KVEventBatch(ts=1.0, events=list(events))
    return [b"", sequence.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]


def stats(**changes: object) -> SchedulerStats:
    return SchedulerStats(**changes)


def step(elapsed_ms: float, *, is_dummy: bool = False) -> SchedulerStats:
    details = SchedulerIterationDetails(
        iteration_index=0,
        num_ctx_requests=0,
        num_ctx_tokens=0,
        num_generation_requests=1,
        num_generation_tokens=1,
        elapsed_ms=elapsed_ms,
        is_dummy=is_dummy,
    )
    return stats(iteration_details=details)


# ------------------------------------------------------------------ KV events
def test_blocks_come_and_go_under_their_hashes() -> None:
    batch = decode_batch(
        frames(
            stored([11, 12], parent_block_hash=10),
            BlockRemoved(block_hashes=[11], medium="GPU"),
            AllBlocksCleared(),
        ),
        "p0",
    )
    eleven, twelve, ten = (number.to_bytes(8, "big") for number in (11, 12, 10))
    assert (batch.replica_id, batch.sequence) == ("p0", 7)
    assert batch.events == (
        BlocksStored(
            block_hashes=(eleven, twelve),
            parent_hash=ten,
            token_ids=(0, 1, 2, 3),
            block_size_tokens=2,
            tier="gpu",
        ),
        BlocksRemoved(block_hashes=(eleven,), tier="gpu"),
        BlocksCleared(),
    )


def test_whole_digests_are_names_as_good_as_numbers() -> None:
    (event,) = decode_batch(frames(stored([b"a" * 32])), "p0").events
    assert isinstance(event, BlocksStored)
    assert event.block_hashes == (b"a" * 32,)


def test_only_the_first_group_of_a_hybrid_cache_is_told() -> None:
    batch = decode_batch(frames(stored([1], group_idx=1), stored([2], group_idx=0)), "p0")
    assert len(batch.events) == 1


def test_a_message_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="replica p0: got 2 frames, wanted 3"):
        decode_batch(frames()[:2], "p0")
    with pytest.raises(msgspec.MsgspecError):
        decode_batch([b"", b"\x00" * 8, b"\xc1"], "p0")


async def test_a_subscriber_hears_vllms_publisher_and_sees_what_it_missed(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/e"
    publisher = ZmqEventPublisher(data_parallel_rank=0, endpoint=endpoint)
    batches = subscribe(endpoint, "p0")
    try:
        publisher.publish(KVEventBatch(ts=1.0, events=[stored([0])]))  # nobody listens yet
        first = asyncio.ensure_future(anext(batches))
        async with asyncio.timeout(10):
            while not first.done():  # a subscription takes effect at an unknown time
                publisher.publish(KVEventBatch(ts=1.0, events=[stored([1])]))
                await asyncio.sleep(0.01)
        # Numbers go on from what was published before, so the gap can be seen.
        assert first.result().sequence > 0
    finally:
        await batches.aclose()
        publisher.shutdown()


# ------------------------------------------------------------------ load
def test_a_prompt_is_queued_until_its_leg_has_started() -> None:
    meter = LoadMeter()
    meter.waiting(100)
    meter.waiting(50)
    assert meter.load(live_legs=2)[:3] == (2, 0, 150)
    meter.stepped(stats(num_running_reqs=1, kv_cache_usage=0.25))
    meter.started(100)
    assert meter.load(live_legs=2)[:4] == (1, 1, 50, 0.25)


def test_an_engine_without_legs_runs_none_whatever_its_last_step_said() -> None:
    meter = LoadMeter()
    meter.stepped(stats(num_running_reqs=3))
    assert meter.load(live_legs=0) == Load()


def test_the_step_time_follows_the_steps_slowly_and_ignores_empty_ones() -> None:
    meter = LoadMeter()
    meter.stepped(step(20.0))
    assert meter.load(live_legs=0).step_s == pytest.approx(0.020)
    meter.stepped(step(0.0, is_dummy=True))
    meter.stepped(step(40.0))
    assert meter.load(live_legs=0).step_s == pytest.approx(0.022)


def test_transfers_add_up_over_steps() -> None:
    meter = LoadMeter()
    for _ in range(2):
        meter.stepped(
            stats(
                kv_connector_stats={
                    "transfer_duration": [0.5, 0.25],
                    "bytes_transferred": [100, 50],
                    "num_failed_transfers": [1],
                    "num_failed_handshakes": [1],
                    "num_kv_expired_reqs": [1],
                }
            )
        )
    totals = meter.load(live_legs=0).transfers
    assert totals == TransferTotals(
        pulls=4, moved_bytes=300, busy_s=1.5, failures=4, expired_leases=2
    )


# ------------------------------------------------------------------ failures to start
def test_a_misspelt_engine_argument_is_named() -> None:
    error = TypeError("AsyncEngineArgs.__init__() got an unexpected keyword argument 'max_sequ'")
    failed = start_failure(SETTINGS, error)
    assert "replica p0" in str(failed)
    assert "'max_sequ'" in str(failed)
    assert failed.remedy == "correct the name under `engine.extra`"


def test_a_failure_in_the_engines_process_points_to_its_log() -> None:
    error = RuntimeError("Engine core initialization failed. See root cause above.\nFailed: {}")
    assert "its process ended while starting" in str(start_failure(SETTINGS, error))


def test_a_failure_is_one_line_whatever_vllm_says() -> None:
    error = ValueError("first\n  second\n\nthird")
    text = str(start_failure(SETTINGS, error))
    assert "ValueError: first second third" in text
    assert "\n" not in text


def test_a_failure_that_is_told_well_is_left_as_it_is() -> None:
    error = EngineStartFailed("port in use", "free it")
    assert start_failure(SETTINGS, error) is error
