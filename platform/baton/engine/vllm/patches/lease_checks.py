"""Checks whether a source still kept the blocks that an engine has read from it.

Theory of operation: NIXL reads memory without the source. So a read after the lease has expired
succeeds, and may bring another prompt's blocks. Only the source knows, and only a query after the
read proves anything: blocks that it keeps then were kept all the while. So each reader queries each
source after a read and before it uses or frees the blocks: `LeaseQueries` in the reader's worker,
`KeptLeases` in the source's scheduler, which frees blocks. No clock takes part.

The query goes to the source's side channel and has the form of vLLM's request for metadata. A
source of an older baton answers it with metadata, which is no valid answer, and its listener
survives. A query without an answer in time counts as "not kept".

If the source has ended, hangs or does not understand, the blocks count as lost. The decode replica
then computes the prompt.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
import zmq

logger = logging.getLogger(__name__)

_METADATA_VERB = b"get_meta_msg"
_LEASE_QUERY_VERB = b"baton_leases:"
_RANK = 0
"""Both ranks of a query, so that it looks like a request for metadata."""
_MAX_MESSAGE_BYTES = 1 << 20
"""A query has some 50 bytes for each read."""
_POLL_MS = 1000
"""How often a listener checks whether to end."""
_MAX_CONNECTIONS = 512
"""Sources that a reader stays connected to: the most recently queried."""


class _LeaseQuery(msgspec.Struct, array_like=True, frozen=True):
    number: int
    leg_ids: list[str]


class _LeaseReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    number: int
    kept: list[bool]


_request_decoder = msgspec.msgpack.Decoder(tuple[bytes, int, int])
_query_decoder = msgspec.msgpack.Decoder(_LeaseQuery)
_reply_decoder = msgspec.msgpack.Decoder(_LeaseReply)


class KeptLeases:
    """The finished prefill legs whose blocks a source keeps. Thread-safe."""

    def __init__(self) -> None:
        self._leg_ids: set[str] = set()
        self._lock = threading.Lock()

    def add(self, leg_id: str) -> None:
        """Record that this leg's blocks are kept from now on."""
        with self._lock:
            self._leg_ids.add(leg_id)

    def remove(self, leg_ids: Iterable[str]) -> None:
        """Record that these legs' blocks are about to be freed, for any reason."""
        with self._lock:
            self._leg_ids.difference_update(leg_ids)

    def are_kept(self, leg_ids: Iterable[str]) -> list[bool]:
        """Whether the blocks of each of these legs are kept at this moment."""
        with self._lock:
            return [leg_id in self._leg_ids for leg_id in leg_ids]


def reply_to(
    message: bytes, *, metadata: Mapping[tuple[int, int], bytes], leases: KeptLeases
) -> bytes | None:
    """The answer to a message at a side channel; None if it cannot be decoded."""
    try:
        verb, pipeline_rank, tensor_rank = _request_decoder.decode(message)
        if verb.startswith(_LEASE_QUERY_VERB):
            query = _query_decoder.decode(verb.removeprefix(_LEASE_QUERY_VERB))
            kept = leases.are_kept(query.leg_ids)
            return msgspec.msgpack.encode(_LeaseReply(query.number, kept))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return metadata.get((pipeline_rank, tensor_rank)) if verb == _METADATA_VERB else None


