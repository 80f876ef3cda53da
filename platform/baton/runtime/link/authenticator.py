"""Authentication at a replica's link: lets coordinators in, and counts and reports other peers.

Theory of operation: for each connection that knows the replicas' public key, ZMQ asks over an
in-process socket whether the peer's public key is valid (ZAP, ZMQ's RFC 27). Other peers fail the
handshake, or send nothing for `handshake_s`. An unauthenticated peer costs one count, and one log
line a minute for all.

ZMQ's *monitor* reports connections by descriptor, and successful handshakes without a descriptor;
it does not report every failure. So unauthenticated peers = connections - successes - recent
connections that still exist. For a moment after a coordinator connects that is too few, and it is
never too many.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import encode as z85

from baton.runtime.link.channel import Channel
from baton.runtime.link.keys import FleetKeys
from baton.runtime.link.options import LinkCounters, LinkOptions
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ZAP_REQUEST_PARTS: Final = 9
"""Peer, empty, version, id, domain, address, routing id, mechanism, public key."""
_LOG_INTERVAL_S: Final = 60.0
_BATCH: Final = 256


class ZapAuthenticator:
    """Watches one link socket that is not bound yet; with keys, admits coordinators."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        link_socket: zmq.Socket[bytes],
        *,
        options: LinkOptions,
        counters: LinkCounters,
    ) -> None:
        self._link_socket = link_socket
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._handshake_limit_s = 2 * options.handshake_s
        """A connection that is older has succeeded: ZMQ closes others after half of it."""
        self._accepted = 0
        self._succeeded = 0
        self._handshaking: dict[int, float] = {}
        """Start of each connection by descriptor, the oldest first."""
        self._recount_timer: asyncio.TimerHandle | None = None
        self._unlogged = 0
        self._next_log_at_s = self._loop.time()
        self._closed = False
        self._zap_channel: Channel | None = None
        if options.keys is not None:
            self._zap_channel = self._open_zap_channel(context, options.keys, options)
        self._monitor = link_socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    # ------------------------------------------------------------------ authentication

    def _open_zap_channel(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: FleetKeys, options: LinkOptions
    ) -> Channel:
        expected_key = keys.coordinator_public
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ZAP_ENDPOINT)

        def answer(parts: list[bytes]) -> None:
            channel.send(_zap_reply(parts, expected_key))

        # Questions are no frames: they have counters of their own, which are not read.
        channel = Channel(
            socket, answer, batch_frames=options.batch_frames, counters=LinkCounters()
        )
        return channel

    # ------------------------------------------------------------------ who may not

    def _drain(self) -> None:
        """Take one batch from the monitor; the rest follows in the loop's next turn."""
        if self._closed:
            return
        try:
            for _ in range(_BATCH):
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._on_monitor_event(event["event"], int(event["value"]))
        except zmq.Again:
            self._count_rejected()
        else:
            self._loop.call_soon(self._drain)

    def _on_monitor_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._succeeded += 1
            return
        self._handshaking.pop(descriptor, None)
        if event == zmq.EVENT_ACCEPTED:
            self._accepted += 1
            self._handshaking[descriptor] = self._loop.time()

    def _count_rejected(self) -> None:
        now_s = self._loop.time()
        while self._handshaking and self._oldest_at_s() + self._handshake_limit_s <= now_s:
            del self._handshaking[next(iter(self._handshaking))]
        rejected = (
            self._accepted
            - self._succeeded
            - len(self._handshaking)
            - self._counters.rejected_connections
        )
        if rejected > 0:
            self._counters.rejected_connections += rejected
            self._log_rejected(rejected, now_s)
        if self._handshaking and self._recount_timer is None:
            self._recount_timer = self._loop.call_at(
                self._oldest_at_s() + self._handshake_limit_s, self._on_recount_timer
            )

    def _oldest_at_s(self) -> float:
        return next(iter(self._handshaking.values()))

    def _on_recount_timer(self) -> None:
        self._recount_timer = None
        self._count_rejected()

    def _log_rejected(self, rejected: int, now_s: float) -> None:
        self._unlogged += rejected
        if now_s >= self._next_log_at_s:
            log_event(_LOG, logging.WARNING, "stranger_refused", {"strangers": self._unlogged})
            self._unlogged, self._next_log_at_s = 0, now_s + _LOG_INTERVAL_S

    def close(self) -> None:
        """Stop watching; call before the guarded socket is closed. Idempotent."""
        if self._closed:
            return
        self._drain()  # a full monitor would hold up ZMQ, which then could not be stopped
        self._closed = True
        if self._recount_timer is not None:
            self._recount_timer.cancel()
        self._loop.remove_reader(self._fd)
        self._link_socket.disable_monitor()
        self._monitor.close(linger=0)
        if self._zap_channel is not None:
            self._zap_channel.close()


def _zap_reply(request: list[bytes], expected_key: bytes) -> list[bytes]:
    """The answer to one ZAP request: whether its public key is the expected one."""
    is_allowed = (
        len(request) == _ZAP_REQUEST_PARTS
        and request[7] == b"CURVE"
        and hmac.compare_digest(z85(request[8]), expected_key)
    )
    requester, request_id = request[0], request[3] if len(request) > 3 else b""  # noqa: PLR2004
    status = (b"200", b"") if is_allowed else (b"400", b"not a coordinator of this deployment")
    return [requester, b"", _ZAP_VERSION, request_id, *status, b"", b""]
