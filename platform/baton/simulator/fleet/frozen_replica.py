"""What a frozen replica would do: kept in order until it thaws, as a stopped process keeps it."""

from __future__ import annotations

from baton.simulator.network.timeline import Callback


class Freezer:
    """Holds actions while it is frozen."""

    def __init__(self) -> None:
        self.is_frozen = False
        self._deferred: list[Callback] = []

    def defer_if_frozen(self, action: Callback) -> bool:
        """Whether this is not to be done now; then it is kept for later."""
        if self.is_frozen:
            self._deferred.append(action)
        return self.is_frozen

    def thaw(self) -> list[Callback]:
        """Hold nothing any more; returns what was held, in order."""
        self.is_frozen = False
        deferred, self._deferred = self._deferred, []
        return deferred
