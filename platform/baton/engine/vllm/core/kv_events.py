"""vLLM's KV events as baton's values.

Theory of operation: vLLM publishes changes of its prefix cache on a ZMQ PUB socket, in numbered
batches, and serves the last 10,000 on a second socket. PUB drops batches of a slow reader, and all
before the subscription took effect, without notice. So a reader asks for a replay from number 0
when it starts, and again after a gap. It also asks every half second until its subscription has
delivered a first batch, which proves that later losses are visible as gaps. Batches come out in
order, and once. Batches that vLLM no longer keeps are missing, so a reader that sees a gap
distrusts its index (see `baton.domain.kv_events`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

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
from baton.engine.vllm.wire.identity import salt_name
from baton.runtime.process.log_events import log_event

logger = logging.getLogger(__name__)

_BATCH = msgspec.msgpack.Decoder(EngineBatch)
_QUEUED_BATCHES = 10_000
"""Batches kept for a slow reader, which requests later batches again."""
_REPLAY_INTERVAL_S = 0.5
_REPLAY_TIMEOUT_S = 1.0
"""Time to wait for a message of a replay: vLLM looks for requests at least every 0.1 s."""
_END_OF_REPLAY = 2**64 - 1
"""Source: `ZmqEventPublisher.END_SEQ`."""

Message: TypeAlias = list[bytes]
"""Topic, number (8 bytes), batch."""


async def subscribe(
    endpoint: str, replay_endpoint: str, replica_id: str, *, ended: asyncio.Event
) -> AsyncGenerator[KvEventBatch, None]:
    """Yield the batches of an engine, from its first on, until `ended`."""
    reader = _EventReader(endpoint, replay_endpoint, ended)
    try:
        async with aclosing(reader.messages()) as messages:
            async for message in messages:
                try:
                    yield decode_batch(message, replica_id)
                except (ValueError, msgspec.MsgspecError) as error:
                    # Readers see a gap and distrust their index.
                    fields = {"replica_id": replica_id, "reason": str(error)}
                    log_event(logger, logging.WARNING, "cache_events_not_understood", fields)
    finally:
        reader.close()


class _EventReader:
    """Both sockets of an engine's publisher."""

    def __init__(self, endpoint: str, replay_endpoint: str, ended: asyncio.Event) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(_QUEUED_BATCHES)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._ended = asyncio.ensure_future(ended.wait())
        self._next_number = 0

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield the published messages, in order."""
        subscribed = False
        message: Message | None = None
        while not self._ended.done():
            if message is None or _sequence_number(message) > self._next_number:
                async with aclosing(self._replay_missing()) as missing:
                    async for missing_message in missing:
                        yield missing_message
            if message is not None and _sequence_number(message) >= self._next_number:
                self._next_number = _sequence_number(message) + 1
                yield message
            message = await self._receive(self._live, None if subscribed else _REPLAY_INTERVAL_S)
            subscribed = subscribed or message is not None

    async def _replay_missing(self) -> AsyncGenerator[Message, None]:
        """Yield the messages that vLLM still keeps, from the next number on.

        An answer that overran its socket has gaps; the reader then asks again from the first gap.
        """
        has_gap = True
        while has_gap and not self._ended.done():
            has_gap = has_begun = False
            async with aclosing(self._replay(self._next_number)) as replay:
                async for message in replay:
                    has_gap = has_begun and _sequence_number(message) > self._next_number
                    if has_gap:
                        break
                    if _sequence_number(message) >= self._next_number:
                        has_begun = True
                        self._next_number = _sequence_number(message) + 1
                        yield message

    async def _replay(self, first: int) -> AsyncGenerator[Message, None]:
        # A socket of its own: late answers end with it.
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set_hwm(0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while (frames := await self._receive(socket, _REPLAY_TIMEOUT_S)) is not None:
                if _sequence_number(frames[1:]) == _END_OF_REPLAY:
                    return
                yield frames[1:]
        finally:
            socket.close(linger=0)

    async def _receive(self, socket: zmq.asyncio.Socket, timeout_s: float | None) -> Message | None:
        """The next message; None after a timeout or the end."""
        received: asyncio.Future[Message] = asyncio.ensure_future(socket.recv_multipart())
        try:
            awaited: set[asyncio.Future[Any]] = {received, self._ended}
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return received.result() if received.done() else None
        finally:
            received.cancel()

    def close(self) -> None:
        self._ended.cancel()
        self._live.close(linger=0)
        self._context.term()


def _sequence_number(message: Message) -> int:
    """A message's number; -1 for a message of another shape."""
    return int.from_bytes(message[1], "big") if len(message) == 3 else -1  # noqa: PLR2004


