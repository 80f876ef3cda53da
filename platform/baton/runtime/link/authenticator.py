"""Who stands before a replica's link: lets coordinators in, and counts and tells who is not one.

Theory of operation: ZMQ asks about each connection that knows the replicas' public key, over a
socket inside the process (ZAP, ZMQ's RFC 27), whether the other side's public key is a good one.
Whoever does not get that far fails the handshake: garbage, no key, a wrong one, another program, a
recording, or silence for `handshake_s`. Both are dealt with on the event loop that the link lives
on. A stranger costs one count, and one line a minute for all.

ZMQ tells through a *monitor* of connections that come and go, by their descriptors, and of
handshakes that succeed, without saying whose; of some that fail it says nothing. So strangers are
who came, less those who succeeded, less those who may still be at it: who came lately and are still
there. That is too few for a moment after a coordinator has come, and never too many.
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
_ASKED_AT: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_QUESTION_PARTS: Final = 9
"""Who asks, nothing, version, number, domain, address, routing id, mechanism, public key."""
_SAY_AGAIN_S: Final = 60.0
_BATCH: Final = 256


class Gate:
    """Watches one link socket that is not bound yet; with keys, says who may speak on it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        guarded: zmq.Socket[bytes],
        *,
        options: LinkOptions,
        counters: LinkCounters,
    ) -> None:
        self._guarded = guarded
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._patience_s = 2 * options.handshake_s
        """After this, who is still there has succeeded: others were hung up on in half of it."""
        self._came = 0
        self._succeeded = 0
        self._young: dict[int, float] = {}
        """Connections by descriptor, and when they came; the oldest first."""
        self._recount: asyncio.TimerHandle | None = None
        self._unsaid = 0
        self._say_from_s = self._loop.time()
        self._closed = False
        self._questions: Channel | None = None
        if options.keys is not None:
            self._questions = self._ask_here(context, options.keys, options)
        self._monitor = guarded.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    # ------------------------------------------------------------------ who may speak

    def _ask_here(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: FleetKeys, options: LinkOptions
    ) -> Channel:
        wanted = keys.coordinator_public
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ASKED_AT)

        def answer(parts: list[bytes]) -> None:
            channel.send(_answered(parts, wanted))

        # Questions are no frames: they have counters of their own, which nobody reads.
        channel = Channel(
            socket, answer, batch_frames=options.batch_frames, counters=LinkCounters()
        )
        return channel

    # ------------------------------------------------------------------ who may not

    def _drain(self) -> None:
        """Take what the monitor says: one batch now, the rest in the loop's next turn."""
        if self._closed:
            return
        try:
            for _ in range(_BATCH):
                said = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._take(said["event"], int(said["value"]))
        except zmq.Again:
            self._count()
        else:
            self._loop.call_soon(self._drain)

    def _take(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._succeeded += 1
            return
        self._young.pop(descriptor, None)
        if event == zmq.EVENT_ACCEPTED:
            self._came += 1
            self._young[descriptor] = self._loop.time()

    def _count(self) -> None:
        now_s = self._loop.time()
        while self._young and self._oldest_s() + self._patience_s <= now_s:
            del self._young[next(iter(self._young))]
        new = self._came - self._succeeded - len(self._young) - self._counters.strangers
        if new > 0:
            self._counters.strangers += new
            self._say(new, now_s)
        if self._young and self._recount is None:
            self._recount = self._loop.call_at(self._oldest_s() + self._patience_s, self._again)

    def _oldest_s(self) -> float:
        return next(iter(self._young.values()))

    def _again(self) -> None:
        self._recount = None
        self._count()

    def _say(self, new: int, now_s: float) -> None:
        self._unsaid += new
        if now_s >= self._say_from_s:
            log_event(_LOG, logging.WARNING, "stranger_refused", {"strangers": self._unsaid})
            self._unsaid, self._say_from_s = 0, now_s + _SAY_AGAIN_S

    def close(self) -> None:
        """Stop watching; to be called before the guarded socket is closed. Idempotent."""
        if self._closed:
            return
        self._drain()  # a full monitor would hold up ZMQ, which then could not be told to stop
        self._closed = True
        if self._recount is not None:
            self._recount.cancel()
        self._loop.remove_reader(self._fd)
        self._guarded.disable_monitor()
        self._monitor.close(linger=0)
        if self._questions is not None:
            self._questions.close()


def _answered(question: list[bytes], wanted: bytes) -> list[bytes]:
    """The answer to one question of ZMQ's: whether that public key is the wanted one."""
    good = (
        len(question) == _QUESTION_PARTS
        and question[7] == b"CURVE"
        and hmac.compare_digest(z85(question[8]), wanted)
    )
    asker, number = question[0], question[3] if len(question) > 3 else b""  # noqa: PLR2004
    status = (b"200", b"") if good else (b"400", b"not a coordinator of this deployment")
    return [asker, b"", _VERSION, number, *status, b"", b""]
