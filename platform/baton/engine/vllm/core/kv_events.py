"""vLLM's KV events as our values.

Theory of operation: vLLM publishes what its prefix cache gains and loses on a ZMQ PUB socket, in
numbered batches, and keeps the last 10,000 of them for whoever asks on a second socket. PUB drops
what a slow reader does not take, and all that was published before the subscription took effect;
nobody is told. So a reader asks for the past when it starts, from number 0; again when a number is
missing; and every half second until its subscription has brought a first batch, since only that
proves that no more can be lost unseen. Batches come out in order, and once. What vLLM no longer
keeps is left out, as the numbers show: a reader that sees a gap distrusts what it knew (see
`baton.domain.kv_events`).
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
from baton.engine.vllm.wire.salts import known_salt
from baton.runtime.process.log_events import log_event

logger = logging.getLogger(__name__)

_BATCH = msgspec.msgpack.Decoder(EngineBatch)
_QUEUED_BATCHES = 10_000
"""Batches kept for a slow reader; more are dropped, and then asked for again."""
_ASK_S = 0.5
_ANSWER_S = 1.0
"""How long to wait for a message of a replay: vLLM looks for questions at least every 0.1 s."""
_END_OF_REPLAY = 2**64 - 1
"""Source: `ZmqEventPublisher.END_SEQ`."""

Message: TypeAlias = list[bytes]
"""Topic, number (8 bytes), batch."""


async def subscribe(
    endpoint: str, replay_endpoint: str, replica_id: str, *, ended: asyncio.Event
) -> AsyncGenerator[KvEventBatch, None]:
    """Yield the batches of an engine, from its first on, until `ended`."""
    reader = _Reader(endpoint, replay_endpoint, ended)
    try:
        async with aclosing(reader.messages()) as messages:
            async for message in messages:
                try:
                    yield decode_batch(message, replica_id)
                except (ValueError, msgspec.MsgspecError) as error:
                    # Left out, it is a gap like any other.
                    told = {"replica_id": replica_id, "reason": str(error)}
                    log_event(logger, logging.WARNING, "cache_events_not_understood", told)
    finally:
        reader.close()


class _Reader:
    """Both sockets of one engine's publisher."""

    def __init__(self, endpoint: str, replay_endpoint: str, ended: asyncio.Event) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(_QUEUED_BATCHES)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._end = asyncio.ensure_future(ended.wait())
        self._wanted = 0
        """The number of the next batch to hand out."""

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield what was published, in order."""
        subscribed = False
        message: Message | None = None
        while not self._end.done():
            if message is None or _number(message) > self._wanted:
                async with aclosing(self._past()) as past:
                    async for missed in past:
                        yield missed
            if message is not None and _number(message) >= self._wanted:
                self._wanted = _number(message) + 1
                yield message
            message = await self._received(self._live, None if subscribed else _ASK_S)
            subscribed = subscribed or message is not None

    async def _past(self) -> AsyncGenerator[Message, None]:
        """Yield what vLLM still keeps from the wanted number on.

        Where an answer outran its socket it has holes, and is asked for again from the first.
        """
        holes = True
        while holes and not self._end.done():
            holes = began = False
            async with aclosing(self._replay(self._wanted)) as answer:
                async for message in answer:
                    holes = began and _number(message) > self._wanted
                    if holes:
                        break
                    if _number(message) >= self._wanted:
                        began = True
                        self._wanted = _number(message) + 1
                        yield message

    async def _replay(self, first: int) -> AsyncGenerator[Message, None]:
        # A socket of its own: whatever comes too late dies with it.
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set_hwm(0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while (frames := await self._received(socket, _ANSWER_S)) is not None:
                if _number(frames[1:]) == _END_OF_REPLAY:
                    return
                yield frames[1:]
        finally:
            socket.close(linger=0)

    async def _received(
        self, socket: zmq.asyncio.Socket, timeout_s: float | None
    ) -> Message | None:
        """The next message; None when none came in time, or no more will be read."""
        received: asyncio.Future[Message] = asyncio.ensure_future(socket.recv_multipart())
        try:
            either: set[asyncio.Future[Any]] = {received, self._end}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return received.result() if received.done() else None
        finally:
            received.cancel()

    def close(self) -> None:
        """Free the sockets."""
        self._end.cancel()
        self._live.close(linger=0)
        self._context.term()


def _number(message: Message) -> int:
    """A message's number; -1 for one that is none of vLLM's."""
    return int.from_bytes(message[1], "big") if len(message) == 3 else -1  # noqa: PLR2004


def decode_batch(message: Message, replica_id: str) -> KvEventBatch:
    """One message of vLLM's publisher as a value.

    Raises:
        ValueError: not a message of that shape.
        msgspec.MsgspecError: the batch is not what this vLLM publishes.
    """
    if len(message) != 3:  # noqa: PLR2004 - the shape of the message
        raise ValueError(f"replica {replica_id}: got {len(message)} frames, wanted 3")
    batch = _BATCH.decode(message[2])
    events = tuple(event for theirs in batch.events for event in _events(theirs))
    return KvEventBatch(replica_id=replica_id, sequence=_number(message), events=events)


def _events(theirs: BlockStored | BlockRemoved | AllBlocksCleared) -> tuple[KvEvent, ...]:
    """Our values for vLLM's event."""
    if isinstance(theirs, AllBlocksCleared):
        return (BlocksCleared(),)
    if isinstance(theirs, BlockStored):
        return _stored(theirs)
    hashes = tuple(_hash(one) for one in theirs.block_hashes)
    group = theirs.group_idx or 0
    return (BlocksRemoved(block_hashes=hashes, tier=_tier(theirs), group=group),)


