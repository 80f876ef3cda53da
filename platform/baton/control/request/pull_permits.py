"""How many pulls an engine has under way at a time."""

from __future__ import annotations


class PullPermits:
    """Counts pulls against a limit. A pull that lasts too long does not count any more.

    It may never end, and the others must not wait for it. Times are on the caller's clock.
    """

    def __init__(self, *, limit: int | None, max_pull_s: float) -> None:
        self._limit = limit
        self._max_pull_s = max_pull_s
        self._expires_at_s: dict[str, float] = {}
        """In the order in which they began, so the soonest first."""

    def can_begin(self, now_s: float) -> bool:
        """Whether one more pull may begin."""
        if self._limit is None:
            return True
        while self._expires_at_s:
            leg_id, expires_at_s = next(iter(self._expires_at_s.items()))
            if expires_at_s > now_s:
                break
            del self._expires_at_s[leg_id]
        return len(self._expires_at_s) < self._limit

    @property
    def next_at_s(self) -> float | None:
        """When a pull stops to count though it has not ended; None when none counts."""
        return next(iter(self._expires_at_s.values()), None)

    def begin(self, leg_id: str, now_s: float) -> None:
        """A leg begins to pull."""
        if self._limit is not None:
            self._expires_at_s[leg_id] = now_s + self._max_pull_s

    def end(self, leg_id: str) -> None:
        """Its pull has ended, one way or another; unknown legs are ignored."""
        self._expires_at_s.pop(leg_id, None)
