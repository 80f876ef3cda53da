"""How much of one chain of blocks each replica holds, found without looking at every block.

*Theory of operation.* Engines reuse a block only after all blocks before it, store them in that
order and evict the deepest first. So who holds block n is assumed to hold all before it: along the
chain, holders only drop out. Where the holders at both ends of a span are the same nothing changes
in between, so the few depths at which somebody drops out are found by bisection, in about
`log2(blocks)` probes each, however many replicas hold the prefix.

An eviction may break the assumption. When a probe finds a holder that a block before it lacks, the
chain is scanned from its start, which is exact. A hole that no probe falls into goes unnoticed:
then a replica is credited with blocks up to the deepest probed one that it does hold. It is never
credited with less than what it has, and no replica's hole spoils what is said of the others.

Replicas of hybrid models tell of whole prefixes, by their last block (`Marks`), and one says
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


class Marks(NamedTuple):
    """The slots that tell of whole prefixes, each by a block so far behind its end."""

    peek_blocks: int
    slots: int


class Level(NamedTuple):
    """The slots that hold at least so many leading blocks."""

    blocks: int
    held: int


class Chain:
    """Who holds the blocks of one chain: in the KV cache, in any tier, or is expected to."""

    __slots__ = ("gpu", "hashes", "held", "marks", "most_blocks", "reported")

    def __init__(
        self,
        hashes: Sequence[int],
        tiers: tuple[HolderMasks, HolderMasks, HolderMasks],
        live: int | None,
        *,
        marks: Sequence[Marks] = (),
        most_blocks: int | None = None,
    ) -> None:
        """Look at a chain.

        Args:
            hashes: its blocks.
            tiers: what is reported of the GPU, what of the host, what is predicted.
            live: the slots that count; None: all do.
            marks: of these, the ones that tell of whole prefixes.
            most_blocks: of a whole prefix, so many blocks are looked at; None: all.
        """
        gpu, host, predicted = tiers
        self.hashes = hashes
        self.marks = marks
        self.most_blocks = len(hashes) if most_blocks is None else most_blocks
        self.gpu = _probe(hashes, [gpu], live)
        self.reported = _probe(hashes, [gpu, host], live) if host.entries else self.gpu
        self.held = self.reported
        if predicted.entries:
            self.held = _probe(hashes, [gpu, host, predicted], live)

    def leading(self, probe: Probe, bit: int) -> int:
        """How many leading blocks one slot holds."""
        for mark in self.marks:
            if mark.slots & bit:
                found = self._marked(probe, Marks(mark.peek_blocks, bit))
                return found[0].blocks if found else 0
        if not probe(0) & bit:
            return 0
        return bisect_left(range(len(self.hashes)), 1, key=lambda n: not probe(n) & bit)

    def levels(self, probe: Probe) -> tuple[list[Level], bool]:
        """Where holders drop out, the deepest first; and whether the chain was seen broken."""
        if self.marks:
            return self._mixed_levels(probe)
        levels = find_levels(probe, len(self.hashes))
        if levels is None:
            return scan_levels(probe, len(self.hashes)), True
        return levels, False

    def _mixed_levels(self, probe: Probe) -> tuple[list[Level], bool]:
        """The same where some slots tell of whole prefixes."""
        marked = sum(mark.slots for mark in self.marks)

        def unmarked(position: int) -> int:
            return probe(position) & ~marked

        levels = find_levels(unmarked, len(self.hashes))
        broken = levels is None
        if levels is None:
            levels = scan_levels(unmarked, len(self.hashes))
        for mark in self.marks:
            levels += self._marked(probe, mark)
        levels.sort(reverse=True)
        held = 0
        joined: list[Level] = []
        for blocks, slots in levels:  # so that each has those of all before it
            held |= slots
            if joined and joined[-1].blocks == blocks:
                joined.pop()
            joined.append(Level(blocks, held))
        return joined, broken

    def _marked(self, probe: Probe, mark: Marks) -> list[Level]:
        """The longest prefix that each of these slots tells of, the longest first."""
        peek, left = mark
        last = min(len(self.hashes), self.most_blocks)
        found: list[Level] = []
        for end in range(last, peek, -1):
            if not left:
                break
            if held := probe(end - 1) & left:
                found.append(Level(end - peek, held))
                left ^= held
        return found


def find_levels(probe: Probe, length: int) -> list[Level] | None:
    """Where holders drop out, the deepest first; None when the chain is seen to be broken."""
    levels: list[Level] = []
    known = [(length, 0)]  # what was probed beyond `low`, the nearest last; past the end is nobody
    low, held = 0, probe(0)
    while held:
        high, there = known[-1]
        if there == held:
            low = high
            known.pop()
        elif high - low == 1:
            levels.append(Level(high, held))
            low, held = high, there
            known.pop()
        else:
            middle = (low + high) // 2
            mask = probe(middle)
            if mask | held != held or there | mask != mask:
                return None
            known.append((middle, mask))
    levels.reverse()
    return levels


def scan_levels(probe: Probe, length: int) -> list[Level]:
    """The same, by looking at every block: right whatever was evicted."""
    levels: list[Level] = []
    held = probe(0)
    for position in range(1, length):
        if not held:
            break
        still = held & probe(position)
        if still != held:
            levels.append(Level(position, held))
            held = still
    if held:
        levels.append(Level(length, held))
    levels.reverse()
    return levels


class PrefixHits:
    """The answer to one lookup; it reads the index, so it is valid until that changes."""

    __slots__ = (
        "_by_bit",
        "_chain",
        "_gpu",
        "_held",
        "_holders",
        "_named",
        "_named_limit",
        "_now_s",
        "_reported",
        "_rng",
        "broken",
    )

    def __init__(
        self,
        chain: Chain,
        now_s: float,
        *,
        holders: Mapping[str, ReplicaRecord],
        by_bit: Mapping[int, str],
        rng: Random,
    ) -> None:
        self._chain = chain
        self._now_s = now_s
        self._holders = holders
        self._by_bit = by_bit
        self._rng = rng
        self._held, self.broken = chain.levels(chain.held)
        """`broken`: an eviction was seen to have left a hole in the chain."""
        # Found when they are asked for.
        self._named: list[str] = []
        self._named_limit = 0
        self._reported = self._held if chain.reported is chain.held else None
        self._gpu = self._reported if chain.gpu is chain.reported else None

    def of(self, replica_id: str) -> Hit:
        """What one replica holds; `NO_HIT` when nothing, or when it is unknown."""
        holder = self._holders.get(replica_id)
        if holder is None:
            return NO_HIT
        bit = holder.bit
        for blocks, held in self._held:
            if held & bit:
                return self._hit(holder, blocks)
        return NO_HIT

    def holders(self, limit: int) -> Sequence[str]:
        """Up to `limit` replicas that hold something, those that hold most first."""
        if limit > self._named_limit:
            self._named, self._named_limit = self._name(limit), limit
        return self._named[:limit]

    def depths(self) -> Sequence[int]:
        """The different numbers of leading blocks that replicas hold, the most first."""
        return [level.blocks for level in self._held]

    def _hit(self, holder: ReplicaRecord, blocks: int) -> Hit:
        chain, bit = self._chain, holder.bit
        if self._reported is None:
            self._reported, _ = chain.levels(chain.reported)
        reported = min(blocks, _depth(self._reported, bit))
        host = 0
        if chain.gpu is not chain.reported:
            if self._gpu is None:
                self._gpu, _ = chain.levels(chain.gpu)
            host = reported - min(reported, _depth(self._gpu, bit))
        if reported == blocks:
            age_s = self._now_s - holder.vouched_at_s
            return Hit(blocks, host, HitSource.REPORTED, max(0.0, age_s))
        newest = holder.predictions.newest.get(chain.hashes[blocks - 1])
        since_s = holder.vouched_at_s if newest is None else newest.at_s
        return Hit(blocks, host, HitSource.PREDICTED, max(0.0, self._now_s - since_s))

    def _name(self, limit: int) -> list[str]:
        found: list[str] = []
        seen = 0
        for _, held in self._held:
            fresh = held ^ seen  # whoever holds more holds this much
            seen = held
            while fresh and len(found) < limit:
                bit = self._any_of(fresh)
                fresh ^= bit
                # Whoever still asks after the index has changed may ask for one that is gone.
                if (replica_id := self._by_bit.get(bit)) is not None:
                    found.append(replica_id)
        return found

    def _any_of(self, bits: int) -> int:
        """One of the bits: the first at or above a random place."""
        above = bits >> (start := int(self._rng.random() * bits.bit_length()))
        return (above & -above) << start


def _depth(levels: Sequence[Level], bit: int) -> int:
    for blocks, held in levels:
        if held & bit:
            return blocks
    return 0


def _probe(hashes: Sequence[int], layers: Sequence[HolderMasks], live: int | None) -> Probe:
    sources = [layer.of for layer in layers if layer.entries] or [layers[0].of]
    match sources:
        case [one]:
            probe: Probe = lambda n: one(hashes[n])  # noqa: E731 - one of several
        case [one, two]:
            probe = lambda n: one(hashes[n]) | two(hashes[n])  # noqa: E731
        case _:
            one, two, three = sources
            probe = lambda n: one(hashes[n]) | two(hashes[n]) | three(hashes[n])  # noqa: E731
    # Predicted blocks are of live slots only.
    return probe if live is None else lambda n: probe(n) & live
