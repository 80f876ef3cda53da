"""A sum that forgets: what happened `time_constant_s` ago counts for 1/e of what happens now."""

from __future__ import annotations

from math import exp


class DecayedSum:
    """At a steady rate of r per second it comes to r x `time_constant_s`."""

    def __init__(self, time_constant_s: float) -> None:
        self.time_constant_s = time_constant_s
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, amount: float, at_s: float) -> None:
        """Something happened; what is told late counts as if it had happened at the latest time."""
        self._sum = self.value(at_s) + amount
        self._at_s = max(at_s, self._at_s)

    def value(self, at_s: float) -> float:
        """What it comes to."""
        elapsed_s = at_s - self._at_s
        return (
            self._sum * exp(-elapsed_s / self.time_constant_s)
            if elapsed_s > 0 and self._sum
            else self._sum
        )

    def rate(self, at_s: float) -> float:
        """How much per second, on average over its memory."""
        return self.value(at_s) / self.time_constant_s
