"""How long a request waits for a replica where the fleet has none, and when one is expected.

*Theory of operation.* A fleet at zero gets a replica because a request waits for one. That request
has to wait for a cold start, which takes far longer than any queue. The controller reports how long
starts take, and when one is under way, how long it takes yet (`ColdStartReported`). Until then, a
start is taken to begin when the first request waits. All of these are predictions: a start that is
overdue is expected within a part of what starts take.
"""

from __future__ import annotations

from baton.domain.demand import ColdStart

_OVERDUE = 0.1
"""Of a cold start: so soon one is expected that should be over. Of 60 s these are 6 s."""


class ColdWait:
    """One coordinator's waits for the first replica."""

    def __init__(self, most_s: float | None) -> None:
        self.most_s = most_s
        """How long a request waits at most; None: nobody starts a replica because of it."""
        self._start = ColdStart()
        self._told_at_s: float | None = None
        self._asked_at_s: float | None = None
        self.was_up = False
        """Whether there was a replica, or the fleet rests without one."""

    def told(self, start: ColdStart, now_s: float) -> None:
        """Take in what is known of starts. What was measured once is not replaced by a guess."""
        if self._start.measured and not start.measured:
            start = start._replace(takes_s=self._start.takes_s, measured=True)
        self._start, self._told_at_s = start, now_s
        self.was_up = self.was_up or (start.can_start and start.left_s is None)

    def asked(self, now_s: float) -> None:
        """A request begins to wait, which has a replica started."""
        if self._asked_at_s is None:
            self._asked_at_s = now_s

    def came(self) -> None:
        """A replica is there."""
        self.was_up, self._asked_at_s = True, None
        self._start = self._start._replace(left_s=None)

    @property
    def wakes(self) -> bool:
        """Whether a request that waits has a replica started."""
        return self.most_s is not None and self._start.can_start

    @property
    def expects(self) -> bool:
        """Whether a replica is on its way, or will be when a request waits for it."""
        return self.wakes or self._start.left_s is not None

    def left_s(self, now_s: float) -> float:
        """How long until the first replica is expected."""
        takes_s, left_s = self._start.takes_s, self._start.left_s
        if left_s is not None and self._told_at_s is not None:
            left_s -= now_s - self._told_at_s
        elif self._asked_at_s is not None:
            left_s = takes_s - (now_s - self._asked_at_s)
        else:
            left_s = takes_s
        return max(left_s, _OVERDUE * takes_s)

    def waits_s(self, now_s: float) -> float:
        """How long a request that comes now waits for it; 0 where that would be in vain."""
        if self.most_s is None or not self.wakes:
            return 0.0
        is_known = self._start.measured or self._start.left_s is not None
        return 0.0 if is_known and self.left_s(now_s) > self.most_s else self.most_s
