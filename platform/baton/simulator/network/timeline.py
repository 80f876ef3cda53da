"""Virtual time: things that will happen, in order, and a clock that jumps from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Callback = Callable[[], None]


class Timeline:
    """What is to happen when. Things of the same moment happen in the order they were said in."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self._heap: list[tuple[float, int, Callback]] = []
        self._scheduled_count = 0
        """Things that were to happen, so far: the number of the last one."""
        self._stopped = False

    @property
    def event_count(self) -> int:
        """Things, so far."""
        return self._scheduled_count - len(self._heap)

    def call_at(self, at_s: float, action: Callback) -> None:
        """Let something happen at a time; a time that is past means now."""
        self._scheduled_count = number = self._scheduled_count + 1
        heappush(self._heap, (max(at_s, self.now_s), number, action))

    def call_later(self, delay_s: float, action: Callback) -> None:
        """Let something happen in a while."""
        # As `call_at` does it, which is not called: nine of ten things are said so.
        now_s = self.now_s
        self._scheduled_count = number = self._scheduled_count + 1
        heappush(self._heap, (now_s + delay_s if delay_s > 0 else now_s, number, action))

    def stop(self) -> None:
        """Let nothing more happen in the `run` that is under way."""
        self._stopped = True

    def run(self, *, until_s: float = float("inf")) -> bool:
        """Let time pass until `until_s`, or `stop`, or nothing is to happen any more.

        Returns whether it was stopped; `now_s` is then the time of what led to it.
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
