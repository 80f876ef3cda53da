"""Whether a source still kept the blocks that an engine has read from it.

Theory of operation: NIXL reads memory. The source takes no part in it, so a read whose lease has
expired succeeds, and brings whatever prompt has the blocks by then. Only the source knows, and only
a question that is asked after the read proves anything: blocks that it keeps at that moment were
kept all the while. So each reader asks each source after a read and before it uses or frees the
blocks: a `LeaseQuestions` in the reader's worker, a `KeptLeases` in the source's scheduler, which
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
_QUESTION_VERB = b"baton_leases:"
_RANK = 0
"""Both ranks of a question, so that it can be taken for a request for metadata."""
_MAX_MESSAGE_BYTES = 1 << 20
"""A question has some 50 bytes for each read."""
_POLL_MS = 1000
"""How often a listener looks whether it is to end."""
_KEPT_CONNECTIONS = 512
"""Sources that a reader stays connected to: those it asked last."""


class _Question(msgspec.Struct, array_like=True, frozen=True):
    number: int
    leg_ids: list[str]


class _Answer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    number: int
    kept: list[bool]


_request_decoder = msgspec.msgpack.Decoder(tuple[bytes, int, int])
_question_decoder = msgspec.msgpack.Decoder(_Question)
_answer_decoder = msgspec.msgpack.Decoder(_Answer)


class KeptLeases:
    """The finished prefill legs whose blocks a source keeps; changed and read by two threads."""

    def __init__(self) -> None:
        self._leg_ids: set[str] = set()
        self._lock = threading.Lock()

    def keep(self, leg_id: str) -> None:
        """The blocks of this leg are kept from now on."""
        with self._lock:
            self._leg_ids.add(leg_id)

    def free(self, leg_ids: Iterable[str]) -> None:
        """The blocks of these legs are about to be freed, whatever for."""
        with self._lock:
            self._leg_ids.difference_update(leg_ids)

    def are_kept(self, leg_ids: Iterable[str]) -> list[bool]:
        """Whether the blocks of each of these legs are kept at this moment."""
        with self._lock:
            return [leg_id in self._leg_ids for leg_id in leg_ids]


def answer(
    message: bytes, *, metadata: Mapping[tuple[int, int], bytes], leases: KeptLeases
) -> bytes | None:
    """The answer to one message at a side channel; None to one that cannot be read."""
    try:
        verb, pipeline_rank, tensor_rank = _request_decoder.decode(message)
        if verb.startswith(_QUESTION_VERB):
            question = _question_decoder.decode(verb.removeprefix(_QUESTION_VERB))
            kept = leases.are_kept(question.leg_ids)
            return msgspec.msgpack.encode(_Answer(question.number, kept))
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
        _prepare(socket, address)
        socket.bind(address)
        ready.set()
        while not stop.is_set():
            if not socket.poll(_POLL_MS):
                continue
            parts = socket.recv_multipart()
            message = parts[2] if len(parts) == 3 and not parts[1] else b""  # noqa: PLR2004
            told = answer(message, metadata=metadata, leases=leases)
            if told is None:
                logger.warning("side channel %s: ignored a message that is no request", address)
                continue
            # vLLM reads the clock to know how far apart two engines' are.
            told_at = msgspec.msgpack.encode(clock())
            socket.send_multipart((parts[0], b"", told, told_at), flags=zmq.DONTWAIT)
    finally:
        context.destroy(linger=0)


class Read(NamedTuple):
    """A read that has ended, and what it was of."""

    request_id: str
    """The reader's own."""
    leg_id: str
    """The source's."""


class _Asked(NamedTuple):
    reads: tuple[Read, ...]
    due_at_s: float


class LeaseQuestions:
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
        self._asked: dict[int, _Asked] = {}
        self._unsent: defaultdict[str, list[Read]] = defaultdict(list)
        self._open: set[str] = set()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    def ask(self, address: str, read: Read) -> None:
        """Ask the source at `address` (of ZMQ) about a read; sent with the next `take_answers`."""
        self._unsent[address].append(read)
        self._open.add(read.request_id)

    def take_answers(self, *, wait_s: float) -> dict[str, bool]:
        """Whether the blocks were kept, by the reader's request, of those that are known now.

        Waits for open questions for `wait_s`, and no longer than for the first that is answered.
        """
        self._send()
        found: dict[str, bool] = {}
        if self._asked:
            for socket, _ in self._poller.poll(round(1000 * wait_s)):
                self._receive(socket, found)
            self._give_up(found)
        self._open.difference_update(found)
        return found

    def close(self) -> None:
        """Close all connections; open questions stay without an answer."""
        self._context.destroy(linger=0)

    def _send(self) -> None:
        for address, reads in self._unsent.items():
            number = next(self._numbers)
            question = _Question(number, [read.leg_id for read in reads])
            verb = _QUESTION_VERB + msgspec.msgpack.encode(question)
            message = msgspec.msgpack.encode((verb, _RANK, _RANK))
            self._asked[number] = _Asked(tuple(reads), self._clock() + self._deadline_s)
            try:
                self._connected(address).send_multipart((b"", message), flags=zmq.DONTWAIT)
            except zmq.ZMQError as error:  # it stays without an answer
                logger.warning("side channel %s: cannot ask it: %s", address, error)
        self._unsent.clear()

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        if (socket := self._sockets.pop(address, None)) is None:
            socket = self._context.socket(zmq.DEALER)
            _prepare(socket, address)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
        self._sockets[address] = socket  # those asked last come last
        if len(self._sockets) > _KEPT_CONNECTIONS:
            oldest = self._sockets.pop(next(iter(self._sockets)))
            self._poller.unregister(oldest)
            oldest.close()
        return socket

    def _receive(self, socket: zmq.Socket[bytes], found: dict[str, bool]) -> None:
        while socket.poll(0):
            parts = socket.recv_multipart()
            try:
                told = _answer_decoder.decode(parts[1])
            except (IndexError, msgspec.MsgspecError, RecursionError):
                logger.warning("a side channel does not know of leases: not of this baton")
                continue
            asked = self._asked.pop(told.number, None)
            if asked is None:
                continue
            if len(told.kept) != len(asked.reads):
                found.update((read.request_id, False) for read in asked.reads)
                continue
            for read, kept in zip(asked.reads, told.kept, strict=True):
                found[read.request_id] = kept

    def _give_up(self, found: dict[str, bool]) -> None:
        now_s = self._clock()
        for number, asked in tuple(self._asked.items()):
            if asked.due_at_s > now_s:
                return
            del self._asked[number]
            found.update((read.request_id, False) for read in asked.reads)


def _prepare(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
