"""The frames that wait to be sent to one viewer: the newest of each topic, and nothing else."""

from __future__ import annotations

import asyncio

from baton.console.topics import Topic

Frame = bytes


class Mailbox:
    """Bounded by the number of topics: a slow reader loses updates, and costs no memory."""

    def __init__(self, topics: frozenset[Topic]) -> None:
        self.topics = topics
        self._pending: dict[str, Frame] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, key: str, frame: Frame) -> None:
        """Have a frame sent instead of the one of that key that still waits, if any."""
        self._pending[key] = frame
        self._changed.set()

    def close(self) -> None:
        """Let `drain` say that nothing more will come. Idempotent."""
        self._closed = True
        self._changed.set()

    async def drain(self) -> bytes:
        """Everything that waits, once something does; empty when nothing more will come."""
        await self._changed.wait()
        frames = b"".join(self._pending.values())
        self._pending.clear()
        if not self._closed:
            self._changed.clear()
        return frames
