"""Virtual time: things that will happen, in order, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Timeline:
    """What is to happen when. Things of the same moment happen in the order they were said in."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.happened = 0
        """Things, so far."""
        self._heap: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, at_s: float, action: Action) -> None:
        """Let something happen at a time; a time that is past means now."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._order), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Let something happen in a while."""
        self.at(self.now_s + delay_s, action)

    def run(
        self, *, until_s: float = float("inf"), enough: Callable[[], bool] | None = None
    ) -> bool:
        """Let time pass until `until_s`, or `enough` says so, or nothing is to happen any more.

        Returns whether `enough` was said; `now_s` is then the time of what led to it.
        """
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            self.happened += 1
            action()
            if enough is not None and enough():
                return True
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)
        return False
