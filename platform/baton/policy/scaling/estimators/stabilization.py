"""When one role's need is followed: up at once, down when that is worth going back on."""

from __future__ import annotations

import math

from baton.policy.scaling.estimators.windows import SlidingMax

_ROUNDING = 1e-6
_MOST_HEADROOM = 0.5
"""Replicas: enough that a need which wavers about a whole number does not stop and start one."""


class Track:
    """Follows one need, in replicas.

    Theory of operation. What is had goes up to the need at once. It goes down to the greatest need
    of the last `window_s`, and a little headroom: what is stopped must not be wanted back. And
    while the last change was upwards, only when enough has been to spare since all of it was last
    needed: the spare share of the pool, added up over time, has to come to `patience_s` and one
    cold start, which is paid for again by who stops too soon. So a quarter too many is kept four
    times as long as all too many, a need that goes up and down quickly is followed up only, and one
    that falls for good is followed down without more pauses.

    Source: the surplus that is waited for is the rent of ski rental (Karlin et al., Competitive
    snoopy caching, 1988): paying as much for waiting as going back on a change would cost is never
    more than twice what knowing the future would.
    """

    def __init__(self, window_s: float, *, headroom_fraction: float, patience_s: float) -> None:
        self._headroom = headroom_fraction
        self._patience_s = patience_s
        self._window_s = window_s
        self._needs = SlidingMax(window_s)
        self._have: int | None = None
        self._at_s: float | None = None
        self._falling = False
        self._spare_s = 0.0

    def target(self, at_s: float, *, have: int, need: float, cold_start_s: float = 0.0) -> int:
        """How many to have now."""
        passed_s = 0.0 if self._at_s is None else max(0.0, at_s - self._at_s)
        passed_s = min(passed_s, self._window_s)  # what was not seen was not to spare
        self._at_s = at_s
        self._note(have)
        raised = need + min(self._headroom * need, _MOST_HEADROOM)
        kept = max(whole(need), whole(self._needs.push(at_s, raised)))
        if whole(need) > have:
            return whole(need)
        if kept >= have:
            self._spare_s = 0.0  # all of it was needed again
            return have
        self._spare_s += passed_s * (have - kept) / have
        waited = self._spare_s >= self._patience_s + cold_start_s
        return kept if self._falling or waited else have

    def _note(self, have: int) -> None:
        """See which way the last change went, whoever made it."""
        if self._have is not None and have != self._have:
            self._falling, self._spare_s = have < self._have, 0.0
        self._have = have


def whole(need: float) -> int:
    """A need in whole replicas."""
    return math.ceil(need - _ROUNDING)
