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
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from baton.domain.handoff import HitSource
from baton.policy.hits import NO_HIT, Hit
from baton.policy.holder_masks import HolderMasks
from baton.policy.index_record import ReplicaRecord

Probe = Callable[[int], int]
"""From the position of a block in a chain to the slots that hold it."""


class Level(NamedTuple):
    """The slots that hold at least so many leading blocks."""

    blocks: int
    held: int


class Chain:
    """Who holds the blocks of one chain: in the KV cache, in any tier, or is expected to."""

    __slots__ = ("gpu", "hashes", "held", "reported")

    def __init__(
        self,
        hashes: Sequence[int],
        tiers: tuple[HolderMasks, HolderMasks, HolderMasks],
        live: int | None,
    ) -> None:
        """Look at a chain.

        Args:
            hashes: its blocks.
            tiers: what is reported of the GPU, what of the host, what is predicted.
            live: the slots that count; None: all do.
        """
        gpu, host, predicted = tiers
        self.hashes = hashes
        self.gpu = _probe(hashes, [gpu], live)
        self.reported = _probe(hashes, [gpu, host], live) if host.entries else self.gpu
        self.held = self.reported
        if predicted.entries:
            self.held = _probe(hashes, [gpu, host, predicted], live)

    def leading(self, probe: Probe, bit: int) -> int:
        """How many leading blocks one slot holds."""
        if not probe(0) & bit:
            return 0
        return bisect_left(range(len(self.hashes)), 1, key=lambda n: not probe(n) & bit)

    def levels(self, probe: Probe) -> tuple[list[Level], bool]:
        """Where holders drop out, the deepest first; and whether the chain was seen broken."""
        levels = find_levels(probe, len(self.hashes))
        if levels is None:
            return scan_levels(probe, len(self.hashes)), True
        return levels, False


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