def decode_batch(message: Message, replica_id: str) -> KvEventBatch:
    """A message of vLLM's publisher as a value.

    Raises:
        ValueError: the message has another shape.
        msgspec.MsgspecError: the batch is not of this vLLM's format.
    """
    if len(message) != 3:  # noqa: PLR2004 - the shape of the message
        raise ValueError(f"replica {replica_id}: got {len(message)} frames, expected 3")
    batch = _BATCH.decode(message[2])
    events = tuple(event for engine_event in batch.events for event in _to_kv_events(engine_event))
    return KvEventBatch(replica_id=replica_id, sequence=_sequence_number(message), events=events)


def _to_kv_events(
    engine_event: BlockStored | BlockRemoved | AllBlocksCleared,
) -> tuple[KvEvent, ...]:
    if isinstance(engine_event, AllBlocksCleared):
        return (BlocksCleared(),)
    if isinstance(engine_event, BlockStored):
        return _to_blocks_stored(engine_event)
    hashes = tuple(_hash(block_hash) for block_hash in engine_event.block_hashes)
    group = engine_event.group_idx or 0
    return (BlocksRemoved(block_hashes=hashes, tier=_tier(engine_event), group=group),)


def _to_blocks_stored(engine_event: BlockStored) -> tuple[BlocksStored, ...]:
    """The blocks that only token ids identify, and separately the rest of the run.

    Blocks without tokens keep only their hashes, which is enough if another tier or group names the
    same blocks. So do blocks of a run with holes (sliding windows, states): vLLM gives the tokens
    of the holes too, but not their positions.
    """
    hashes = [_hash(block_hash) for block_hash in engine_event.block_hashes]
    tokens, block_tokens = engine_event.token_ids, engine_event.block_size
    if len(tokens) != len(hashes) * block_tokens:
        tokens, block_tokens = [], 0
    keys = [_extra_keys(engine_event, index) for index in range(len(hashes))]
    plain_count = next((n for n, key in enumerate(keys) if not _is_plain(key)), len(hashes))
    salt = next((key for key in keys[0] if isinstance(key, str)), None) if keys else None
    parent = engine_event.parent_block_hash
    chain = [None if parent is None else _hash(parent), *hashes]
    return tuple(
        BlocksStored(
            block_hashes=tuple(hashes[start:stop]),
            parent_hash=chain[start],
            token_ids=tuple(tokens[start * block_tokens : stop * block_tokens]),
            block_size_tokens=block_tokens,
            tier=_tier(engine_event),
            adapter=engine_event.lora_name,
            cache_salt=salt_name(salt),
            has_hidden_content=start == plain_count,
            group=engine_event.group_idx or 0,
        )
        for start, stop in ((0, plain_count), (plain_count, len(hashes)))
        if start < stop
    )


def _extra_keys(engine_event: BlockStored, index: int) -> tuple[object, ...]:
    """The inputs of a block's hash other than tokens and adapter.

    These are the cache salt (text, only in a prompt's first block), images and the like (lists),
    and digests of prompt embeddings (bytes). Source: `to_event_extra_keys` in vLLM's
    kv_cache_utils.
    """
    keys = engine_event.extra_keys[index] if engine_event.extra_keys else None
    adapter_keys = 1 if engine_event.lora_name is not None else 0
    return tuple(keys or ())[adapter_keys:]


def _is_plain(keys: tuple[object, ...]) -> bool:
    return all(isinstance(key, str) for key in keys)


def _tier(engine_event: BlockStored | BlockRemoved) -> str | None:
    return None if engine_event.medium is None else engine_event.medium.lower()


def _hash(engine_hash: bytes | int) -> BlockHash:
    """A block's hash: vLLM uses 64-bit numbers or whole digests, by configuration."""
    return (
        engine_hash if isinstance(engine_hash, bytes) else (engine_hash % 2**64).to_bytes(8, "big")
    )
