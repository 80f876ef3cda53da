"""The slow obvious twin of the prefix index: sets of blocks per replica, and nothing clever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.domain.cache import CacheChangeKind, CacheTier, CacheUpdate, unpack_hashes
from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.hits import NO_HIT, Hit
from baton.policy.prefix_cache.index import IndexMode, IndexOptions


@dataclass
class TwinReplica:
    capacity: int
    tiers: dict[CacheTier, set[int]] = field(
        default_factory=lambda: {tier: set() for tier in CacheTier}
    )
    predicted: dict[int, tuple[int, int, float, float]] = field(default_factory=dict)
    """block -> (which prediction, how deep in it, when, for how long)"""
    sequence: int = 0
    in_step: bool = True
    vouched_at_s: float | None = None

    @property
    def reported(self) -> set[int]:
        return self.tiers[CacheTier.GPU] | self.tiers[CacheTier.HOST]

    def forget(self) -> None:
        self.tiers = {tier: set() for tier in CacheTier}
        self.predicted = {}


class Twin:
    def __init__(self, options: IndexOptions) -> None:
        self.options = options
        self.replicas: dict[str, TwinReplica] = {}
        self.predictions = 0

    def join(self, replica_id: str, capacity: int) -> None:
        self.replicas[replica_id] = TwinReplica(capacity)

    def leave(self, replica_id: str) -> None:
        self.replicas.pop(replica_id, None)

    def apply(self, replica_id: str, update: CacheUpdate, now_s: float) -> None:
        one = self.replicas.get(replica_id)
        if one is None or self.options.mode is IndexMode.PREDICTED:
            return
        if update.snapshot:
            if one.in_step and update.sequence < one.sequence:
                return
        elif update.sequence <= one.sequence:
            return
        if any(len(change.hashes) % 8 for change in update.changes):
            one.sequence = max(one.sequence, update.sequence)
            one.in_step = False
            return
        if update.snapshot:
            one.forget()
            one.in_step = True
        elif update.sequence != one.sequence + 1:
            one.in_step = False
        one.sequence = update.sequence
        self._change(one, update)
        if one.in_step or one.vouched_at_s is None:
            one.vouched_at_s = now_s

    @staticmethod
    def _change(one: TwinReplica, update: CacheUpdate) -> None:
        for position, change in enumerate(update.changes):
            blocks = set(unpack_hashes(change.hashes))
            other = CacheTier.HOST if change.tier is CacheTier.GPU else CacheTier.GPU
            if change.kind is CacheChangeKind.STORED:
                one.tiers[change.tier] |= blocks
            elif change.kind is CacheChangeKind.REMOVED:
                one.tiers[change.tier] -= blocks
                if change.tier is CacheTier.GPU:
                    for block in blocks:
                        one.predicted.pop(block, None)
            else:
                other_too = any(
                    later.kind is CacheChangeKind.CLEARED and later.tier is other
                    for later in update.changes[position + 1 :]
                )
                if one.tiers[other] and not other_too:
                    one.in_step = False
                one.forget()

    def heard(self, replica_id: str, sequence: int, now_s: float) -> None:
        one = self.replicas.get(replica_id)
        if one is None or self.options.mode is IndexMode.PREDICTED:
            return
        if sequence > one.sequence:
            one.in_step = False
        if sequence == one.sequence and one.in_step and sequence:
            one.vouched_at_s = now_s

    def predict(self, replica_id: str, hashes: Sequence[int], now_s: float) -> None:
        self._expire(now_s)
        one = self.replicas.get(replica_id)
        if one is None or self.options.mode is IndexMode.EVENTS or not hashes:
            return
        self.predictions += 1
        start = min(leading(hashes, one.reported), len(hashes) - 1)
        lasts_s = self.options.predicted_s
        fresh = one.vouched_at_s is not None and now_s - one.vouched_at_s <= self.options.stale_s
        if one.in_step and fresh:
            lasts_s = self.options.unconfirmed_s
        for depth, block in enumerate(hashes[start:][: one.capacity]):
            one.predicted[block] = (self.predictions, depth, now_s, lasts_s)
        while len(one.predicted) > one.capacity:
            # The oldest prediction loses its deepest block.
            del one.predicted[min(one.predicted, key=lambda b: _eviction_key(one.predicted[b]))]

    def _expire(self, now_s: float) -> None:
        for one in self.replicas.values():
            one.predicted = {
                block: entry
                for block, entry in one.predicted.items()
                if entry[2] + entry[3] > now_s
            }

    def hit(self, replica_id: str, hashes: Sequence[int], now_s: float) -> Hit:
        self._expire(now_s)
        one = self.replicas.get(replica_id)
        if one is None:
            return NO_HIT
        held = leading(hashes, one.reported | set(one.predicted))
        if not held:
            return NO_HIT
        reported = leading(hashes, one.reported)
        host = reported - leading(hashes, one.tiers[CacheTier.GPU])
        assert reported == 0 or one.vouched_at_s is not None
        since_s = one.vouched_at_s or 0.0
        if held > reported:
            entry = one.predicted.get(hashes[held - 1])
            since_s = since_s if entry is None else entry[2]
            return Hit(held, host, HitSource.PREDICTED, max(0.0, now_s - since_s))
        return Hit(held, host, HitSource.REPORTED, max(0.0, now_s - since_s))

    def is_whole(self, replica_id: str, hashes: Sequence[int], now_s: float) -> bool:
        """Whether this replica holds no block of the chain without those before it."""
        self._expire(now_s)
        one = self.replicas[replica_id]
        layers = (one.tiers[CacheTier.GPU], one.reported, one.reported | set(one.predicted))
        return all(
            sum(block in layer for block in hashes) == leading(hashes, layer) for layer in layers
        )

    def holds(self, replica_id: str, block: int) -> bool:
        one = self.replicas[replica_id]
        return block in one.reported or block in one.predicted


def leading(hashes: Sequence[int], held: set[int]) -> int:
    return next((n for n, block in enumerate(hashes) if block not in held), len(hashes))


def _eviction_key(entry: tuple[int, int, float, float]) -> tuple[int, int]:
    return entry[0], -entry[1]
