"""Whether a source still kept the blocks that an engine has read from it.

Theory of operation: NIXL reads memory. The source takes no part in it, so a read whose lease has
expired succeeds, and brings whatever prompt has the blocks by then. Only the source knows, and only
a question that is asked after the read proves anything: blocks that it keeps at that moment were
kept all the while. So each reader asks each source after a read and before it uses or frees the
blocks: a `LeaseQueries` in the reader's worker, a `KeptLeases` in the source's scheduler, which
is what frees blocks. No clock is part of it.

The question goes to the source's side channel, beside vLLM's request for metadata, and looks like
one: a source of an older baton answers it with metadata, which is no answer, and its listener
survives. A question without an answer in time counts as answered with no.

What may fail: the source has ended, hangs or does not understand. The blocks count as lost then,
and the prompt is computed where it was to be decoded.
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
"""Both ranks of a question, so that it can be taken for a request for metadata."""
_MAX_MESSAGE_BYTES = 1 << 20
"""A question has some 50 bytes for each read."""
_POLL_MS = 1000
"""How often a listener looks whether it is to end."""
_MAX_CONNECTIONS = 512
"""Sources that a reader stays connected to: those it asked last."""


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
    """The finished prefill legs whose blocks a source keeps; changed and read by two threads."""

    def __init__(self) -> None:
        self._leg_ids: set[str] = set()
        self._lock = threading.Lock()

    def add(self, leg_id: str) -> None:
        """The blocks of this leg are kept from now on."""
        with self._lock:
            self._leg_ids.add(leg_id)

    def remove(self, leg_ids: Iterable[str]) -> None:
        """The blocks of these legs are about to be freed, whatever for."""
        with self._lock:
            self._leg_ids.difference_update(leg_ids)

    def are_kept(self, leg_ids: Iterable[str]) -> list[bool]:
        """Whether the blocks of each of these legs are kept at this moment."""
        with self._lock:
            return [leg_id in self._leg_ids for leg_id in leg_ids]


def reply_to(
    message: bytes, *, metadata: Mapping[tuple[int, int], bytes], leases: KeptLeases
) -> bytes | None:
    """The answer to one message at a side channel; None to one that cannot be read."""
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
    """Answer at a source's side channel until `stop`: requests for metadata, and questions.

    vLLM's own listener ends at the first message that it cannot read. This one ignores it.

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
            # vLLM reads the clock to know how far apart two engines' are.
            clock_frame = msgspec.msgpack.encode(clock())
            socket.send_multipart((parts[0], b"", reply, clock_frame), flags=zmq.DONTWAIT)
    finally:
        context.destroy(linger=0)


class CompletedRead(NamedTuple):
    """A read that has ended, and what it was of."""

    request_id: str
    """The reader's own."""
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
        """Whether the blocks were kept, by the reader's request, of those that are known now.

        Waits for open questions for `wait_s`, and no longer than for the first that is answered.
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
        """Close all connections; open questions stay without an answer."""
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
        self._sockets[address] = socket  # those asked last come last
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
