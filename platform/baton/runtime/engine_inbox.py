"""What waits for an engine inside its replica: legs and aborts in order, and releases.

Theory of operation: legs and aborts wait in one queue, so that an abort can never overtake its leg.
Nothing else holds a leg back here: from the moment an engine has a decode leg it renews the lease
of the blocks that the leg will fetch, so waiting for a turn to fetch is the engine's business.
"""

from __future__ import annotations

import asyncio
from collections import deque

from baton.domain.handoff import KvHandle, Leg


class EngineInbox:
    """The queues between the fleet link and an engine; their bounds are the host's."""

    def __init__(self, *, max_releases: int) -> None:
        self.releases: asyncio.Queue[KvHandle] = asyncio.Queue(max_releases)
        self.orphans: set[str] = set()
        """Legs that nobody owns and that may still run."""
        self._queue: deque[Leg | tuple[str, ...]] = deque()
        """Bounded by the host: legs by `max_live_legs`, aborts by the legs that live."""
        self._abort_requested: set[str] = set()
        self._due_aborts: dict[str, None] = {}
        self._not_empty = asyncio.Event()
        self._aborts_due = asyncio.Event()

    # ------------------------------------------------------------------ legs

    def put(self, leg: Leg) -> None:
        """Queue a leg for the engine."""
        self._queue.append(leg)
        self._not_empty.set()

    async def get(self) -> Leg | tuple[str, ...]:
        """Wait for the next leg that may go to the engine, or the next abort."""
        while not self._queue:
            self._not_empty.clear()
            await self._not_empty.wait()
        return self._queue.popleft()

    def count_queued(self) -> tuple[int, int]:
        """How many legs wait here, and how many of their prompt tokens will have to be computed."""
        legs = [item for item in self._queue if isinstance(item, Leg)]
        return len(legs), sum(leg.uncached_prompt_tokens for leg in legs)

    # ------------------------------------------------------------------ aborts

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Queue an abort for those legs that none is queued for yet."""
        new_ids = tuple(leg_id for leg_id in leg_ids if leg_id not in self._abort_requested)
        if new_ids:
            self._abort_requested.update(new_ids)
            self._queue.append(new_ids)
            self._not_empty.set()

    def schedule_abort(self, leg_ids: tuple[str, ...]) -> None:
        """The legs that were queued before this abort are with the engine: it may go."""
        self._due_aborts.update(dict.fromkeys(leg_ids))
        self._aborts_due.set()

    async def get_due_aborts(self) -> tuple[str, ...]:
        """Wait for aborts that may go; returns all of them."""
        await self._aborts_due.wait()
        self._aborts_due.clear()
        leg_ids = tuple(self._due_aborts)
        self._due_aborts.clear()
        return leg_ids

    def on_aborted(self, leg_ids: tuple[str, ...]) -> None:
        """These legs no longer run."""
        self._abort_requested.difference_update(leg_ids)
        self.orphans.difference_update(leg_ids)
