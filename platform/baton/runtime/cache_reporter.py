"""Sends an engine's cache events to coordinators: soon, seldom, and in order.

Theory of operation: the first change after a pause is sent at once. Later changes gather until
`FLUSH_S` after the last frame, or until they are many. A flush sends the gathered changes and then
the snapshots, so that their numbers follow each other. If the engine's events end, coordinators
lose only their knowledge of its blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from baton.control.fleet.cache_feed import CacheFeed, FeedCounters
from baton.control.fleet.hybrid_feed import HybridCacheFeed
from baton.domain.cache import BLOCK_HASH_BYTES
from baton.domain.fleet import ReplicaFacts
from baton.domain.kv_events import KvEventBatch
from baton.runtime.link.reports import Reports
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)

FLUSH_S: Final = 0.02
_FLUSH_BLOCKS: Final = 16_384
"""128 KiB of hashes: such a frame delays the engine's steps little."""
_FRAME_OVERHEAD_BYTES: Final = 1024


class CacheReporter:
    """The one consumer of an engine's cache events."""

    def __init__(self, facts: ReplicaFacts, reports: Reports, *, max_frame_bytes: int) -> None:
        self._feed = _make_feed(facts)
        self._enabled = facts.cache_events
        self._reports = reports
        self._max_blocks = max(0, max_frame_bytes - _FRAME_OVERHEAD_BYTES) // BLOCK_HASH_BYTES
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_at_s = float("-inf")

    @property
    def sequence(self) -> int:
        """The number of the last update that was sent."""
        return self._feed.sequence

    @property
    def counters(self) -> FeedCounters:
        """Counts of the engine's cache events."""
        return self._feed.counters

    async def follow(self, batches: AsyncIterator[KvEventBatch]) -> None:
        """Pass on the engine's events until they end."""
        if not self._enabled:
            return
        try:
            async for batch in batches:
                self._feed.apply(batch)
                self._flush_soon()
                await asyncio.sleep(0)  # a long backlog must not hold up the engine's steps
        except Exception as error:  # noqa: BLE001 - knowing less of a cache fails no request
            log_event(_LOG, logging.WARNING, "cache_events_ended", {}, error=error)
        self._feed.mark_unverified()
        self._flush_soon()

    def sync(self, *, immediately: bool) -> None:
        """Send the snapshot that a session waits for."""
        if self._enabled and immediately:
            self._flush()
        elif self._enabled:
            self._flush_soon()

    def close(self) -> None:
        """Send no more. Idempotent."""
        self._enabled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush_soon(self) -> None:
        due_at_s = self._flushed_at_s + FLUSH_S
        if due_at_s <= self._loop.time() or self._feed.pending_blocks >= _FLUSH_BLOCKS:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(due_at_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._enabled:
            return
        self._flushed_at_s = self._loop.time()
        update = self._feed.pop_update()
        if update is not None:
            self._reports.send_cache_update(update)
        if self._reports.snapshot_requested:
            self._reports.send_cache_snapshot(self._feed.snapshot(self._max_blocks))


def _make_feed(facts: ReplicaFacts) -> CacheFeed | HybridCacheFeed:
    if facts.cache_shape is None:
        return CacheFeed(
            model=facts.model,
            block_size_tokens=facts.block_size_tokens,
            capacity_blocks=facts.kv_blocks,
            host_blocks=facts.host_blocks,
        )
    return HybridCacheFeed(
        model=facts.model,
        block_size_tokens=facts.block_size_tokens,
        capacity_blocks=facts.kv_blocks,
        shape=facts.cache_shape,
    )
