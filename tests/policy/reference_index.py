"""The slow obvious twin of the prefix index: sets of blocks per replica, and nothing clever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.domain.cache import CacheChangeKind, CacheTier, CacheUpdate, unpack_hashes
from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.hits import NO_HIT, Hit
from baton.policy.prefix_cache.index import IndexMode, IndexOptions


@dataclass
class ReferenceReplica:
    capacity: int
    tiers: dict[CacheTier, set[int]] = field(
        default_factory=lambda: {tier: set() for tier in CacheTier}
    )
    predicted: dict[int, tuple[int, int, float, float]] = field(default_factory=dict)
    """block -> (which prediction, how deep in it, when, for how long)"""
    sequence: int = 0
    in_step: bool = True
    confirmed_at_s: float | None = None

    @property
    def reported(self) -> set[int]:
        return self.tiers[CacheTier.GPU] | self.tiers[CacheTier.HOST]

    def clear(self) -> None:
        self.tiers = {tier: set() for tier in CacheTier}
        self.predicted = {}


class ReferenceIndex:
    def __init__(self, options: IndexOptions) -> None:
        self.options = options
        self.replicas: dict[str, ReferenceReplica] = {}
        self.predictions = 0

    def join(self, replica_id: str, capacity: int) -> None:
        self.replicas[replica_id] = ReferenceReplica(capacity)

    def remove(self, replica_id: str) -> None:
        self.replicas.pop(replica_id, None)

    def apply(self, replica_id: str, update: CacheUpdate, now_s: float) -> None:
        replica = self.replicas.get(replica_id)
        if replica is None or self.options.mode is IndexMode.PREDICTED:
            return
        if update.is_snapshot:
            if replica.in_step and update.sequence < replica.sequence:
                return
        elif update.sequence <= replica.sequence:
            return
        if any(len(change.packed_hashes) % 8 for change in update.changes):
            replica.sequence = max(replica.sequence, update.sequence)
            replica.in_step = False
            return
        if update.is_snapshot:
            replica.clear()
            replica.in_step = True
        elif update.sequence != replica.sequence + 1:
            replica.in_step = False
        replica.sequence = update.sequence
        self._change(replica, update)
        if replica.in_step or replica.confirmed_at_s is None:
            replica.confirmed_at_s = now_s

    @staticmethod
    def _change(replica: ReferenceReplica, update: CacheUpdate) -> None:
        for position, change in enumerate(update.changes):
            blocks = set(unpack_hashes(change.packed_hashes))
            other_tier = CacheTier.HOST if change.tier is CacheTier.GPU else CacheTier.GPU
            if change.kind is CacheChangeKind.STORED:
                replica.tiers[change.tier] |= blocks
            elif change.kind is CacheChangeKind.REMOVED:
                replica.tiers[change.tier] -= blocks
                if change.tier is CacheTier.GPU:
                    for block in blocks:
                        replica.predicted.pop(block, None)
            else:
                clears_other_tier = any(
                    later.kind is CacheChangeKind.CLEARED and later.tier is other_tier
                    for later in update.changes[position + 1 :]
                )
                if replica.tiers[other_tier] and not clears_other_tier:
                    replica.in_step = False
                replica.clear()

    def heartbeat(self, replica_id: str, sequence: int, now_s: float) -> None:
        replica = self.replicas.get(replica_id)
        if replica is None or self.options.mode is IndexMode.PREDICTED:
            return
        if sequence > replica.sequence:
            replica.in_step = False
        if sequence == replica.sequence and replica.in_step and sequence:
            replica.confirmed_at_s = now_s

    def predict(self, replica_id: str, hashes: Sequence[int], now_s: float) -> None:
        self._expire(now_s)
        replica = self.replicas.get(replica_id)
        if replica is None or self.options.mode is IndexMode.EVENTS or not hashes:
            return
        self.predictions += 1
        start = min(count_leading(hashes, replica.reported), len(hashes) - 1)
        ttl_s = self.options.prediction_ttl_s
        is_fresh = (
            replica.confirmed_at_s is not None
            and now_s - replica.confirmed_at_s <= self.options.stale_after_s
        )
        if replica.in_step and is_fresh:
            ttl_s = self.options.unconfirmed_ttl_s
        for depth, block in enumerate(hashes[start:][: replica.capacity]):
            replica.predicted[block] = (self.predictions, depth, now_s, ttl_s)
        while len(replica.predicted) > replica.capacity:
            # The oldest prediction loses its deepest block.
            del replica.predicted[
                min(replica.predicted, key=lambda b: _eviction_key(replica.predicted[b]))
            ]

    def _expire(self, now_s: float) -> None:
        for replica in self.replicas.values():
            replica.predicted = {
                block: entry
                for block, entry in replica.predicted.items()
                if entry[2] + entry[3] > now_s
            }

    def hit(self, replica_id: str, hashes: Sequence[int], now_s: float) -> Hit:
        self._expire(now_s)
        replica = self.replicas.get(replica_id)
        if replica is None:
            return NO_HIT
        hit_blocks = count_leading(hashes, replica.reported | set(replica.predicted))
        if not hit_blocks:
            return NO_HIT
        reported = count_leading(hashes, replica.reported)
        host = reported - count_leading(hashes, replica.tiers[CacheTier.GPU])
        assert reported == 0 or replica.confirmed_at_s is not None
        since_s = replica.confirmed_at_s or 0.0
        if hit_blocks > reported:
            entry = replica.predicted.get(hashes[hit_blocks - 1])
            since_s = since_s if entry is None else entry[2]
            return Hit(hit_blocks, host, HitSource.PREDICTED, max(0.0, now_s - since_s))
        return Hit(hit_blocks, host, HitSource.REPORTED, max(0.0, now_s - since_s))

    def is_whole(self, replica_id: str, hashes: Sequence[int], now_s: float) -> bool:
        """Whether this replica holds no block of the chain without those before it."""
        self._expire(now_s)
        replica = self.replicas[replica_id]
        layers = (
            replica.tiers[CacheTier.GPU],
            replica.reported,
            replica.reported | set(replica.predicted),
        )
        return all(
            sum(block in layer for block in hashes) == count_leading(hashes, layer)
            for layer in layers
        )

    def holds(self, replica_id: str, block: int) -> bool:
        replica = self.replicas[replica_id]
        return block in replica.reported or block in replica.predicted


def count_leading(hashes: Sequence[int], blocks: set[int]) -> int:
    return next((n for n, block in enumerate(hashes) if block not in blocks), len(hashes))


def _eviction_key(entry: tuple[int, int, float, float]) -> tuple[int, int]:
    return entry[0], -entry[1]
