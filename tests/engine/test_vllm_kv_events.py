"""vLLM's KV events: what they mean, and that none is missed, whenever a reader comes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from baton.domain.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEventBatch

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
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys

    from baton.engine.vllm.core import kv_events
    from baton.engine.vllm.core.kv_events import decode_batch, subscribe
    from baton.engine.vllm.wire.identity import salt_name

DEADLINE_S = 10.0
END = ZmqEventPublisher.END_SEQ


def stored(hashes: list[int] | list[bytes], **changes: object) -> BlockStored:
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


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))


def message(number: int, *events: object) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), payload(*events)]


def name(number: int) -> bytes:
    return number.to_bytes(8, "big")


def told(*numbers: int, **fields: object) -> BlocksStored:
    """What we say of the blocks with these hashes."""
    others: dict[str, object] = {
        "parent_hash": None,
        "token_ids": (),
        "block_size_tokens": 0,
        "tier": "gpu",
    }
    hashes = tuple(name(number) for number in numbers)
    return BlocksStored(block_hashes=hashes, **(others | fields))  # type: ignore[arg-type]  # its fields


# ------------------------------------------------------------------ what they mean
def test_blocks_come_and_go_under_their_hashes() -> None:
    batch = decode_batch(
        message(
            7,
            stored([11, 12], parent_block_hash=10),
            BlockRemoved(block_hashes=[11], medium="CPU"),
            AllBlocksCleared(),
        ),
        "p0",
    )
    assert (batch.replica_id, batch.sequence) == ("p0", 7)
    assert batch.events == (
        told(11, 12, parent_hash=name(10), token_ids=(0, 1, 2, 3), block_size_tokens=2),
        BlocksRemoved(block_hashes=(name(11),), tier="cpu"),
        BlocksCleared(),
    )


def test_whole_digests_are_names_as_good_as_numbers() -> None:
    (event,) = decode_batch(message(0, stored([b"a" * 32])), "p0").events
    assert isinstance(event, BlocksStored)
    assert event.block_hashes == (b"a" * 32,)


def test_each_group_of_a_hybrid_cache_is_distinguished() -> None:
    theirs = (
        stored([1], group_idx=1),
        BlockRemoved(block_hashes=[1], medium="GPU", group_idx=2),
        stored([2], group_idx=0),
    )
    batch = decode_batch(message(0, *theirs), "p0")
    assert [event.group for event in batch.events if not isinstance(event, BlocksCleared)] == [
        1,
        2,
        0,
    ]


def test_of_a_run_with_holes_the_blocks_keep_their_names() -> None:
    holes = stored([1, 2], token_ids=list(range(8)), group_idx=1)
    event, cleared = decode_batch(message(0, holes, AllBlocksCleared()), "p0").events
    assert isinstance(event, BlocksStored)
    assert cleared == BlocksCleared()
    assert event.block_hashes == (name(1), name(2))
    assert (event.token_ids, event.block_size_tokens) == ((), 0)


def test_adapter_and_salt_are_distinguished() -> None:
    keys = [[("lora", "ada"), ("cache_salt", "tenant-1")], [("lora", "ada")]]
    theirs = stored([1, 2], lora_name="ada", extra_keys=to_event_extra_keys(keys))
    (event,) = decode_batch(message(0, theirs), "p0").events
    assert isinstance(event, BlocksStored)
    assert (event.adapter, event.cache_salt, event.has_hidden_content) == ("ada", "tenant-1", False)


def test_a_salt_without_an_adapter_is_a_salt_and_none_is_none() -> None:
    salted = stored([1, 2], extra_keys=to_event_extra_keys([[("cache_salt", "tenant-1")], None]))
    plain = stored([3], lora_name="ada", extra_keys=[("ada",)])
    batch = decode_batch(message(0, salted, plain, stored([4])), "p0")
    found = [(e.adapter, e.cache_salt) for e in batch.events if isinstance(e, BlocksStored)]
    assert found == [(None, "tenant-1"), ("ada", None), (None, None)]


def test_a_long_salt_has_the_name_by_which_requests_with_it_are_known() -> None:
    long = "s" * 5000
    salted = stored([1], extra_keys=to_event_extra_keys([[("cache_salt", long)]]))
    (event,) = decode_batch(message(0, salted), "p0").events
    assert isinstance(event, BlocksStored)
    assert event.cache_salt == salt_name(long) != long


@pytest.mark.parametrize("key", [("mm", "image-1", -1), ("prompt_embeds", b"digest")])
def test_blocks_are_opaque_from_the_first_that_tokens_alone_do_not_name(
    key: tuple[object, ...],
) -> None:
    keys = to_event_extra_keys([[("cache_salt", "s")], [key], None])
    theirs = stored([1, 2, 3], parent_block_hash=9, extra_keys=keys)
    plain, opaque = decode_batch(message(0, theirs), "p0").events
    both = {"block_size_tokens": 2, "cache_salt": "s"}
    assert plain == told(1, parent_hash=name(9), token_ids=(0, 1), **both)
    assert opaque == told(
        2, 3, parent_hash=name(1), token_ids=(2, 3, 4, 5), has_hidden_content=True, **both
    )


def test_a_prompt_that_begins_with_an_image_is_opaque_as_a_whole() -> None:
    keys = to_event_extra_keys([[("lora", "ada"), ("mm", "image-1", 0)], [("lora", "ada")]])
    theirs = stored([1, 2], lora_name="ada", extra_keys=keys)
    (event,) = decode_batch(message(0, theirs), "p0").events
    assert isinstance(event, BlocksStored)
    assert event.has_hidden_content
    assert event.block_hashes == (name(1), name(2))


def test_blocks_without_tokens_keep_their_names() -> None:
    offloaded = stored([1], token_ids=[], block_size=0, medium="CPU")
    unsized = stored([2], token_ids=[], block_size=2, medium="CPU")
    batch = decode_batch(message(0, offloaded, unsized), "p0")
    assert batch.events == (told(1, tier="cpu"), told(2, tier="cpu"))


def test_a_message_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="replica p0: got 2 frames, expected 3"):
        decode_batch(message(0)[:2], "p0")
    with pytest.raises(msgspec.MsgspecError):
        decode_batch([b"", b"\x00" * 8, b"\xc1"], "p0")


# ------------------------------------------------------------------ that none is missed
class Publisher:
    """A publisher that does as it is told; vLLM's own does things when it likes."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self._context = zmq.asyncio.Context()
        self.live = self._context.socket(zmq.XPUB)
        self.live.bind(self.endpoint)
        self.replay = self._context.socket(zmq.ROUTER)
        self.replay.bind(self.replay_endpoint)

    async def subscribed(self) -> None:
        """A reader is there, and hears what is published from now on."""
        async with asyncio.timeout(DEADLINE_S):
            assert await self.live.recv() == b"\x01"

    async def asked(self, *, answer: list[int]) -> int:
        """Wait for a question and answer it; returns the number it was about."""
        async with asyncio.timeout(DEADLINE_S):
            asker, _, first = await self.replay.recv_multipart()
        for number in answer:
            await self.replay.send_multipart([asker, b"", *message(number)])
        await self.replay.send_multipart([asker, b"", b"", END, b""])
        return int.from_bytes(first, "big")

    async def publish(self, number: int) -> None:
        await self.live.send_multipart(message(number))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(autouse=True)