def listen(
    address: str,
    *,
    metadata: Mapping[tuple[int, int], bytes],
    leases: KeptLeases,
    ready: threading.Event,
    stop: threading.Event,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Answer requests for metadata and lease queries at a source's side channel until `stop`.

    vLLM's own listener ends at the first message that it cannot decode; this listener ignores it.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    context = zmq.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        _configure_socket(socket, address)
        socket.bind(address)
        ready.set()
        while not stop.is_set():
            if not socket.poll(_POLL_MS):
                continue
            parts = socket.recv_multipart()
            message = parts[2] if len(parts) == 3 and not parts[1] else b""  # noqa: PLR2004
            reply = reply_to(message, metadata=metadata, leases=leases)
            if reply is None:
                logger.warning("side channel %s: ignored a message that is no request", address)
                continue
            # vLLM reads the clock to learn the offset between two engines' clocks.
            clock_frame = msgspec.msgpack.encode(clock())
            socket.send_multipart((parts[0], b"", reply, clock_frame), flags=zmq.DONTWAIT)
    finally:
        context.destroy(linger=0)


class CompletedRead(NamedTuple):
    """A read that has ended, by both sides' ids."""

    request_id: str
    """The reader's."""
    leg_id: str
    """The source's."""


class _PendingQuery(NamedTuple):
    reads: tuple[CompletedRead, ...]
    deadline_at_s: float


class LeaseQueries:
    """The reader's side. For one thread; sends and receives without waiting."""

    def __init__(
        self, *, deadline_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._numbers = itertools.count(1)
        self._pending: dict[int, _PendingQuery] = {}
        self._unsent: defaultdict[str, list[CompletedRead]] = defaultdict(list)
        self._open_request_ids: set[str] = set()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open_request_ids

    def query(self, address: str, read: CompletedRead) -> None:
        """Ask the source at `address` (of ZMQ) about a read; sent with the next `poll_replies`."""
        self._unsent[address].append(read)
        self._open_request_ids.add(read.request_id)

    def poll_replies(self, *, wait_s: float) -> dict[str, bool]:
        """Whether the blocks were kept, by request id, for all queries that are decided now.

        Waits for answers for `wait_s`, or until the first arrives.
        """
        self._send()
        results: dict[str, bool] = {}
        if self._pending:
            for socket, _ in self._poller.poll(round(1000 * wait_s)):
                self._receive(socket, results)
            self._expire_queries(results)
        self._open_request_ids.difference_update(results)
        return results

    def close(self) -> None:
        """Close all connections; open queries stay without an answer."""
        self._context.destroy(linger=0)

    def _send(self) -> None:
        for address, reads in self._unsent.items():
            number = next(self._numbers)
            query = _LeaseQuery(number, [read.leg_id for read in reads])
            verb = _LEASE_QUERY_VERB + msgspec.msgpack.encode(query)
            message = msgspec.msgpack.encode((verb, _RANK, _RANK))
            self._pending[number] = _PendingQuery(tuple(reads), self._clock() + self._deadline_s)
            try:
                self._connect(address).send_multipart((b"", message), flags=zmq.DONTWAIT)
            except zmq.ZMQError as error:  # it stays without an answer
                logger.warning("side channel %s: cannot ask it: %s", address, error)
        self._unsent.clear()

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        if (socket := self._sockets.pop(address, None)) is None:
            socket = self._context.socket(zmq.DEALER)
            _configure_socket(socket, address)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
        self._sockets[address] = socket  # the most recently queried are last
        if len(self._sockets) > _MAX_CONNECTIONS:
            oldest = self._sockets.pop(next(iter(self._sockets)))
            self._poller.unregister(oldest)
            oldest.close()
        return socket

    def _receive(self, socket: zmq.Socket[bytes], results: dict[str, bool]) -> None:
        while socket.poll(0):
            parts = socket.recv_multipart()
            try:
                reply = _reply_decoder.decode(parts[1])
            except (IndexError, msgspec.MsgspecError, RecursionError):
                logger.warning("a side channel does not know of leases: not of this baton")
                continue
            pending = self._pending.pop(reply.number, None)
            if pending is None:
                continue
            if len(reply.kept) != len(pending.reads):
                results.update((read.request_id, False) for read in pending.reads)
                continue
            for read, was_kept in zip(pending.reads, reply.kept, strict=True):
                results[read.request_id] = was_kept

    def _expire_queries(self, results: dict[str, bool]) -> None:
        now_s = self._clock()
        for number, pending in tuple(self._pending.items()):
            if pending.deadline_at_s > now_s:
                return
            del self._pending[number]
            results.update((read.request_id, False) for read in pending.reads)


def _configure_socket(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
