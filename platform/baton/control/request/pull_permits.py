"""How many pulls an engine has under way at a time."""

from __future__ import annotations


class PullPermits:
    """Counts pulls against a limit. A pull that lasts too long does not count any more.

    It may never end, and the others must not wait for it. Times are on the caller's clock.
    """

    def __init__(self, *, limit: int | None, pull_s: float) -> None:
        self._limit = limit
        self._pull_s = pull_s
        self._counts_until_s: dict[str, float] = {}
        """In the order in which they began, so the soonest first."""

    def may_begin(self, now_s: float) -> bool:
        """Whether one more pull may begin."""
        if self._limit is None:
            return True
        while self._counts_until_s:
            leg_id, until_s = next(iter(self._counts_until_s.items()))
            if until_s > now_s:
                break
            del self._counts_until_s[leg_id]
        return len(self._counts_until_s) < self._limit

    @property
    def next_at_s(self) -> float | None:
        """When a pull stops to count though it has not ended; None when none counts."""
        return next(iter(self._counts_until_s.values()), None)

    def begin(self, leg_id: str, now_s: float) -> None:
        """A leg begins to pull."""
        if self._limit is not None:
            self._counts_until_s[leg_id] = now_s + self._pull_s

    def end(self, leg_id: str) -> None:
        """Its pull has ended, one way or another; unknown legs are ignored."""
        self._counts_until_s.pop(leg_id, None)
