"""Block hash → bitmask of the slots that hold the block, for millions of blocks; and lookups.

*Theory of operation.* A slot is a number that stands for a replica while it lives; `bit` is `1 <<
slot`. Most blocks have one holder and blocks of one chain tend to have the same holders, so masks
are shared objects: a mask that was met before is reused. The pool of masks is emptied when it is
full: sharing saves memory and is never needed for correctness.

The blocks are spread over many small dictionaries, for a dictionary that grows copies itself. At a
million blocks a single dictionary would stop the process for 30 to 70 ms; each small dictionary
takes less than one. They are of unequal width, so that they do not all grow at about the same
moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import NamedTuple

from baton.domain.cache import CacheTier

_TABLE_BITS = 12
_TABLE_MASK = (1 << _TABLE_BITS) - 1
_WIDTHS = (6, 7, 8, 9, 10, 11)
"""Table entries per dictionary: sizes over nearly one doubling, which is what growth goes by."""
_MAX_POOLED_MASKS = 8192
_MIN_RETIRED_SLOTS = 64
"""Retired slots make every mask wider: this many, or as many as are in use, may wait."""
_Probe = Callable[[int], int]
"""From the position of a block in a chain to the slots that hold it."""


class HolderMasks:
    """Which slots hold which blocks. Blocks are integers, of any value."""

    __slots__ = ("_pool", "_shards", "_table", "entries")

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = []
        self._table: list[dict[int, int]] = []
        for width in cycle(_WIDTHS):
            shard: dict[int, int] = {}
            self._shards.append(shard)
            self._table += [shard] * width
            if len(self._table) > _TABLE_MASK:
                break
        self._pool: dict[int, int] = {}
        self.entries = 0
        """Pairs of a slot and a block that it holds."""

    @property
    def shard_count(self) -> int:
        """How many steps `sweep` takes for all blocks."""
        return len(self._shards)

    def holders_of(self, block: int) -> int:
        """The slots that hold a block; 0 without any."""
        return self._table[block & _TABLE_MASK].get(block, 0)

    def unique_blocks(self) -> int:
        """How many different blocks are held."""
        return sum(map(len, self._shards))

    def masks(self) -> Iterable[tuple[int, int]]:
        """All blocks and their holders; for checks."""
        return (item for shard in self._shards for item in shard.items())

    def add(self, bit: int, blocks: Iterable[int]) -> int:
        """Note that a slot holds these blocks; returns how many it did not hold before."""
        table = self._table
        added = before = after = 0
        for block in blocks:
            shard = table[block & _TABLE_MASK]
            mask = shard.get(block)
            if mask is None:
                shard[block] = bit
            elif mask is before:  # as the block before it
                shard[block] = after
            elif mask & bit:
                continue
            else:
                before, after = mask, self._interned(mask | bit)
                shard[block] = after
            added += 1
        self.entries += added
        return added

    def discard(self, bit: int, blocks: Iterable[int]) -> int:
        """Note that a slot no longer holds these blocks; returns how many it did hold."""
        table = self._table
        removed = before = after = 0
        for block in blocks:
            shard = table[block & _TABLE_MASK]
            mask = shard.get(block)
            if mask is None or not mask & bit:
                continue
            if mask == bit:
                del shard[block]
            else:
                if mask is not before:
                    before, after = mask, self._interned(mask ^ bit)
                shard[block] = after
            removed += 1
        self.entries -= removed
        return removed

    def sweep(self, step: int, bits: int) -> None:
        """Take all of `bits` out of one part of the blocks: part `step` of `shard_count`."""
        shard = self._shards[step]
        for block, mask in [item for item in shard.items() if item[1] & bits]:
            self.entries -= (mask & bits).bit_count()
            remaining = mask & ~bits
            if remaining:
                shard[block] = self._interned(remaining)
            else:
                del shard[block]

    def _interned(self, mask: int) -> int:
        if len(self._pool) >= _MAX_POOLED_MASKS:
            self._pool.clear()
        return self._pool.setdefault(mask, mask)


class ReportedBlocks:
    """Which slots hold which blocks in which tier, and which slots are in use.

    Theory of operation. There is no list of one replica's blocks: it would cost as much memory
    again. Instead, a replica that leaves, or whose cache was emptied, gives up its slot. The slot
    is *retired*: it no longer counts (`live_slots` says which slots do) and its bits are swept out
    a part at a time, a part whenever `sweep` is called. Only then is its number given out again.
    Bits that wait to be swept still count as entries; a caller that runs out of room sweeps to the
    end at once.
    """

    __slots__ = (
        "_awaiting_sweep",
        "_free",
        "_slot_count",
        "_sweep_step",
        "_sweeping_slots",
        "_swept_masks",
        "live_slots",
        "tiers",
    )

    def __init__(self, predicted: HolderMasks) -> None:
        """Start with nothing.

        Args:
            predicted: other masks of the same slots, to be swept too.
        """
        self.tiers = {tier: HolderMasks() for tier in CacheTier}
        """The holders of each tier's blocks; only `live_slots` count."""
        self._swept_masks = (*self.tiers.values(), predicted)
        self._free: list[int] = []
        self._slot_count = 0
        self._awaiting_sweep = 0
        """Retired slots that the sweep under way began without."""
        self._sweeping_slots = 0
        self._sweep_step = 0
        self.live_slots = 0
        """The slots in use."""

    @property
    def entries(self) -> int:
        """Pairs of a slot and a block in a tier, those that wait to be swept among them."""
        return sum([masks.entries for masks in self.tiers.values()])

    @property
    def retired_slots(self) -> int:
        """Slots whose bits are still to be swept."""
        return self._awaiting_sweep | self._sweeping_slots

    def allocate_slot(self) -> int:
        """The bit of the lowest unused slot."""
        if self._free:
            self._free.sort(reverse=True)
            slot = self._free.pop()
        else:
            slot = self._slot_count
            self._slot_count += 1
        self.live_slots |= 1 << slot
        return 1 << slot

    def retire_slot(self, bit: int) -> None:
        """Retire a slot: its blocks no longer count."""
        self.live_slots &= ~bit
        self._awaiting_sweep |= bit
        allowed = max(_MIN_RETIRED_SLOTS, self.live_slots.bit_count())
        if self.retired_slots.bit_count() > allowed:
            self.sweep_all()

    def sweep(self) -> None:
        """Sweep one part, if there is something to sweep."""
        if not self._sweeping_slots:
            if not self._awaiting_sweep:
                return
            self._sweeping_slots, self._awaiting_sweep, self._sweep_step = (
                self._awaiting_sweep,
                0,
                0,
            )
        parts = 0
        for masks in self._swept_masks:
            parts = masks.shard_count
            if masks.entries:
                masks.sweep(self._sweep_step, self._sweeping_slots)
        self._sweep_step += 1
        if self._sweep_step == parts:
            self._free += _slots_of(self._sweeping_slots)
            self._sweeping_slots = 0

    def sweep_all(self) -> None:
        """Sweep until no slot is retired."""
        while self.retired_slots:
            self.sweep()

    def check_integrity(self) -> None:
        """Every slot is in use, free or retired; no bit is set but of slots in use or retired.

        Raises:
            AssertionError: it is not so.
        """
        free = sum(1 << slot for slot in self._free)
        used_slots = self.live_slots | self.retired_slots
        assert self.live_slots & self.retired_slots == 0, "a retired slot is in use"
        assert free & used_slots == 0, "a free slot is in use or retired"
        assert free | used_slots == (1 << self._slot_count) - 1, "a slot is lost"
        for masks in self._swept_masks:
            entries = 0
            for block, mask in masks.masks():
                assert mask, f"block {block} is kept without a holder"
                assert mask & used_slots == mask, f"block {block} is held by a free slot"
                entries += mask.bit_count()
            assert entries == masks.entries, "entries are miscounted"


