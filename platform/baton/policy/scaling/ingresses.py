"""Desired ingresses, by the processor use of present ingresses.

All missing ingresses start at once, since a saturated ingress delays every stream. One at a time
stops, and only after the rest would have had room for its work for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TARGET_UTILIZATION: Final = 0.6
"""The target utilization of each ingress; the rest is for bursts."""
_SCALE_DOWN_UTILIZATION: Final = 0.45
"""The utilization of the remaining ingresses at which one ingress may go."""
_STABILIZATION_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressBounds:
    """How many there may be."""

    min: int
    max: int

    @property
    def is_scalable(self) -> bool:
        """Whether there is anything to decide."""
        return self.max > self.min


class IngressSizer:
    """Says how many ingresses there should be; asked from time to time."""

    def __init__(self, bounds: IngressBounds) -> None:
        self._bounds = bounds
        self._underused_since_s: float | None = None

    def desired(self, current: int, utilizations: Sequence[float], now_s: float) -> int:
        """How many, given how busy each was since it was asked last.

        Args:
            current: As many as there are to be at present.
            utilizations: The used part of each ingress's capacity; 1 is all of it.
            now_s: On the caller's clock.
        """
        total_utilization = sum(utilizations)
        needed = max(
            self._bounds.min,
            min(self._bounds.max, math.ceil(total_utilization / _TARGET_UTILIZATION)),
        )
        if needed > current:
            self._underused_since_s = None
            return needed
        one_fewer = current - 1
        if (
            one_fewer < max(1, self._bounds.min)
            or total_utilization > _SCALE_DOWN_UTILIZATION * one_fewer
        ):
            self._underused_since_s = None
            return max(self._bounds.min, min(self._bounds.max, current))
        if self._underused_since_s is None:
            self._underused_since_s = now_s
        if now_s - self._underused_since_s < _STABILIZATION_WINDOW_S:
            return current
        self._underused_since_s = None
        return one_fewer