def _asks_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a slow machine puts no question in between.
    monkeypatch.setattr(kv_events, "_REPLAY_INTERVAL_S", 3600.0)


@pytest_asyncio.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()


class Reader:
    """The numbers of the batches that a reader hands out."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._ended = asyncio.Event()
        self._batches = subscribe(endpoint, replay_endpoint, "p0", ended=self._ended)

    async def take(self, count: int) -> list[int]:
        async with asyncio.timeout(DEADLINE_S):
            return [(await anext(self._batches)).sequence for _ in range(count)]

    async def ended(self) -> list[KvEventBatch]:
        """End the engine; what still comes."""
        self._ended.set()
        async with asyncio.timeout(DEADLINE_S), aclosing(self._batches) as batches:
            return [batch async for batch in batches]


@asynccontextmanager
async def read(publisher: Publisher, *numbers: int) -> AsyncIterator[None]:
    """Somebody reads, and has heard of these batches in the end, and of no others."""
    reader = Reader(publisher.endpoint, publisher.replay_endpoint)
    taken = asyncio.create_task(reader.take(len(numbers)))
    yield
    assert await taken == list(numbers)
    assert await reader.ended() == []


async def test_events_published_before_the_subscription_come_first(publisher: Publisher) -> None:
    async with read(publisher, 0, 1, 2, 3):
        assert await publisher.asked(answer=[0, 1, 2]) == 0
        await publisher.subscribed()
        await publisher.publish(2)  # heard of twice, told once
        await publisher.publish(3)


async def test_until_the_subscription_has_brought_something_the_reader_keeps_asking(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_REPLAY_INTERVAL_S", 0.02)
    async with read(publisher, 0, 1):
        assert await publisher.asked(answer=[]) == 0
        assert await publisher.asked(answer=[0]) == 0
        assert await publisher.asked(answer=[1]) == 1


async def test_lost_events_are_requested_again(publisher: Publisher) -> None:
    async with read(publisher, 0, 1, 2, 3, 4):
        await publisher.asked(answer=[])
        await publisher.subscribed()
        await publisher.publish(0)
        await publisher.publish(4)
        assert await publisher.asked(answer=[1, 2, 3, 4]) == 1


async def test_an_answer_with_holes_is_asked_for_again_from_the_first_hole(
    publisher: Publisher,
) -> None:
    async with read(publisher, 0, 1, 2, 3):
        assert await publisher.asked(answer=[0, 1, 3]) == 0
        assert await publisher.asked(answer=[2, 3]) == 2


async def test_dropped_events_are_a_gap_in_the_numbers(publisher: Publisher) -> None:
    async with read(publisher, 5, 6, 9, 10):
        assert await publisher.asked(answer=[5, 6]) == 0
        await publisher.subscribed()
        await publisher.publish(9)
        assert await publisher.asked(answer=[]) == 7
        await publisher.publish(10)


async def test_a_question_without_an_answer_holds_nothing_up(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_REPLAY_TIMEOUT_S", 0.02)
    async with read(publisher, 0):
        await publisher.subscribed()
        await publisher.publish(0)


async def test_a_batch_that_cannot_be_read_is_a_gap_and_no_end(publisher: Publisher) -> None:
    async with read(publisher, 0, 2):
        await publisher.asked(answer=[0])
        await publisher.subscribed()
        await publisher.live.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1"])
        await publisher.live.send_multipart([b"not", b"ours"])
        await publisher.publish(2)


async def test_a_reader_that_listens_ends_with_its_engine(publisher: Publisher) -> None:
    async with read(publisher, 0):
        await publisher.asked(answer=[0])


async def test_a_reader_that_waits_for_an_answer_ends_with_its_engine(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_REPLAY_TIMEOUT_S", 3600.0)
    async with read(publisher):
        pass


async def test_vllms_own_publisher_is_understood_however_much_it_said_before(
    tmp_path: Path,
) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    publisher = ZmqEventPublisher(
        data_parallel_rank=0, endpoint=endpoint, replay_endpoint=replay_endpoint
    )
    try:
        for _ in range(3000):  # three times what one of its answers can hold
            publisher.publish(KVEventBatch(ts=1.0, events=[stored([1])]))
        reader = Reader(endpoint, replay_endpoint)
        assert await reader.take(3000) == list(range(3000))
        publisher.publish(KVEventBatch(ts=1.0, events=[stored([1])]))
        assert await reader.take(1) == [3000]
        assert await reader.ended() == []
    finally:
        publisher.shutdown()
