"""vLLM's KV events as our values.

Theory of operation: vLLM publishes what its prefix cache gains and loses on a ZMQ PUB socket, in
numbered batches. PUB drops what a slow reader does not take, and what was published before it
subscribed; both show as a jump in the sequence numbers, which are passed on as they are: a reader
that sees a gap asks nobody, it distrusts what it knew (see `baton.domain.kv_events`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_events import KVEventBatch as EngineBatch

from baton.domain.kv_events import (
    BlockHash,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
)

logger = logging.getLogger(__name__)

_QUEUED_BATCHES = 10_000
"""Batches kept for a slow reader; more are dropped, visibly."""


async def subscribe(endpoint: str, replica_id: str) -> AsyncGenerator[KvEventBatch, None]:
    """Yield the batches that an engine publishes at `endpoint` from now on, until closed."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.set_hwm(_QUEUED_BATCHES)
        socket.connect(endpoint)
        socket.subscribe(b"")
        while True:
            frames = await socket.recv_multipart()
            try:
                yield decode_batch(frames, replica_id)
            except (ValueError, msgspec.MsgspecError) as error:
                # Left out, it is a gap like any other.
                logger.warning("KV event batch not understood", extra={"reason": str(error)})
    finally:
        socket.close(linger=0)
        context.term()


def decode_batch(frames: list[bytes], replica_id: str) -> KvEventBatch:
    """One message of vLLM's publisher: topic, sequence number, batch.

    Raises:
        ValueError: not a message of that shape.
        msgspec.MsgspecError: the batch is not what this vLLM publishes.
    """
    if len(frames) != 3:  # noqa: PLR2004 - the shape of the message
        raise ValueError(f"replica {replica_id}: got {len(frames)} frames, wanted 3")
    _topic, sequence, payload = frames
    batch = msgspec.msgpack.decode(payload, type=EngineBatch)
    events = tuple(event for theirs in batch.events if (event := _event(theirs)) is not None)
    return KvEventBatch(
        replica_id=replica_id, sequence=int.from_bytes(sequence, "big"), events=events
    )


def _event(theirs: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent | None:
    """Our value for vLLM's event; None for one about a further group of a hybrid model's cache.

    The first group is enough to know which prefixes are held, and its hashes are the others' too.
    """
    if isinstance(theirs, AllBlocksCleared):
        return BlocksCleared()
    if theirs.group_idx:
        return None
    hashes = tuple(_hash(one) for one in theirs.block_hashes)
    tier = None if theirs.medium is None else theirs.medium.lower()
    if not isinstance(theirs, BlockStored):
        return BlocksRemoved(block_hashes=hashes, tier=tier)
    parent = theirs.parent_block_hash
    return BlocksStored(
        block_hashes=hashes,
        parent_hash=None if parent is None else _hash(parent),
        token_ids=tuple(theirs.token_ids),
        block_size_tokens=theirs.block_size,
        tier=tier,
    )


def _hash(theirs: bytes | int) -> BlockHash:
    """Blocks are named by 64-bit numbers or whole digests, as vLLM is configured."""
    return theirs if isinstance(theirs, bytes) else (theirs % 2**64).to_bytes(8, "big")
