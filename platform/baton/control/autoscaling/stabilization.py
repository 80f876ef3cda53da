"""How far one pool may change now: its bounds, its pauses, and starts that do not come up."""

from __future__ import annotations

import math

from baton.policy.scaling.observation import PoolObservation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds

STUCK_COLD_STARTS = 3.0
"""A start that takes three times as long as starts do is not waited for by starting more."""
_LEAST_STUCK_S = 30.0
"""Cold starts of engines that need almost none vary by more than a factor."""


class PoolPace:
    """What is remembered of one pool from tick to tick."""

    def __init__(self) -> None:
        self._changed_at_s: float | None = None
        self._starting = self._ready = 0
        self._waits_since_s: float | None = None
        """When the replicas that are starting were asked for, or one of them last became ready."""

    def watch(self, pool: PoolObservation, at_s: float) -> None:
        """Take note of how starts get on.

        Where one is asked for as soon as another becomes ready, as many are starting as before.
        """
        came = pool.starting < self._starting or pool.ready > self._ready
        if pool.starting <= 0:
            self._waits_since_s = None
        elif self._waits_since_s is None or came:
            self._waits_since_s = at_s
        self._starting, self._ready = pool.starting, pool.ready

    def changed(self, at_s: float) -> None:
        """Replicas were asked for, or stopped."""
        self._changed_at_s = at_s

    def set_back(self, at_s: float) -> None:
        """The clock went back to `at_s`: nothing can have happened after it."""
        if self._changed_at_s is not None:
            self._changed_at_s = min(self._changed_at_s, at_s)
        if self._waits_since_s is not None:
            self._waits_since_s = min(self._waits_since_s, at_s)

    def stuck_s(self, pool: PoolObservation, at_s: float) -> float | None:
        """How long starts have been waited for in vain; None while they may yet come."""
        patience_s = max(STUCK_COLD_STARTS * pool.cold_start_s, _LEAST_STUCK_S)
        if self._waits_since_s is None or at_s - self._waits_since_s <= patience_s:
            return None
        return at_s - self._waits_since_s

    def step(
        self, pool: PoolObservation, asked: int, *, options: AutoscalerOptions, at_s: float
    ) -> tuple[int, str]:
        """As many as asked for, within the pool's own bounds; and which of them it was."""
        bounds = options.bounds[pool.name]
        least = fewest(bounds, scale_to_zero=options.scale_to_zero)
        inside = max(min(asked, bounds.max), least)
        clipped_by = "" if inside == asked else ("max" if asked > inside else "min")
        base = max(min(pool.ready + pool.starting, bounds.max), least)  # put right at once
        if inside == base:
            return inside, clipped_by
        grows = inside > base
        if grows and self.stuck_s(pool, at_s) is not None:
            return base, "starting"
        limits = options.up if grows else options.down
        if self._changed_at_s is not None and at_s - self._changed_at_s < limits.cooldown_s:
            return base, "cooldown"
        step = max(1, limits.max_step, math.ceil(limits.max_fraction * base))
        if abs(inside - base) > step:
            return base + (step if grows else -step), "max_step"
        return inside, clipped_by


def fewest(bounds: PoolBounds, *, scale_to_zero: bool) -> int:
    """How few replicas a pool may have."""
    return min(bounds.min if scale_to_zero else max(bounds.min, 1), bounds.max)
