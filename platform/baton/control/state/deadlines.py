"""A heap of deadlines, at most one armed per key; a deadline that moved later costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Deadlines:
    """Arm, move, disarm, and take what is due.

    Moving a deadline later only notes it: the old heap entry comes up in its time and is put back.
    So a stream that makes progress on every step never touches the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_at_s: dict[str, float] = {}
        self._heap_at_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due_at_s)

    def __contains__(self, key: str) -> bool:
        return key in self._due_at_s

    def arm(self, key: str, at_s: float) -> None:
        """Set or move the deadline of `key`."""
        self._due_at_s[key] = at_s
        heap_at_s = self._heap_at_s.get(key)
        if heap_at_s is None or at_s < heap_at_s:
            self._push(key, at_s)

    def postpone(self, key: str, at_s: float) -> None:
        """Move the deadline of `key`, which is armed, if that makes it later."""
        if at_s > self._due_at_s[key]:
            self.arm(key, at_s)

    def disarm(self, key: str) -> None:
        """Forget the deadline of `key`; unknown keys are ignored."""
        self._due_at_s.pop(key, None)
        self._heap_at_s.pop(key, None)

    def next_at_s(self) -> float | None:
        """When to look next; may be early, never late. None when nothing is armed."""
        heap = self._heap
        while heap:
            at_s, key = heap[0]
            if self._heap_at_s.get(key) == at_s:
                return at_s
            heapq.heappop(heap)
        return None

    def pop_due(self, now_s: float) -> Iterator[str]:
        """Yield and disarm every key whose deadline has passed, in order of the deadlines."""
        while self._heap and self._heap[0][0] <= now_s:
            at_s, key = heapq.heappop(self._heap)
            if self._heap_at_s.get(key) != at_s:
                continue
            due_at_s = self._due_at_s[key]
            if due_at_s > now_s:
                self._push(key, due_at_s)
                continue
            self.disarm(key)
            yield key

    def _push(self, key: str, at_s: float) -> None:
        self._heap_at_s[key] = at_s
        heapq.heappush(self._heap, (at_s, key))