def _stored(theirs: BlockStored) -> tuple[BlocksStored, ...]:
    """The blocks that token ids alone name, and apart from them those from the first that has more.

    Blocks that vLLM leaves without tokens keep only their names, which is enough where the same
    blocks were told of in another tier or group. So do those of a run with holes, which sliding
    windows and states have: vLLM gives the tokens of the holes, too, but not where they are.
    """
    hashes = [_hash(one) for one in theirs.block_hashes]
    tokens, block_tokens = theirs.token_ids, theirs.block_size
    if len(tokens) != len(hashes) * block_tokens:
        tokens, block_tokens = [], 0
    keys = [_beyond_tokens(theirs, index) for index in range(len(hashes))]
    plain = next((n for n, key in enumerate(keys) if not _is_plain(key)), len(hashes))
    salt = next((key for key in keys[0] if isinstance(key, str)), None) if keys else None
    parent = theirs.parent_block_hash
    chain = [None if parent is None else _hash(parent), *hashes]
    return tuple(
        BlocksStored(
            block_hashes=tuple(hashes[start:stop]),
            parent_hash=chain[start],
            token_ids=tuple(tokens[start * block_tokens : stop * block_tokens]),
            block_size_tokens=block_tokens,
            tier=_tier(theirs),
            adapter=theirs.lora_name,
            cache_salt=known_salt(salt),
            opaque=start == plain,
            group=theirs.group_idx or 0,
        )
        for start, stop in ((0, plain), (plain, len(hashes)))
        if start < stop
    )


def _beyond_tokens(theirs: BlockStored, index: int) -> tuple[object, ...]:
    """What made a block's hash besides tokens and adapter.

    That is the cache salt (text, only in a prompt's first block), images and the like (lists), and
    digests of prompt embeddings (bytes). Source: `to_event_extra_keys` in vLLM's kv_cache_utils.
    """
    keys = theirs.extra_keys[index] if theirs.extra_keys else None
    named = 1 if theirs.lora_name is not None else 0
    return tuple(keys or ())[named:]


def _is_plain(keys: tuple[object, ...]) -> bool:
    return all(isinstance(key, str) for key in keys)


def _tier(theirs: BlockStored | BlockRemoved) -> str | None:
    return None if theirs.medium is None else theirs.medium.lower()


def _hash(theirs: bytes | int) -> BlockHash:
    """Blocks are named by 64-bit numbers or whole digests, as vLLM is configured."""
    return theirs if isinstance(theirs, bytes) else (theirs % 2**64).to_bytes(8, "big")
