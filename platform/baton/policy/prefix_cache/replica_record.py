"""The prefix index's record of each replica beyond its blocks, and its view for operators."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.domain.cache import CacheTier, CacheUpdate
from baton.policy.prefix_cache.predicted_blocks import ReplicaPredictions


@dataclass(slots=True, kw_only=True)
class IndexCounters:
    """Counts of an index since its start."""

    updates: int = 0
    snapshots: int = 0
    gaps: int = 0
    """Replicas fell out of step: holes in their numbers, or answers that contradict them."""
    late_updates: int = 0
    """Older than the known state, or repeated: ignored."""
    invalid_updates: int = 0
    """They could not be read."""
    unknown_replicas: int = 0
    """Calls that named one: ignored."""
    dropped_blocks: int = 0
    lookups: int = 0
    chains_with_holes: int = 0
    """Lookups that saw a hole which an eviction had left."""
    contradictions: int = 0
    """Answers that less was cached than the index knew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIndexState:
    """The index's state of one replica, for operators."""

    gpu_blocks: int
    host_blocks: int
    predicted_blocks: int
    sequence: int
    in_sync: bool
    """The record equals the replica's cache at `sequence`."""
    is_stale: bool
    """It has not confirmed its reports for a while, or never did."""
    age_s: float | None
    """Since it last vouched; None when it never did."""
    gaps: int
    dropped_blocks: int


@dataclass(slots=True, eq=False, kw_only=True)
class ReplicaRecord:
    """One life of one replica."""

    bit: int
    predictions: ReplicaPredictions
    lookahead_blocks: int | None = None
    """It tells of whole prefixes, by the block so far behind each; None: of blocks."""
    reported_blocks: dict[CacheTier, int] = field(
        default_factory=lambda: dict.fromkeys(CacheTier, 0)
    )
    """Blocks kept, by tier."""
    sequence: int = 0
    """Number of the last update taken. Before the first, a cache is empty: that is state 0."""
    in_sync: bool = True
    confirmed_at_s: float = 0.0
    is_confirmed: bool = False
    resync_requested_at_s: float | None = None
    """When a snapshot was asked for that has not come."""
    removals: int = 0
    """Reports that blocks were removed."""
    contradictions: int = 0
    """Answers in a row that contradict what was known."""
    gaps: int = 0
    dropped_blocks: int = 0

    @property
    def entries(self) -> int:
        """Blocks kept, over all tiers."""
        return sum(self.reported_blocks.values())

    def is_late(self, update: CacheUpdate) -> bool:
        """Whether an update says nothing new."""
        if update.is_snapshot:
            # Out of step, any state that the replica was in is better than the known state.
            return self.in_sync and update.sequence < self.sequence
        return update.sequence <= self.sequence

    def confirm(self, now_s: float) -> None:
        """Mark its reports as true at this moment."""
        self.confirmed_at_s, self.is_confirmed = now_s, True

    def is_stale(self, now_s: float, *, stale_s: float) -> bool:
        """Whether it has not vouched for so long."""
        return not self.is_confirmed or now_s - self.confirmed_at_s > stale_s

    def should_request_snapshot(self, now_s: float, *, every_s: float) -> bool:
        """Whether to ask for a snapshot now; True notes that it was asked for."""
        if self.in_sync:
            return False
        if self.resync_requested_at_s is not None and now_s - self.resync_requested_at_s < every_s:
            return False
        self.resync_requested_at_s = now_s
        return True

    def state(self, now_s: float, *, stale_s: float) -> ReplicaIndexState:
        """The view for operators."""
        return ReplicaIndexState(
            gpu_blocks=self.reported_blocks[CacheTier.GPU],
            host_blocks=self.reported_blocks[CacheTier.HOST],
            predicted_blocks=len(self.predictions.newest_by_block),
            sequence=self.sequence,
            in_sync=self.in_sync,
            is_stale=self.is_stale(now_s, stale_s=stale_s),
            age_s=max(0.0, now_s - self.confirmed_at_s) if self.is_confirmed else None,
            gaps=self.gaps,
            dropped_blocks=self.dropped_blocks,
        )
