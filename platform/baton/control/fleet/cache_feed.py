"""Turns an engine's prefix cache events into the numbered updates that coordinators take.

Theory of operation. An engine names a block in its own way and reports its tokens. The feed
computes baton's chained hash from them once, and then maps the engine's name for as long as some
tier holds the block. A block is reported only if its parent is. Unreported are blocks that depend
on more than their tokens, blocks of another size, and all that follow them. A missing report costs
an unneeded prefill; the feed never reports a block that the engine did not.

Equal blocks may be cached twice: a block is gone when it was removed as often as it was stored.

After missing batches any block may be gone: all are suspect, and the reader gets CLEARED. An engine
does not store its cached blocks again, so suspect blocks keep their names. They come back once the
engine computes a new block behind them, which it does only behind a whole chain of held blocks.

Bound: for each tier, twice the blocks that fit into it, suspect blocks included. Beyond that the
oldest eighth is forgotten, suspect blocks first. Host memory of unknown size counts as the KV
cache.

`pop_update` reports the final state of each block since the last: at most one CLEARED, one REMOVED
and one STORED for each tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain as concatenate
from itertools import islice
from typing import Final, assert_never

from baton.domain.cache import (
    CacheChange,
    CacheChangeKind,
    CacheTier,
    CacheUpdate,
    pack_hashes,
)
from baton.domain.kv_events import (
    BlockHash,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
)
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root

_CAPACITY_FACTOR: Final = 2
_FORGET_DIVISOR: Final = 8


@dataclass(slots=True, kw_only=True)
class FeedCounters:
    """Counts of a feed, in blocks unless named otherwise; only ever grow."""

    batches: int = 0
    late_batches: int = 0
    """Not newer than one before, and so ignored."""
    gaps: int = 0
    """Times that batches were missing."""
    stored: int = 0
    removed: int = 0
    opaque: int = 0
    """Left out: they stand for more than their tokens."""
    other_size: int = 0
    """Left out: the engine did not say of which tokens, or of a number that is no block."""
    orphans: int = 0
    """Left out: their parent is not known, for example because it was left out itself."""
    unknown_removed: int = 0
    forgotten: int = 0
    """Too many to remember."""
    other_groups: int = 0
    """Left out: of layers that are reported as absent."""
    other_tiers: int = 0
    """Left out: in a memory of which it is not known what can be reused."""


class CacheFeed:
    """One engine's prefix cache, as far as it is known."""

    def __init__(
        self, *, model: str, block_size_tokens: int, capacity_blocks: int, host_blocks: int = 0
    ) -> None:
        self.counters = FeedCounters()
        self.sequence = 0
        """The number of the last update that was taken."""
        self._model = model
        self._block_size_tokens = block_size_tokens
        self._hash_of: dict[BlockHash, int] = {}
        self._parent_of: dict[int, int] = {}
        capacities = {
            CacheTier.GPU: capacity_blocks,
            CacheTier.HOST: max(host_blocks, capacity_blocks),
        }
        self._tiers = {tier: _Tier(tier, _CAPACITY_FACTOR * capacities[tier]) for tier in CacheTier}
        self._max_names = sum(tier.max_blocks for tier in self._tiers.values())
        self._next_batch: int | None = None

    # ------------------------------------------------------------------ what the engine says

    def apply(self, batch: KvEventBatch) -> None:
        """Take in one batch; a batch that is not newer than the last is ignored."""
        expected = self._next_batch
        if expected is not None and batch.sequence < expected:
            self.counters.late_batches += 1
            return
        self.counters.batches += 1
        if expected is not None and batch.sequence > expected:
            self.counters.gaps += 1
            self.mark_unverified()
        self._next_batch = batch.sequence + 1
        for event in batch.events:
            match event:
                case BlocksStored() | BlocksRemoved() if event.group:
                    self.counters.other_groups += len(event.block_hashes)
                case BlocksStored():
                    self._on_stored(event)
                case BlocksRemoved():
                    self._on_removed(event)
                case BlocksCleared():
                    self._on_cleared()
                case _:
                    assert_never(event)

    def mark_unverified(self) -> None:
        """Events are missing: of no block is it known that it is still held."""
        for tier in self._tiers.values():
            tier.mark_unverified()

    # ------------------------------------------------------------------ cache events

    @property
    def pending_blocks(self) -> int:
        """Blocks that something may have happened to since the last `pop_update`."""
        return sum(len(tier.changed) for tier in self._tiers.values())

    def held_blocks(self, tier: CacheTier) -> int:
        """Blocks that a tier is known to hold."""
        return len(self._tiers[tier].held)

    def pop_update(self) -> CacheUpdate | None:
        """The changes since this was last called; None, and no new number, without changes."""
        changes = tuple(
            concatenate.from_iterable(tier.pop_changes() for tier in self._tiers.values())
        )
        if not changes:
            return None
        self.sequence += 1
        return CacheUpdate(self.sequence, changes)

    def snapshot(self, max_blocks: int | None = None) -> CacheUpdate:
        """All that is held, parents before children; cut off after `max_blocks`.

        Call `pop_update` first. Pending changes are in the snapshot, and come again with the next
        update, which does no harm.
        """
        changes, remaining = [], max_blocks
        for tier in self._tiers.values():
            hashes = pack_hashes(list(islice(tier.held, remaining)))
            if hashes:
                changes.append(CacheChange(CacheChangeKind.STORED, hashes, tier.tier))
            remaining = None if remaining is None else max(0, remaining - len(tier.held))
        return CacheUpdate(self.sequence, tuple(changes), is_snapshot=True)

    # ------------------------------------------------------------------ events

    def _on_stored(self, event: BlocksStored) -> None:
        tier = self._tiers[_parse_tier(event.tier)]
        blocks = len(event.block_hashes)
        self.counters.stored += blocks
        if event.has_hidden_content:
            self.counters.opaque += blocks
            return
        previous = self._chain_parent(event)
        if previous is None or event.block_size_tokens != self._block_size_tokens:
            self._store_known(tier, event, orphans=previous is None)
            return
        if event.parent_hash is not None and tier.tier is CacheTier.GPU:
            self._verify_chain(tier, previous)
        parent = None if event.parent_hash is None else previous
        computed = chain_hashes(previous, event.token_ids, self._block_size_tokens)
        for name, block in zip(event.block_hashes, computed, strict=True):
            self._assign_name(name, block)
            if parent is not None:
                self._parent_of[block] = parent
            tier.store(block)
            parent = block
        self._enforce_bound(tier)

    def _assign_name(self, name: BlockHash, block: int) -> None:
        previous_block = self._hash_of.setdefault(name, block)
        if previous_block != block:  # no sound engine does this: the old block is gone
            for tier in self._tiers.values():
                tier.forget(previous_block)
            self._hash_of[name] = block

    def _chain_parent(self, event: BlocksStored) -> int | None:
        """The parent of the chain of these blocks; None when that is not known."""
        if event.parent_hash is not None:
            return self._hash_of.get(event.parent_hash)
        return chain_root(
            model=self._model,
            block_size_tokens=self._block_size_tokens,
            adapter=event.adapter,
            salt=event.cache_salt,
        )

    def _store_known(self, tier: _Tier, event: BlocksStored, *, orphans: bool) -> None:
        """Store those that some tier holds already: their tokens need not be sent again."""
        known_blocks = [self._hash_of[name] for name in event.block_hashes if name in self._hash_of]
        for block in known_blocks:
            tier.store(block)
        unknown_count = len(event.block_hashes) - len(known_blocks)
        if orphans:
            self.counters.orphans += unknown_count
        else:
            self.counters.other_size += unknown_count
        self._enforce_bound(tier)

    def _verify_chain(self, tier: _Tier, block: int) -> None:
        """The engine holds this block, and so all before it: they are not suspect any more."""
        verified = []
        ancestor: int | None = block
        while ancestor is not None and ancestor in tier.unverified:
            verified.append(ancestor)
            ancestor = self._parent_of.get(ancestor)
        for held in reversed(verified):
            tier.store(held)

    def _on_removed(self, event: BlocksRemoved) -> None:
        tier = self._tiers[_parse_tier(event.tier)]
        self.counters.removed += len(event.block_hashes)
        for name in event.block_hashes:
            block = self._hash_of.get(name)
            if block is None:
                self.counters.unknown_removed += 1
                continue
            tier.remove(block)
            if not self._is_known(block):
                del self._hash_of[name]
                self._parent_of.pop(block, None)

    def _on_cleared(self) -> None:
        for tier in self._tiers.values():
            tier.clear()
        self._hash_of.clear()
        self._parent_of.clear()

    # ------------------------------------------------------------------ bounds

    def _enforce_bound(self, tier: _Tier) -> None:
        if len(self._hash_of) > self._max_names:
            self._forget_names()
        excess = len(tier.held) + len(tier.unverified) - tier.max_blocks
        if excess <= 0:
            return
        count = max(excess, tier.max_blocks // _FORGET_DIVISOR)
        oldest = list(islice(concatenate(tier.unverified, tier.held), count))
        for block in oldest:
            tier.forget(block)
        self.counters.forgotten += len(oldest)
        self._forget_names()

    def _forget_names(self) -> None:
        """Forget the names of blocks that no tier holds, and all but one of any other's."""
        name_of = {block: name for name, block in self._hash_of.items() if self._is_known(block)}
        self._hash_of = {name: block for block, name in name_of.items()}
        self._parent_of = {b: p for b, p in self._parent_of.items() if b in name_of}

    def _is_known(self, block: int) -> bool:
        return any(block in tier.held or block in tier.unverified for tier in self._tiers.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree or are over their bounds."""
        named = set(self._hash_of.values())
        for tier in self._tiers.values():
            tier.check_integrity()
            nameless = (tier.held.keys() | tier.unverified.keys()) - named
            assert not nameless, f"{tier.tier}: {len(nameless)} blocks have no name"
        names = len(self._hash_of)
        assert names <= self._max_names, f"{names} names are too many"
        assert self._parent_of.keys() <= named, "blocks without a name have a parent"


class _Tier:
    """The blocks of one tier, by our hashes."""

    def __init__(self, tier: CacheTier, max_blocks: int) -> None:
        self.tier = tier
        self.max_blocks = max_blocks
        self.held: dict[int, int] = {}
        """How many times each block is held; in order of arrival, so parents first."""
        self.unverified: dict[int, None] = {}
        self.changed: dict[int, bool] = {}
        """Whether each block that something happened to was held when changes were last taken."""
        self._cleared = False

    def store(self, block: int) -> None:
        self.unverified.pop(block, None)
        if block not in self.held:
            was_held = self.changed.pop(block, False)
            self.changed[block] = was_held
        self.held[block] = self.held.get(block, 0) + 1

    def remove(self, block: int) -> None:
        times = self.held.get(block, 0)
        if times > 1:
            self.held[block] = times - 1
        else:
            self.forget(block)

    def forget(self, block: int) -> None:
        self.unverified.pop(block, None)
        if self.held.pop(block, 0):
            self.changed.setdefault(block, True)

    def mark_unverified(self) -> None:
        unverified = self.unverified | dict.fromkeys(self.held)
        self.clear()
        self.unverified = unverified

    def clear(self) -> None:
        self._cleared = self._cleared or bool(self.held or self.changed)
        self.held = {}
        self.unverified = {}
        self.changed = {}

    def pop_changes(self) -> Iterable[CacheChange]:
        changed, self.changed = self.changed, {}
        cleared, self._cleared = self._cleared, False
        held = self.held
        removed = pack_hashes([b for b, was_held in changed.items() if was_held and b not in held])
        stored = pack_hashes([b for b, was_held in changed.items() if not was_held and b in held])
        if cleared:
            yield CacheChange(CacheChangeKind.CLEARED, tier=self.tier)
        if removed:
            yield CacheChange(CacheChangeKind.REMOVED, removed, self.tier)
        if stored:
            yield CacheChange(CacheChangeKind.STORED, stored, self.tier)

    def check_integrity(self) -> None:
        both = self.held.keys() & self.unverified.keys()
        assert not both, f"{self.tier}: {len(both)} blocks are both held and unverified"
        block_count = len(self.held) + len(self.unverified)
        assert block_count <= self.max_blocks, f"{self.tier}: {block_count} blocks are too many"
        assert all(times > 0 for times in self.held.values()), f"{self.tier}: held zero times"


def _parse_tier(name: str | None) -> CacheTier:
    return CacheTier.GPU if name in {None, "gpu"} else CacheTier.HOST
