"""How much of one chain of blocks each replica holds, found without looking at every block.

*Theory of operation.* Engines reuse a block only after all blocks before it, store them in that
order and evict the deepest first. So a holder of block n is assumed to hold all before it: along
the chain, holders only drop out. Where the holders at both ends of a span are the same nothing
changes in between. So the few depths at which a holder drops out are found by bisection, in about
`log2(blocks)` probes each, however many replicas hold the prefix.

An eviction may break the assumption. When a probe finds a holder that a block before it lacks, the
chain is scanned from its start, which is exact. A hole that no probe falls into is not noticed.
Then a replica is credited with blocks up to the deepest probed block that it does hold. It is never
credited with too little, and no replica's hole spoils the result of the others.

Replicas of hybrid models tell of whole prefixes, by their last block (`PrefixSlots`), and one says
nothing of another. For those the chain is scanned from its end, which costs one probe a block where
one of them holds nothing of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.block_masks import HolderMasks
from baton.policy.prefix_cache.hits import NO_HIT, Hit
from baton.policy.prefix_cache.replica_record import ReplicaRecord

Probe = Callable[[int], int]
"""From the position of a block in a chain to the slots that hold it."""


class PrefixSlots(NamedTuple):
    """The slots that tell of whole prefixes, each by a block so far behind its end."""

    lookahead_blocks: int
    slots: int


class Level(NamedTuple):
    """The slots that hold at least this number of leading blocks."""

    blocks: int
    slots: int


class Chain:
    """The holders of the blocks of one chain: in the KV cache, in any tier, or expected."""

    __slots__ = (
        "expected_probe",
        "gpu_probe",
        "hashes",
        "max_blocks",
        "prefix_slots",
        "reported_probe",
    )

    def __init__(
        self,
        hashes: Sequence[int],
        tiers: tuple[HolderMasks, HolderMasks, HolderMasks],
        live_slots: int | None,
        *,
        prefix_slots: Sequence[PrefixSlots] = (),
        max_blocks: int | None = None,
    ) -> None:
        """Look at a chain.

        Args:
            hashes: its blocks.
            tiers: reported blocks of the GPU and of the host, and predicted blocks.
            live_slots: the slots that count; None: all do.
            prefix_slots: of these, those that report whole prefixes.
            max_blocks: the limit of blocks of a whole prefix to look at; None: all.
        """
        gpu, host, predicted = tiers
        self.hashes = hashes
        self.prefix_slots = prefix_slots
        self.max_blocks = len(hashes) if max_blocks is None else max_blocks
        self.gpu_probe = _make_probe(hashes, [gpu], live_slots)
        self.reported_probe = (
            _make_probe(hashes, [gpu, host], live_slots) if host.entries else self.gpu_probe
        )
        self.expected_probe = self.reported_probe
        if predicted.entries:
            self.expected_probe = _make_probe(hashes, [gpu, host, predicted], live_slots)

    def leading_blocks(self, probe: Probe, bit: int) -> int:
        """How many leading blocks one slot holds."""
        for mark in self.prefix_slots:
            if mark.slots & bit:
                levels = self._prefix_levels(probe, PrefixSlots(mark.lookahead_blocks, bit))
                return levels[0].blocks if levels else 0
        if not probe(0) & bit:
            return 0
        return bisect_left(range(len(self.hashes)), 1, key=lambda n: not probe(n) & bit)

    def levels(self, probe: Probe) -> tuple[list[Level], bool]:
        """Where holders drop out, the deepest first; and whether the chain was seen broken."""
        if self.prefix_slots:
            return self._mixed_levels(probe)
        levels = find_levels(probe, len(self.hashes))
        if levels is None:
            return scan_levels(probe, len(self.hashes)), True
        return levels, False

    def _mixed_levels(self, probe: Probe) -> tuple[list[Level], bool]:
        """The same where some slots tell of whole prefixes."""
        prefix_bits = sum(mark.slots for mark in self.prefix_slots)

        def unmarked(position: int) -> int:
            return probe(position) & ~prefix_bits

        levels = find_levels(unmarked, len(self.hashes))
        has_hole = levels is None
        if levels is None:
            levels = scan_levels(unmarked, len(self.hashes))
        for mark in self.prefix_slots:
            levels += self._prefix_levels(probe, mark)
        levels.sort(reverse=True)
        slots_so_far = 0
        merged: list[Level] = []
        for blocks, slots in levels:  # so that each has those of all before it
            slots_so_far |= slots
            if merged and merged[-1].blocks == blocks:
                merged.pop()
            merged.append(Level(blocks, slots_so_far))
        return merged, has_hole

    def _prefix_levels(self, probe: Probe, group: PrefixSlots) -> list[Level]:
        """The longest prefix that each of these slots tells of, the longest first."""
        lookahead, remaining = group
        last = min(len(self.hashes), self.max_blocks)
        levels: list[Level] = []
        for end in range(last, lookahead, -1):
            if not remaining:
                break
            if holders := probe(end - 1) & remaining:
                levels.append(Level(end - lookahead, holders))
                remaining ^= holders
        return levels


def find_levels(probe: Probe, length: int) -> list[Level] | None:
    """Where holders drop out, the deepest first; None when the chain is seen to be broken."""
    levels: list[Level] = []
    probed = [(length, 0)]  # probes beyond `low`, the nearest last; past the end there is no holder
    low, low_slots = 0, probe(0)
    while low_slots:
        high, high_slots = probed[-1]
        if high_slots == low_slots:
            low = high
            probed.pop()
        elif high - low == 1:
            levels.append(Level(high, low_slots))
            low, low_slots = high, high_slots
            probed.pop()
        else:
            middle = (low + high) // 2
            middle_slots = probe(middle)
            if middle_slots | low_slots != low_slots or high_slots | middle_slots != middle_slots:
                return None
            probed.append((middle, middle_slots))
    levels.reverse()
    return levels


def scan_levels(probe: Probe, length: int) -> list[Level]:
    """The same, by looking at every block: right after any eviction."""
    levels: list[Level] = []
    holders = probe(0)
    for position in range(1, length):
        if not holders:
            break
        remaining = holders & probe(position)
        if remaining != holders:
            levels.append(Level(position, holders))
            holders = remaining
    if holders:
        levels.append(Level(length, holders))
    levels.reverse()
    return levels


class PrefixHits:
    """The answer to one lookup; it reads the index, so it is valid until that changes."""

    __slots__ = (
        "_by_bit",
        "_chain",
        "_expected_levels",
        "_gpu_levels",
        "_now_s",
        "_records",
        "_reported_levels",
        "_rng",
        "_top_holders",
        "_top_holders_limit",
        "has_hole",
    )

    def __init__(
        self,
        chain: Chain,
        now_s: float,
        *,
        records: Mapping[str, ReplicaRecord],
        by_bit: Mapping[int, str],
        rng: Random,
    ) -> None:
        self._chain = chain
        self._now_s = now_s
        self._records = records
        self._by_bit = by_bit
        self._rng = rng
        self._expected_levels, self.has_hole = chain.levels(chain.expected_probe)
        """`has_hole`: an eviction was seen to have left a hole in the chain."""
        # Found when they are asked for.
        self._top_holders: list[str] = []
        self._top_holders_limit = 0
        self._reported_levels = (
            self._expected_levels if chain.reported_probe is chain.expected_probe else None
        )
        self._gpu_levels = (
            self._reported_levels if chain.gpu_probe is chain.reported_probe else None
        )

    def of(self, replica_id: str) -> Hit:
        """The hit of one replica; `NO_HIT` when it holds nothing or is unknown."""
        record = self._records.get(replica_id)
        if record is None:
            return NO_HIT
        bit = record.bit
        for blocks, held in self._expected_levels:
            if held & bit:
                return self._hit(record, blocks)
        return NO_HIT

    def holders(self, limit: int) -> Sequence[str]:
        """Up to `limit` replicas that hold something, those that hold most first."""
        if limit > self._top_holders_limit:
            self._top_holders, self._top_holders_limit = self._find_top_holders(limit), limit
        return self._top_holders[:limit]

    def depths(self) -> Sequence[int]:
        """The different numbers of leading blocks that replicas hold, the most first."""
        return [level.blocks for level in self._expected_levels]

    def _hit(self, record: ReplicaRecord, blocks: int) -> Hit:
        chain, bit = self._chain, record.bit
        if self._reported_levels is None:
            self._reported_levels, _ = chain.levels(chain.reported_probe)
        reported_blocks = min(blocks, _depth(self._reported_levels, bit))
        host_blocks = 0
        if chain.gpu_probe is not chain.reported_probe:
            if self._gpu_levels is None:
                self._gpu_levels, _ = chain.levels(chain.gpu_probe)
            host_blocks = reported_blocks - min(reported_blocks, _depth(self._gpu_levels, bit))
        if reported_blocks == blocks:
            age_s = self._now_s - record.confirmed_at_s
            return Hit(blocks, host_blocks, HitSource.REPORTED, max(0.0, age_s))
        newest = record.predictions.newest_by_block.get(chain.hashes[blocks - 1])
        known_at_s = record.confirmed_at_s if newest is None else newest.at_s
        return Hit(blocks, host_blocks, HitSource.PREDICTED, max(0.0, self._now_s - known_at_s))

    def _find_top_holders(self, limit: int) -> list[str]:
        replica_ids: list[str] = []
        deeper_slots = 0
        for _, held in self._expected_levels:
            new_slots = held ^ deeper_slots  # holders of more hold this much
            deeper_slots = held
            while new_slots and len(replica_ids) < limit:
                bit = self._random_bit(new_slots)
                new_slots ^= bit
                # A caller may ask after the index has changed, for a replica that is gone.
                if (replica_id := self._by_bit.get(bit)) is not None:
                    replica_ids.append(replica_id)
        return replica_ids

    def _random_bit(self, bits: int) -> int:
        """One of the bits: the first at or above a random place."""
        above = bits >> (start := int(self._rng.random() * bits.bit_length()))
        return (above & -above) << start


def _depth(levels: Sequence[Level], bit: int) -> int:
    for blocks, held in levels:
        if held & bit:
            return blocks
    return 0


def _make_probe(
    hashes: Sequence[int], layers: Sequence[HolderMasks], live_slots: int | None
) -> Probe:
    sources = [layer.holders_of for layer in layers if layer.entries] or [layers[0].holders_of]
    match sources:
        case [one]:
            probe: Probe = lambda n: one(hashes[n])  # noqa: E731 - one of several
        case [one, two]:
            probe = lambda n: one(hashes[n]) | two(hashes[n])  # noqa: E731
        case _:
            one, two, three = sources
            probe = lambda n: one(hashes[n]) | two(hashes[n]) | three(hashes[n])  # noqa: E731
    # Predicted blocks are of live slots only.
    return probe if live_slots is None else lambda n: probe(n) & live_slots
