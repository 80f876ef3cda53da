"""For how long a peer has said nothing, while this process could have heard it.

When this process did not run for a while, what its peers said meanwhile has still to be read: they
get half a liveness for that, once in a silence. Once, because on a busy machine a process is late
again and again, and forgiving each time would make a dead peer live on.

Where nothing is under way both ends *rest*: they speak less often, and are borne with for as much
longer. That ends when there is something to do: from then on a peer has what others have.
"""

from __future__ import annotations


class Silence:
    """One peer's. With a liveness of 2 s it is too long after 2 s, and after 3 s at the latest."""

    __slots__ = ("_bearable_s", "_heard_at_s", "_liveness_s", "_pardoned", "_rest_s")

    def __init__(self, liveness_s: float, now_s: float, *, rest_s: float) -> None:
        """`rest_s`: for how much longer who rests may be silent."""
        self._liveness_s = self._bearable_s = liveness_s
        self._rest_s = rest_s
        self.broken(now_s)

    def broken(self, now_s: float) -> None:
        """The peer has said something."""
        self._heard_at_s = now_s
        self._pardoned = False

    def rests(self) -> None:
        """The peer has nothing to do with us for now."""
        self._bearable_s = self._liveness_s + self._rest_s

    def works(self, now_s: float) -> None:
        """There is something to do from now on; what it did not say at rest is no silence."""
        if self._bearable_s > self._liveness_s:
            self._bearable_s = self._liveness_s
            self._heard_at_s = min(now_s, self._heard_at_s + self._rest_s)

    def too_long(self, now_s: float, *, stalled: bool) -> bool:
        """Whether to give the peer up; `stalled`: this process did not run just before."""
        due_s = now_s - self._bearable_s + self._liveness_s / 2
        if stalled and not self._pardoned and self._heard_at_s < due_s:
            self._heard_at_s = due_s
            self._pardoned = True
        return now_s - self._heard_at_s > self._bearable_s
