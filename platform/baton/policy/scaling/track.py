"""When one role's need is followed: up at once, down when it has been lower for a while."""

from __future__ import annotations

import math

from baton.policy.scaling.windows import SlidingMax

_ROUNDING = 1e-6
_MOST_HEADROOM = 0.5
"""Replicas: enough that a need which wavers about a whole number does not stop and start one."""
_CALM_WINDOWS = 6.0
"""After so many windows without a mistake the window is shortened again."""


class Track:
    """Follows one need, in replicas.

    Theory of operation. What is had goes up to the need at once. It goes down to the greatest need
    of the last `window_s`, and a little headroom: what is stopped must not be wanted back. When it
    is wanted back all the same, within a window of the stop, demand swings faster than the window
    is long, and the window is doubled up to a bound; after several calm windows it is halved. So
    the number of times that a pool changes its direction is bounded even for demand that nobody
    foresaw.
    """

    def __init__(self, window_s: float, *, headroom_fraction: float, longest_s: float) -> None:
        self._shortest_s = window_s
        self._longest_s = max(window_s, longest_s)
        self._headroom = headroom_fraction
        self._needs = SlidingMax(self._longest_s)
        self.window_s = window_s
        self._have: int | None = None
        self._stopped_s: float | None = None
        self._changed_s: float | None = None

    def target(self, at_s: float, *, have: int, need: float) -> int:
        """How many to have now."""
        self._needs.push(at_s, need + min(self._headroom * need, _MOST_HEADROOM))
        self._note(at_s, have)
        up = whole(need)
        if up > have:
            self._regret(at_s)
            return up
        self._calm_down(at_s)
        return min(have, max(up, whole(self._needs.over(self.window_s))))

    def _note(self, at_s: float, have: int) -> None:
        if self._have is not None and have < self._have:
            self._stopped_s = at_s
        self._have = have

    def _regret(self, at_s: float) -> None:
        if self._stopped_s is not None and at_s - self._stopped_s <= self.window_s:
            self.window_s = min(2 * self.window_s, self._longest_s)
            self._changed_s = at_s
        self._stopped_s = None

    def _calm_down(self, at_s: float) -> None:
        if self._changed_s is None or at_s - self._changed_s < _CALM_WINDOWS * self.window_s:
            return
        self.window_s = max(self.window_s / 2, self._shortest_s)
        self._changed_s = at_s if self.window_s > self._shortest_s else None


def whole(need: float) -> int:
    """A need in whole replicas."""
    return math.ceil(need - _ROUNDING)
