"""How many ingresses there should be, by how busy those are that there are.

More come at once, for an ingress that has no processor left makes every stream wait. One at a time
goes, and only when the rest would have had room for all of it for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_BUSY: Final = 0.6
"""Of what an ingress can do, that is asked of each; the rest is for bursts."""
_CALM: Final = 0.45
"""Of what the rest could do, at which one of them may go."""
_CALM_FOR_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressBounds:
    """How many there may be."""

    min: int
    max: int

    @property
    def open(self) -> bool:
        """Whether there is anything to decide."""
        return self.max > self.min


class IngressSizer:
    """Says how many ingresses there should be; asked from time to time."""

    def __init__(self, bounds: IngressBounds) -> None:
        self._bounds = bounds
        self._calm_since_s: float | None = None

    def want(self, have: int, busy: Sequence[float], now_s: float) -> int:
        """How many, given how busy each was since it was asked last.

        Args:
            have: As many as there are to be at present.
            busy: Of each, the part used of what one ingress can do; 1 is all of it.
            now_s: On the caller's clock.
        """
        whole = sum(busy)
        needed = max(self._bounds.min, min(self._bounds.max, math.ceil(whole / _BUSY)))
        if needed > have:
            self._calm_since_s = None
            return needed
        others = have - 1
        if others < max(1, self._bounds.min) or whole > _CALM * others:
            self._calm_since_s = None
            return max(self._bounds.min, min(self._bounds.max, have))
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < _CALM_FOR_S:
            return have
        self._calm_since_s = None
        return others