def _slots_of(bits: int) -> Iterable[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


class PrefixSlots(NamedTuple):
    """The slots that tell of whole prefixes, each by a block so far behind its end."""

    lookahead_blocks: int
    slots: int


class Level(NamedTuple):
    """The slots that hold at least this number of leading blocks."""

    blocks: int
    slots: int


class Chain:
    """The holders of the blocks of one chain: in the KV cache, in any tier, or expected.

    Theory of operation. Engines reuse a block only after all blocks before it, and evict the
    deepest first. So a holder of block n is assumed to hold all before it. Along the chain, holders
    only drop out. Where both ends of a span have the same holders, nothing changes in between. So
    the depths at which holders drop out are found by bisection, in about `log2(blocks)` probes
    each.

    An eviction may leave a hole. When a probe finds a holder that a block before it lacks, the
    chain is scanned from its start, which is exact. A hole that no probe meets is not noticed: its
    replica then counts with the blocks up to the deepest probed block that it holds. No replica
    counts with too little, and no hole changes the result of another.

    Replicas of hybrid models report whole prefixes, by their last block (`PrefixSlots`). For those
    the chain is scanned from its end, with one probe a block.
    """

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

    def leading_blocks(self, probe: _Probe, bit: int) -> int:
        """How many leading blocks one slot holds."""
        for mark in self.prefix_slots:
            if mark.slots & bit:
                levels = self._prefix_levels(probe, PrefixSlots(mark.lookahead_blocks, bit))
                return levels[0].blocks if levels else 0
        if not probe(0) & bit:
            return 0
        return bisect_left(range(len(self.hashes)), 1, key=lambda n: not probe(n) & bit)

    def levels(self, probe: _Probe) -> tuple[list[Level], bool]:
        """Where holders drop out, the deepest first; and whether the chain was seen broken."""
        if self.prefix_slots:
            return self._mixed_levels(probe)
        levels = find_levels(probe, len(self.hashes))
        if levels is None:
            return scan_levels(probe, len(self.hashes)), True
        return levels, False

    def _mixed_levels(self, probe: _Probe) -> tuple[list[Level], bool]:
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

    def _prefix_levels(self, probe: _Probe, group: PrefixSlots) -> list[Level]:
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


def find_levels(probe: _Probe, length: int) -> list[Level] | None:
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


def scan_levels(probe: _Probe, length: int) -> list[Level]:
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


def _make_probe(
    hashes: Sequence[int], layers: Sequence[HolderMasks], live_slots: int | None
) -> _Probe:
    sources = [layer.holders_of for layer in layers if layer.entries] or [layers[0].holders_of]
    match sources:
        case [one]:
            probe: _Probe = lambda n: one(hashes[n])  # noqa: E731 - one of several
        case [one, two]:
            probe = lambda n: one(hashes[n]) | two(hashes[n])  # noqa: E731
        case _:
            one, two, three = sources
            probe = lambda n: one(hashes[n]) | two(hashes[n]) | three(hashes[n])  # noqa: E731
    # Predicted blocks are of live slots only.
    return probe if live_slots is None else lambda n: probe(n) & live_slots
