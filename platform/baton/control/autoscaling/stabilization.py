"""How far one pool may change now: its bounds, its pauses, and starts that do not come up."""

from __future__ import annotations

import math

from baton.policy.scaling.observation import PoolObservation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds

STUCK_COLD_STARTS = 3.0
"""A start that takes three times as long as starts do is not waited for by starting more."""
_MIN_STUCK_S = 30.0
"""Cold starts of engines that need almost none vary by more than a factor."""


class ScalingBehavior:
    """What is remembered of one pool from tick to tick."""

    def __init__(self) -> None:
        self._changed_at_s: float | None = None
        self._starting = self._ready = 0
        self._starting_since_s: float | None = None
        """When the replicas that are starting were asked for, or one of them last became ready."""

    def observe(self, pool: PoolObservation, at_s: float) -> None:
        """Take note of how starts get on.

        Where one is asked for as soon as another becomes ready, as many are starting as before.
        """
        progressed = pool.starting < self._starting or pool.ready_replicas > self._ready
        if pool.starting <= 0:
            self._starting_since_s = None
        elif self._starting_since_s is None or progressed:
            self._starting_since_s = at_s
        self._starting, self._ready = pool.starting, pool.ready_replicas

    def on_scaled(self, at_s: float) -> None:
        """Replicas were asked for, or stopped."""
        self._changed_at_s = at_s

    def on_clock_set_back(self, at_s: float) -> None:
        """The clock went back to `at_s`: nothing can have happened after it."""
        if self._changed_at_s is not None:
            self._changed_at_s = min(self._changed_at_s, at_s)
        if self._starting_since_s is not None:
            self._starting_since_s = min(self._starting_since_s, at_s)

    def stuck_s(self, pool: PoolObservation, at_s: float) -> float | None:
        """How long starts have been waited for in vain; None while they may yet come."""
        timeout_s = max(STUCK_COLD_STARTS * pool.cold_start_s, _MIN_STUCK_S)
        if self._starting_since_s is None or at_s - self._starting_since_s <= timeout_s:
            return None
        return at_s - self._starting_since_s

    def clip(
        self, pool: PoolObservation, desired: int, *, options: AutoscalerOptions, at_s: float
    ) -> tuple[int, str]:
        """As many as asked for, within the pool's own bounds; and which of them it was."""
        bounds = options.bounds[pool.name]
        lower_bound = min_replicas(bounds, scale_to_zero=options.scale_to_zero)
        bounded = max(min(desired, bounds.max), lower_bound)
        clipped_by = "" if bounded == desired else ("max" if desired > bounded else "min")
        current = max(
            min(pool.ready_replicas + pool.starting, bounds.max), lower_bound
        )  # put right at once
        if bounded == current:
            return bounded, clipped_by
        scales_up = bounded > current
        if scales_up and self.stuck_s(pool, at_s) is not None:
            return current, "starting"
        limits = options.up if scales_up else options.down
        if self._changed_at_s is not None and at_s - self._changed_at_s < limits.cooldown_s:
            return current, "cooldown"
        max_change = max(1, limits.max_step, math.ceil(limits.max_fraction * current))
        if abs(bounded - current) > max_change:
            return current + (max_change if scales_up else -max_change), "max_step"
        return bounded, clipped_by


def min_replicas(bounds: PoolBounds, *, scale_to_zero: bool) -> int:
    """How few replicas a pool may have."""
    return min(bounds.min if scale_to_zero else max(bounds.min, 1), bounds.max)
