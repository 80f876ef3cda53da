"""Sum with exponential decay."""

from __future__ import annotations

from math import exp


class DecayedSum:
    """Events of `time_constant_s` ago count for 1/e.

    At a steady rate of r per second, the sum is r x `time_constant_s`.
    """

    def __init__(self, time_constant_s: float) -> None:
        self.time_constant_s = time_constant_s
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, amount: float, at_s: float) -> None:
        """Add an event; an event older than the latest counts as of the latest time."""
        self._sum = self.value(at_s) + amount
        self._at_s = max(at_s, self._at_s)

    def value(self, at_s: float) -> float:
        """The decayed sum at a time."""
        elapsed_s = at_s - self._at_s
        return (
            self._sum * exp(-elapsed_s / self.time_constant_s)
            if elapsed_s > 0 and self._sum
            else self._sum
        )

    def rate(self, at_s: float) -> float:
        """Amount per second, averaged over the decay."""
        return self.value(at_s) / self.time_constant_s
