"""A ZMQ socket on an event loop: sends never wait, and arrived messages are drained in batches.

Theory of operation: ZMQ signals a socket's file descriptor on an *edge*: after any call on the
socket the descriptor may give no signal although messages wait. So every wakeup drains until ZMQ
says "again", and every send checks for messages. A drain takes at most `batch_frames` messages
before others get their turn. There is no task, future or await per message.

Checking a socket costs more than receiving a small message, and in a large fleet most messages come
alone. So a signal is answered by a receive, and with a fixed number of parts there is no check for
more parts. A peer that sends another number shifts the following messages; a reader of `parts`
parts must detect that by their content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.runtime.link.keys import ENCRYPTION_OVERHEAD_BYTES
from baton.runtime.link.options import LinkCounters, LinkOptions

# As plain numbers: flags of enumerations are put together anew, by Python, for each message.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK


class SendResult(StrEnum):
    """The result of a send."""

    QUEUED = "queued"
    QUEUE_FULL = "queue_full"
    """The bounded queue has no room."""
    NOT_CONNECTED = "not_connected"
    """The peer is not connected."""


def configure(socket: zmq.Socket[bytes], address: str, options: LinkOptions) -> None:
    """Set a link socket's bounds, timeouts and keys; brackets in `address` mean IPv6."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.SNDHWM, options.queue_frames)
    socket.setsockopt(zmq.RCVHWM, options.queue_frames)
    # ZMQ looks at a part as it is on the wire.
    wire_bytes = options.max_part_bytes + (
        ENCRYPTION_OVERHEAD_BYTES if options.keys is not None else 0
    )
    socket.setsockopt(zmq.MAXMSGSIZE, wire_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(options.handshake_s))
    socket.setsockopt(zmq.RECONNECT_IVL, _ms(options.reconnect_s))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(options.reconnect_max_s))
    if options.keys is not None:
        options.keys.apply_curve(socket)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def try_send(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> SendResult:
    """Queue a message if there is room now."""
    *first, last = parts
    try:
        for part in first:
            socket.send(part, _MORE)
        socket.send(last, _NOBLOCK)
    except zmq.Again:
        return SendResult.QUEUE_FULL
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return SendResult.NOT_CONNECTED
    return SendResult.QUEUED


def _receive_all_parts(socket: zmq.Socket[bytes]) -> list[bytes]:
    parts, more = [], True
    while more:  # a message is there as a whole; asking the socket for more costs more
        part = socket.recv(_NOBLOCK, copy=False)
        parts.append(part.bytes)
        more = part.more
    return parts


def _fixed_parts_receiver(count: int) -> Callable[[zmq.Socket[bytes]], list[bytes]]:
    def receive_parts(socket: zmq.Socket[bytes]) -> list[bytes]:
        parts = [socket.recv(_NOBLOCK)]
        with suppress(zmq.Again):  # it has fewer
            while len(parts) < count:
                parts.append(socket.recv(_NOBLOCK))
        return parts

    return receive_parts


class Channel:
    """A link socket whose messages are handed to `on_message`, part by part and in order."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        *,
        batch_frames: int,
        counters: LinkCounters,
        parts: int | None = None,
    ) -> None:
        """`parts`: how many each message has; None: any number."""
        self._socket = socket
        self._receive_parts = _receive_all_parts if parts is None else _fixed_parts_receiver(parts)
        self._on_message = on_message
        self._batch_frames = batch_frames
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_scheduled = False
        self._closed = False
        self._loop.add_reader(self._fd, self._on_signal)
        self._schedule_drain()

    def send(self, parts: Sequence[bytes]) -> SendResult:
        """Queue a message, or say why not."""
        if self._closed:
            return SendResult.NOT_CONNECTED
        result = try_send(self._socket, parts)
        if result is SendResult.QUEUE_FULL:
            # ZMQ may have missed the room that its I/O thread has freed; asking makes it look.
            self._has_message()
            result = try_send(self._socket, parts)
        if result is SendResult.QUEUED:
            self._counters.frames_out += 1
            self._counters.bytes_out += sum(map(len, parts))
        elif result is SendResult.QUEUE_FULL:
            self._counters.overloaded += 1
        if self._has_message():
            self._schedule_drain()
        return result

    def drain(self) -> None:
        """Hand over arrived messages: one batch now, the rest in the loop's next turn."""
        self._drain_scheduled = False
        if not self._closed and self._has_message():
            self._dispatch_batch()

    def _on_signal(self) -> None:
        if not self._closed:
            self._dispatch_batch()

    def _dispatch_batch(self) -> None:
        has_more = True
        try:
            for _ in range(self._batch_frames):
                if not self._receive() or self._closed or not self._has_message():
                    has_more = False
                    break
        finally:
            # Also when the consumer raised: the edge has been used up and will not come again.
            if has_more:
                self._schedule_drain()

    def _receive(self) -> bool:
        try:
            parts = self._receive_parts(self._socket)
        except zmq.Again:
            return False
        self._counters.frames_in += 1
        self._counters.bytes_in += sum(map(len, parts))
        self._on_message(parts)
        return True

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._loop.call_soon(self.drain)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close the socket; ZMQ sends queued messages for up to `linger_s`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=round(linger_s * 1000))


class ConnectionMonitor:
    """Reports when a connecting socket's connection is up, and when it breaks."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        self._monitored_socket = socket
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._socket = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._socket, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_connected()
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnected()

    def close(self) -> None:
        """Stop watching; call before the watched socket is closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._monitored_socket.disable_monitor()
        self._socket.close(linger=0)
