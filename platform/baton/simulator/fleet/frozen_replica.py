"""What a frozen replica would do: kept in order until it thaws, as a stopped process keeps it."""

from __future__ import annotations

from baton.simulator.network.timeline import Action


class Freezer:
    """Holds actions while it is frozen."""

    def __init__(self) -> None:
        self.frozen = False
        self._held: list[Action] = []

    def holds(self, action: Action) -> bool:
        """Whether this is not to be done now; then it is kept for later."""
        if self.frozen:
            self._held.append(action)
        return self.frozen

    def thaw(self) -> list[Action]:
        """Hold nothing any more; returns what was held, in order."""
        self.frozen = False
        held, self._held = self._held, []
        return held
