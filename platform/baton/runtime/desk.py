"""What waits for an engine inside its replica: legs and aborts in order, pulls, releases.

Theory of operation: legs and aborts wait in one queue, so that an abort can never overtake its leg.
Decode legs that would pull more than `max_pulls` at once wait beside it, first come first served,
until one that pulls has its first output or has ended: an abort finds them there, for they are not
with the engine. A waiting leg goes before whatever is in the queue, since it came earlier. A pull
that takes longer than `pull_s` does not count any more: it may never end, and the others shall not
wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from baton.domain.handoff import Leg, Ticket


class Desk:
    """The queues between the fleet link and an engine; their bounds are the host's."""

    def __init__(self, *, max_releases: int, max_pulls: int | None, pull_s: float) -> None:
        self.releases: asyncio.Queue[Ticket] = asyncio.Queue(max_releases)
        self.orphans: set[str] = set()
        """Legs that nobody owns and that may still run."""
        self._inbox: deque[Leg | tuple[str, ...]] = deque()
        """Bounded by the host: legs by `max_live_legs`, aborts by the legs that live."""
        self._max_pulls = max_pulls
        self._pull_s = pull_s
        self._now_s = asyncio.get_running_loop().time
        self._pulling: dict[str, float] = {}
        """Until when each pull counts; in the order in which they began, so the soonest first."""
        self._held: dict[str, Leg] = {}
        """Legs that wait until they may pull."""
        self._asked: set[str] = set()
        self._due: dict[str, None] = {}
        self._filled = asyncio.Event()
        self._aborts_due = asyncio.Event()

    # ------------------------------------------------------------------ legs

    def put(self, leg: Leg) -> None:
        """Queue a leg for the engine."""
        self._inbox.append(leg)
        self._filled.set()

    async def take(self) -> Leg | tuple[str, ...]:
        """Wait for the next leg that may go to the engine, or the next abort."""
        while (item := self._next()) is None:
            self._filled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._permit_at_s()):
                    await self._filled.wait()
        return item

    def _next(self) -> Leg | tuple[str, ...] | None:
        if self._held and self._may_pull():
            return self._begin_pull(self._held.pop(next(iter(self._held))))
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, Leg) or item.ticket is None or self._max_pulls is None:
                return item
            if self._may_pull():
                return self._begin_pull(item)
            self._held[item.leg_id] = item
        return None

    def waiting(self) -> tuple[int, int]:
        """How many legs wait here, and how many of their prompt tokens will have to be computed."""
        legs = [item for item in self._inbox if isinstance(item, Leg)]
        legs.extend(self._held.values())
        return len(legs), sum(map(_tokens_to_compute, legs))

    # ------------------------------------------------------------------ pulls

    @property
    def pulls(self) -> bool:
        """Whether legs pull whose first output, or end, is to be told to `pull_ended`."""
        return bool(self._pulling)

    def pull_ended(self, leg_id: str) -> None:
        """A leg has its blocks, or will never get them: the next one may pull."""
        if self._pulling.pop(leg_id, None) is not None:
            self._filled.set()

    def _may_pull(self) -> bool:
        if self._max_pulls is None or len(self._pulling) < self._max_pulls:
            return True
        leg_id, counts_until_s = next(iter(self._pulling.items()))
        if counts_until_s > self._now_s():
            return False
        del self._pulling[leg_id]
        return True

    def _begin_pull(self, leg: Leg) -> Leg:
        self._pulling[leg.leg_id] = self._now_s() + self._pull_s
        return leg

    def _permit_at_s(self) -> float | None:
        """When a waiting leg may pull though no pull has ended; None when none waits."""
        return next(iter(self._pulling.values())) if self._held else None

    # ------------------------------------------------------------------ aborts

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Queue an abort for those legs that none is queued for yet."""
        fresh = tuple(leg_id for leg_id in leg_ids if leg_id not in self._asked)
        if fresh:
            self._asked.update(fresh)
            self._inbox.append(fresh)
            self._filled.set()

    def take_held(self, leg_ids: tuple[str, ...]) -> dict[str, Leg]:
        """Take out those of these legs that still wait to pull: the engine never heard of them."""
        return {leg_id: self._held.pop(leg_id) for leg_id in leg_ids if leg_id in self._held}

    def abort_due(self, leg_ids: tuple[str, ...]) -> None:
        """The legs that were queued before this abort are with the engine: it may go."""
        self._due.update(dict.fromkeys(leg_ids))
        self._aborts_due.set()

    async def next_aborts(self) -> tuple[str, ...]:
        """Wait for aborts that may go; returns all of them."""
        await self._aborts_due.wait()
        self._aborts_due.clear()
        leg_ids = tuple(self._due)
        self._due.clear()
        return leg_ids

    def abort_done(self, leg_ids: tuple[str, ...]) -> None:
        """These legs no longer run."""
        self._asked.difference_update(leg_ids)
        self.orphans.difference_update(leg_ids)
        for leg_id in leg_ids:
            self.pull_ended(leg_id)


def _tokens_to_compute(leg: Leg) -> int:
    pulled = 0 if leg.ticket is None else leg.ticket.tokens
    return max(0, len(leg.prompt_token_ids) - pulled)
