"""For how long a peer has said nothing, while this process could have heard it.

When this process did not run for a while, its peers' messages of that time have still to be read.
They get half a liveness for that, once in a timeout. Once, because on a busy machine a process is
late again and again, and forgiving each time would make a dead peer live on.

Where nothing is under way both ends *rest*: they speak less often, and are borne with for as much
longer. That ends when there is something to do: from then on a peer has what others have.
"""

from __future__ import annotations


class HeartbeatMonitor:
    """One peer's. With a liveness of 2 s it is too long after 2 s, and after 3 s at the latest."""

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
        """The peer has said something."""
        self._last_beat_at_s = now_s
        self._grace_used = False

    def set_idle(self) -> None:
        """The peer has nothing to do with us for now."""
        self._current_timeout_s = self._timeout_s + self._idle_extra_s

    def set_busy(self, now_s: float) -> None:
        """The peer has work from now on; its idle time does not count against it."""
        if self._current_timeout_s > self._timeout_s:
            self._current_timeout_s = self._timeout_s
            self._last_beat_at_s = min(now_s, self._last_beat_at_s + self._idle_extra_s)

    def expired(self, now_s: float, *, stalled: bool) -> bool:
        """Whether to give the peer up; `stalled`: this process did not run just before."""
        grace_from_s = now_s - self._current_timeout_s + self._timeout_s / 2
        if stalled and not self._grace_used and self._last_beat_at_s < grace_from_s:
            self._last_beat_at_s = grace_from_s
            self._grace_used = True
        return now_s - self._last_beat_at_s > self._current_timeout_s
