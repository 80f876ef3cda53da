"""Asks an engine's side channel for the data of a pull from it, as another engine would.

Theory of operation: vLLM's first pull from an engine asks its handshake listener, a thread, for the
metadata of its NIXL agent, in a ZMQ request over TCP. That thread ends at the first packet that it
cannot read. Then prefills still succeed there, the engine reports itself healthy, and every new
decode engine fails to pull from it. `check_side_channel` sends an engine's request to find that out
before requests are lost.

A ZMQ socket waits for a peer that is not there. So a plain connection is tried first, to tell "no
process listens" from "does not answer".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from baton.domain.errors import TransferFailed
from baton.domain.names.addresses import Address, format_endpoint, is_ipv6, parse_address

_REQUEST = b"\x93\xc4\x0cget_meta_msg\x00\x00"
"""MessagePack of (b"get_meta_msg", pipeline rank 0, tensor rank 0).

A rank that the engine does not have would end its listener; rank 0 always exists.

Source: vllm 0.32, kv_connector/v1/nixl/base_worker.py `_nixl_handshake`.
"""

_MAX_REPLY_BYTES = 8 << 20
"""An engine with 48 layers answers with some 10 kB."""

_REPLY_PARTS = 2
"""The payload, and the listener's clock."""


class _Payload(msgspec.Struct):
    """vLLM's `NixlHandshakePayload`."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


_PAYLOAD = msgspec.msgpack.Decoder(_Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannelFacts:
    """The answer of a side channel."""

    compatibility: str
    """vLLM's digest of all that must be equal to exchange blocks."""
    metadata_bytes: int
    elapsed_s: float


class SideChannelChecker:
    """One engine's checks of others, against the compatibility hash of its own side channel.

    While its own side channel does not answer, hashes are not compared: such an engine can still
    pull.
    """

    def __init__(self, own_id: str, own_address: str) -> None:
        self._own_id = own_id
        self._own_address = own_address
        self._own_compatibility: str | None = None

    async def check(self, source_id: str, address: str, deadline_s: float) -> None:
        """Return when blocks could be pulled from `source_id`, at the latest after `deadline_s`.

        Raises:
            TransferFailed: it did not answer in time, or with something unusable.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        if self._own_compatibility is None:
            await self._fetch_own_compatibility(deadline_s / 2)
        await check_side_channel(
            source_id,
            address,
            expected_compatibility=self._own_compatibility,
            deadline_s=deadline_s - (loop.time() - started_s),
        )

    async def _fetch_own_compatibility(self, deadline_s: float) -> None:
        try:
            facts = await check_side_channel(
                self._own_id, self._own_address, expected_compatibility=None, deadline_s=deadline_s
            )
        except TransferFailed:
            return
        self._own_compatibility = facts.compatibility


async def check_side_channel(
    source_id: str, address: str, *, expected_compatibility: str | None, deadline_s: float
) -> SideChannelFacts:
    """Ask replica `source_id`, whose side channel is at `address` (`host:port`).

    `expected_compatibility` None accepts any hash.

    Raises:
        TransferFailed: no process listens, no answer comes within `deadline_s`, or it is unusable.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    peer_address = _parse_source_address(source_id, address)
    reason = "took no connection within {:.1f} s; check the network between the nodes"
    try:
        async with asyncio.timeout(deadline_s):
            await _try_connect(peer_address)
            reason = "gave no answer within {:.1f} s: its thread hangs; restart the replica"
            parts = await _request_metadata(peer_address)
    except TimeoutError as error:
        reason = f"side channel {address} {reason.format(deadline_s)}"
        raise TransferFailed(source_id, reason) from error
    except OSError as error:
        raise TransferFailed(
            source_id,
            f"no process listens at side channel {address} ({error.strerror or error}): the engine"
            " or its handshake thread has ended; restart the replica",
        ) from error
    payload = _parse_reply(source_id, address, parts)
    if expected_compatibility not in {None, payload.compatibility_hash}:
        raise TransferFailed(
            source_id,
            f"its engine is not compatible: got hash {payload.compatibility_hash}, expected "
            f"{expected_compatibility}; give both pools the same vLLM, model, dtype and KV layout",
        )
    return SideChannelFacts(
        compatibility=payload.compatibility_hash,
        metadata_bytes=len(payload.agent_metadata_bytes),
        elapsed_s=loop.time() - started_s,
    )


def _parse_source_address(source_id: str, address: str) -> Address:
    try:
        return parse_address(address)
    except ValueError as error:
        raise TransferFailed(source_id, f"side channel: {error}") from error


async def _try_connect(address: Address) -> None:
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.transport.abort()


async def _request_metadata(address: Address) -> list[bytes]:
    with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(is_ipv6(address.host)))
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REPLY_BYTES)
        socket.connect(format_endpoint("tcp", address.host, address.port))
        await socket.send(_REQUEST)
        parts: list[bytes] = await socket.recv_multipart()
        return parts


def _parse_reply(source_id: str, address: str, parts: list[bytes]) -> _Payload:
    reason = f"got {len(parts)} parts, expected {_REPLY_PARTS}"
    if len(parts) == _REPLY_PARTS:
        try:
            payload = _PAYLOAD.decode(parts[0])
        except (msgspec.MsgspecError, RecursionError) as error:
            reason = str(error)
        else:
            if payload.compatibility_hash and payload.agent_metadata_bytes:
                return payload
            reason = "the hash or the metadata is empty"
    raise TransferFailed(
        source_id,
        f"side channel {address} answered what no engine can read: {reason}; "
        "run the same vLLM everywhere",
    )
