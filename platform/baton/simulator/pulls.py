"""The pulls of one replica: so many at a time, the others in the order in which they were asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class PullQueue:
    """Starts pulls as places come free; keys are the caller's."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._under_way: set[str] = set()

    def __len__(self) -> int:
        return len(self._under_way) + len(self._waiting)

    def ask(self, key: str, start: Callable[[], None]) -> None:
        """Call `start` now if there is a place, or as soon as there is one."""
        if self._limit is None or len(self._under_way) < self._limit:
            self._under_way.add(key)
            start()
        else:
            self._waiting.append((key, start))

    def over(self, key: str) -> None:
        """A pull has ended or is not wanted any more; unknown ones are ignored."""
        if key in self._under_way:
            self._under_way.remove(key)
        else:
            self._waiting = deque(one for one in self._waiting if one[0] != key)
        while self._waiting and len(self._under_way) < (self._limit or 0):
            waiting, start = self._waiting.popleft()
            self._under_way.add(waiting)
            start()
