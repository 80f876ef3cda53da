"""When one role's need is followed: up at once, down when that is worth going back on."""

from __future__ import annotations

import math

from baton.policy.scaling.estimators.windows import SlidingMax

_ROUNDING = 1e-6
_SMALL_POOL_HEADROOM_REPLICAS = 0.6
"""Enough that a need which wavers about a whole number does not stop and start one."""
_LARGE_POOL_FRACTION = 0.5
"""Of the headroom fraction: the sampling error of a large rate is small, but the rate itself moves.
"""


class NeedStabilizer:
    """Follows one need, in replicas.

    Theory of operation. The target goes up to the need at once. It goes down to the greatest need
    of the last `window_s`, and a little headroom, so that stopped replicas are not needed again.
    After a growth, it goes down only when enough has been to spare since all of it was last needed.
    The spare share of the pool, added up over time, has to come to `min_surplus_s` and one cold
    start, the price of stopping too soon. So a quarter too many is kept four times as long as all
    too many. A need that goes up and down quickly is followed up only, and a need that falls for
    good is followed down without more pauses.

    Source: the surplus that is waited for is the rent of ski rental (Karlin et al., Competitive
    snoopy caching, 1988). To pay as much for waiting as for reverting a change is never more than
    twice the cost of an optimal choice.
    """

    def __init__(self, window_s: float, *, headroom_fraction: float, min_surplus_s: float) -> None:
        self._headroom = headroom_fraction
        self._min_surplus_s = min_surplus_s
        self._window_s = window_s
        self._needs = SlidingMax(window_s)
        self._current: int | None = None
        self._at_s: float | None = None
        self._is_falling = False
        self._surplus_s = 0.0
        self.kept_for_s: float | None = None
        """How long the last target keeps replicas that are to spare, if nothing changes; None where
        it keeps none."""

    def target(self, at_s: float, *, current: int, need: float, cold_start_s: float = 0.0) -> int:
        """How many to have now."""
        elapsed_s = 0.0 if self._at_s is None else max(0.0, at_s - self._at_s)
        elapsed_s = min(elapsed_s, self._window_s)  # an unseen surplus does not count
        self._at_s = at_s
        self._record_change(current)
        self.kept_for_s = None
        need_with_headroom = need + headroom_replicas(need, self._headroom)
        stabilized = max(
            whole_replicas(need), whole_replicas(self._needs.push(at_s, need_with_headroom))
        )
        if whole_replicas(need) > current:
            return whole_replicas(need)
        if stabilized >= current:
            self._surplus_s = 0.0  # all of it was needed again
            return current
        spare_fraction = (current - stabilized) / current
        self._surplus_s += elapsed_s * spare_fraction
        missing_s = self._min_surplus_s + cold_start_s - self._surplus_s
        if self._is_falling or missing_s <= 0:
            return stabilized
        self.kept_for_s = missing_s / spare_fraction
        return current

    def _record_change(self, current: int) -> None:
        """Note the direction of the last change, by any cause."""
        if self._current is not None and current != self._current:
            self._is_falling, self._surplus_s = current < self._current, 0.0
        self._current = current


def headroom_replicas(need: float, fraction: float) -> float:
    """The headroom that a role keeps when it gives a replica away, in replicas.

    Of a need of 2, 4, 6 and 40 with the fraction 0.2, these are 0.4, 0.6, 0.6 and 4.
    """
    return min(
        fraction * need,
        max(_SMALL_POOL_HEADROOM_REPLICAS, _LARGE_POOL_FRACTION * fraction * need),
    )


def whole_replicas(need: float) -> int:
    """A need in whole replicas."""
    return math.ceil(need - _ROUNDING)
