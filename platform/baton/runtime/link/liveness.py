"""How long a peer has sent nothing, while this process could have received it.

When this process did not run for a while, messages of that time have still to be read. Peers get
half a timeout for that, at most once in a timeout. On a busy machine a process is late again and
again: without that limit a dead peer would live on.

Where nothing is in flight both ends *rest*: they send fewer heartbeats, and the timeout is longer.
That ends as soon as there is work.
"""

from __future__ import annotations


class HeartbeatMonitor:
    """Liveness of one peer. A timeout of 2 s ends after 2 s, or 3 s after a stall."""

    __slots__ = (
        "_current_timeout_s",
        "_grace_used",
        "_idle_extra_s",
        "_last_beat_at_s",
        "_timeout_s",
    )

    def __init__(self, timeout_s: float, now_s: float, *, idle_extra_s: float) -> None:
        """`idle_extra_s`: how much longer the timeout of an idle peer is."""
        self._timeout_s = self._current_timeout_s = timeout_s
        self._idle_extra_s = idle_extra_s
        self.beat(now_s)

    def beat(self, now_s: float) -> None:
        """A message of the peer arrived."""
        self._last_beat_at_s = now_s
        self._grace_used = False

    def set_idle(self) -> None:
        """Nothing is in flight with the peer."""
        self._current_timeout_s = self._timeout_s + self._idle_extra_s

    def set_busy(self, now_s: float) -> None:
        """The peer has work from now on; its idle time does not count."""
        if self._current_timeout_s > self._timeout_s:
            self._current_timeout_s = self._timeout_s
            self._last_beat_at_s = min(now_s, self._last_beat_at_s + self._idle_extra_s)

    def expired(self, now_s: float, *, stalled: bool) -> bool:
        """Whether the peer timed out; `stalled`: this process did not run just before."""
        grace_from_s = now_s - self._current_timeout_s + self._timeout_s / 2
        if stalled and not self._grace_used and self._last_beat_at_s < grace_from_s:
            self._last_beat_at_s = grace_from_s
            self._grace_used = True
        return now_s - self._last_beat_at_s > self._current_timeout_s
