"""Virtual time: scheduled events in order, and a clock that jumps from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Callback = Callable[[], None]


class Timeline:
    """Scheduled events. Events of the same time run in the order of their scheduling."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self._heap: list[tuple[float, int, Callback]] = []
        self._scheduled_count = 0
        """Events scheduled so far: the number of the last one."""
        self._stopped = False

    @property
    def event_count(self) -> int:
        """Events run so far."""
        return self._scheduled_count - len(self._heap)

    def call_at(self, at_s: float, action: Callback) -> None:
        """Schedule an action at a time; a past time means now."""
        self._scheduled_count = number = self._scheduled_count + 1
        heappush(self._heap, (max(at_s, self.now_s), number, action))

    def call_later(self, delay_s: float, action: Callback) -> None:
        """Schedule an action after a delay."""
        # Inlines `call_at` for speed: nine of ten events come through here.
        now_s = self.now_s
        self._scheduled_count = number = self._scheduled_count + 1
        heappush(self._heap, (now_s + delay_s if delay_s > 0 else now_s, number, action))

    def stop(self) -> None:
        """End the `run` that is under way after the current action."""
        self._stopped = True

    def run(self, *, until_s: float = float("inf")) -> bool:
        """Run events until `until_s`, `stop`, or none is left.

        Returns whether it was stopped; `now_s` is then the time of the last event.
        """
        heap = self._heap
        self._stopped = False
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action = heappop(heap)
            action()
            if self._stopped:
                return True
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)
        return False
