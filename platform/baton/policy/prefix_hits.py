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
from dataclasses import dataclass
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


@dataclass(slots=True)
class Chain:
    """Who holds the blocks of one chain: in the KV cache, in any tier, or is expected to."""

    hashes: Sequence[int]
    gpu: Probe
    reported: Probe
    held: Probe

    @classmethod
    def over(
        cls,
        hashes: Sequence[int],
        tiers: tuple[HolderMasks, HolderMasks, HolderMasks],
        live: int | None,
    ) -> Chain:
        """A view of a chain.

        Args:
            hashes: its blocks.
            tiers: what is reported of the GPU, what of the host, what is predicted.
            live: the slots that count; None: all do.
        """
        gpu_masks, host_masks, predicted_masks = tiers
        gpu = _probe(hashes, gpu_masks, live)
        reported = _either(gpu, _probe(hashes, host_masks, live)) if host_masks.entries else gpu
        held = reported
        if predicted_masks.entries:
            held = _either(reported, _probe(hashes, predicted_masks, None))
        return cls(hashes, gpu, reported, held)

    def leading(self, probe: Probe, bit: int, *, scan: bool = False) -> int:
        """How many leading blocks one slot holds, by bisection or by looking at each."""
        length = len(self.hashes)
        if scan:
            return next((n for n in range(length) if not probe(n) & bit), length)
        return bisect_left(range(length), 1, key=lambda n: not probe(n) & bit)


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

    __slots__ = ("_by_bit", "_chain", "_holders", "_levels", "_now_s", "_rng", "broken")

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
        levels = find_levels(chain.held, len(chain.hashes))
        self.broken = levels is None
        """An eviction was seen to have left a hole in the chain."""
        self._levels = scan_levels(chain.held, len(chain.hashes)) if levels is None else levels

    def of(self, replica_id: str) -> Hit:
        """What one replica holds; `NO_HIT` when nothing, or when it is unknown."""
        holder = self._holders.get(replica_id)
        if holder is None:
            return NO_HIT
        for blocks, held in self._levels:
            if held & holder.bit:
                return self._hit(holder, blocks)
        return NO_HIT

    def holders(self, limit: int) -> Sequence[str]:
        """Up to `limit` replicas that hold something, those that hold most first."""
        found: list[str] = []
        seen = 0
        for _, held in self._levels:
            fresh = held & ~seen
            seen = held
            while fresh and len(found) < limit:
                bit = self._any_of(fresh)
                found.append(self._by_bit[bit])
                fresh ^= bit
            if len(found) >= limit:
                break
        return found

    def _any_of(self, bits: int) -> int:
        """One of the bits: the first at or above a random place."""
        above = bits >> (start := int(self._rng.random() * bits.bit_length()))
        return (above & -above) << start

    def _hit(self, holder: ReplicaRecord, blocks: int) -> Hit:
        chain, bit = self._chain, holder.bit
        all_reported = chain.held is chain.reported
        if not all_reported and not self.broken:
            all_reported = bool(chain.reported(blocks - 1) & bit)
        reported = blocks
        if not all_reported:
            reported = chain.leading(chain.reported, bit, scan=self.broken)
        host = 0
        if chain.gpu is not chain.reported:
            host = reported - chain.leading(chain.gpu, bit, scan=self.broken)
        source, since_s = HitSource.REPORTED, holder.vouched_at_s
        if reported < blocks:
            source = HitSource.PREDICTED
            prediction = holder.predictions.newest.get(chain.hashes[blocks - 1])
            since_s = since_s if prediction is None else prediction.at_s
        return Hit(blocks, host, source, max(0.0, self._now_s - since_s))


def _probe(hashes: Sequence[int], masks: HolderMasks, live: int | None) -> Probe:
    of = masks.of
    if live is None:
        return lambda position: of(hashes[position])
    return lambda position: of(hashes[position]) & live


def _either(one: Probe, other: Probe) -> Probe:
    return lambda position: one(position) | other(position)
