"""Queues from a simulated engine to its readers: steps, which wait, and KV events, which do not.

Both are bounded. A full outbox stops the engine, since no output may be lost. A full feed drops its
oldest batch: the sequence numbers show the hole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection

from baton.domain.handoff import LegOutput
from baton.domain.kv_events import KvEventBatch

Outputs = tuple[LegOutput, ...]


class Outbox:
    """Steps on their way to the one consumer."""

    def __init__(self, limit_steps: int) -> None:
        self._limit_steps = limit_steps
        self._steps: deque[Outputs] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._not_empty = asyncio.Event()
        self._item_removed = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait until another step may be put."""
        await self._wait_until(lambda: len(self._steps) < self._limit_steps)

    def put(self, outputs: Outputs) -> None:
        """Queue a step's outputs; after `end` they are dropped."""
        if outputs and not self._ended:
            self._steps.append(outputs)
            self._not_empty.set()

    async def get(self) -> Outputs | None:
        """The next step's outputs; None when there will be none any more.

        Raises:
            Exception: the error that `end` was given, once everything before it was taken.
        """
        while not self._steps and not self._ended:
            self._not_empty.clear()
            await self._not_empty.wait()
        if self._steps:
            self._item_removed.set()
            return self._steps.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def wait_flushed(self, leg_ids: Collection[str], deadline_s: float) -> bool:
        """Wait until no output of these legs is queued; False if they were not taken in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait_until(lambda: not self._has_outputs_of(leg_ids))
        except TimeoutError:
            return False
        return True

    def discard(self, leg_ids: Collection[str]) -> tuple[LegOutput, ...]:
        """Drop the queued outputs of these legs and return them."""
        dropped = [out for step in self._steps for out in step if out.leg_id in leg_ids]
        if dropped:
            remaining = (tuple(o for o in step if o.leg_id not in leg_ids) for step in self._steps)
            self._steps = deque(step for step in remaining if step)
            self._item_removed.set()
        return tuple(dropped)

    def end(self, error: Exception | None = None, *, drop: bool = False) -> None:
        """Let no more in; the reader gets the rest, unless dropped, then the end or `error`."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if drop:
            self._steps.clear()
        self._not_empty.set()
        self._item_removed.set()

    def _has_outputs_of(self, leg_ids: Collection[str]) -> bool:
        return any(output.leg_id in leg_ids for step in self._steps for output in step)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._ended:
            self._item_removed.clear()
            await self._item_removed.wait()


class KvEventFeed:
    """An engine's KV events since it was made, for one reader; an async iterator, to be closed."""

    def __init__(self, limit_batches: int) -> None:
        self._batches: deque[KvEventBatch] = deque(maxlen=limit_batches)
        self._closed = False
        self._not_empty = asyncio.Event()

    def put(self, batch: KvEventBatch) -> None:
        """Queue a batch, dropping the oldest when full; after the end it is dropped."""
        if not self._closed:
            self._batches.append(batch)
            self._not_empty.set()

    def end(self) -> None:
        """Let the reader finish what is queued, then stop."""
        self._closed = True
        self._not_empty.set()

    def __aiter__(self) -> KvEventFeed:
        return self

    async def __anext__(self) -> KvEventBatch:
        while not self._batches:
            if self._closed:
                raise StopAsyncIteration
            self._not_empty.clear()
            await self._not_empty.wait()
        return self._batches.popleft()

    async def aclose(self) -> None:
        """Stop reading, for good."""
        self._batches.clear()
        self.end()
