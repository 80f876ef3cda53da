"""Requests that are not under way: those that wait for a replica, and those that wait their turn.

*Theory of operation.* In `queue` are those that no replica can take, in order of arrival; all of
them are tried when somebody joins. In `admittance.holding` are those that replicas could take, but
shall not yet; only the first of them is tried, when capacity may have come free: a leg ended, a
load was reported, somebody joined, or so much time has passed as the last try said. Together they
are bounded. A try costs a placement, so after one that let nobody in the next comes `_PAUSE_S`
later at the earliest, however much happens.
"""

from __future__ import annotations

from baton.control.queue.admission_controller import Admittance
from baton.control.state.request_state import Entry

_PAUSE_S = 0.005
"""Two hundred tries per second at most: at 0.2 ms for one, 4 % of the time."""
_LOOK_S = 0.05
"""What comes free without being told comes to light so soon."""
_UNKNOWN = object()
_LEAST_RETRY_S = 1.0
"""HTTP's Retry-After is in whole seconds."""


class Waiters:
    """Who waits, and when to try again."""

    def __init__(self, admittance: Admittance) -> None:
        self.admittance = admittance
        self.queue: dict[str, None] = {}
        """Those that wait for a replica."""
        self.retry_at_s: float | None = None
        """When all of those are tried again; None: when a replica joins."""
        self.try_at_s: float | None = None
        """When the first of those that wait their turn is tried; None: when something happens."""
        self._failed_at_s = float("-inf")

    def __len__(self) -> int:
        return len(self.queue) + len(self.admittance.holding)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.queue or request_id in self.admittance.holding

    def ids(self) -> list[str]:
        """Everyone who waits."""
        return [*self.queue, *self.admittance.holding]

    def let_in(self, entry: Entry, now_s: float) -> None:
        """Somebody is about to be placed."""
        self._leave_queue(entry, now_s)
        self.admittance.let_in(entry, now_s)
        self._rest()

    def hold(self, entry: Entry, now_s: float) -> None:
        """Somebody waits for its turn, and may be the first in line."""
        self._leave_queue(entry, now_s)
        self.admittance.hold(entry, now_s)
        self.came_free(now_s)

    def leave(self, entry: Entry, now_s: float) -> None:
        """Somebody has ended, whether it waited or not."""
        self._leave_queue(entry, now_s)
        self.admittance.leave(entry, now_s)
        self._rest()

    def next_at_s(self) -> float | None:
        """When somebody is to be tried again at the latest."""
        if self.try_at_s is None or self.retry_at_s is None:
            return self.retry_at_s if self.try_at_s is None else self.try_at_s
        return min(self.try_at_s, self.retry_at_s)

    def came_free(self, now_s: float) -> None:
        """Somebody may have a place now: the first is tried at once, or after the pause."""
        at_s = max(now_s, self._failed_at_s + _PAUSE_S)
        if self.try_at_s is None or at_s < self.try_at_s:
            self.try_at_s = at_s

    def try_anew(self) -> None:
        """Rules are others now: whoever waits is tried with the next event."""
        if self.admittance.holding:
            self.try_at_s = float("-inf")

    def first_due(self, now_s: float) -> str | None:
        """Who is to be tried now; None when nobody is."""
        if self.try_at_s is None or now_s < self.try_at_s:
            return None
        first = self.admittance.holding.head()
        self.try_at_s = None if first is None else now_s
        return first

    def tried(self, now_s: float, *, again_in_s: float = 0.0) -> None:
        """The first could not be let in; it may be after so long, or when something comes free."""
        self._failed_at_s = now_s
        self.try_at_s = now_s + min(max(again_in_s or _LOOK_S, _PAUSE_S), _LOOK_S)

    def retry_after_s(self, *, otherwise_s: float) -> float:
        """When a client may come back for whom there is no room: once those who wait had turns."""
        return max(_LEAST_RETRY_S, self.admittance.drained_s() or otherwise_s)

    def _leave_queue(self, entry: Entry, now_s: float) -> None:
        if self.queue.pop(entry.request_id, _UNKNOWN) is None:
            entry.end_replica_wait(now_s)

    def _rest(self) -> None:
        """With nobody left to try no time is due: a body would wake up for it for ever."""
        if not self.admittance.holding:
            self.try_at_s = None

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        self.admittance.check_integrity()
        both = [one for one in self.queue if one in self.admittance.holding]
        assert not both, f"{both} wait for a replica and for their turn"
        tries = self.try_at_s is not None
        assert tries == bool(self.admittance.holding), "somebody is not tried, or nobody is"
