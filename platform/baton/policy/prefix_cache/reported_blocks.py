"""What replicas said they hold, per tier, and the slots by which they are known.

*Theory of operation.* Nobody keeps a list of one replica's blocks: it would cost as much memory
again. Instead, a replica that leaves, or whose cache was emptied, gives up its slot. The slot is
*retired*: it no longer counts (`live` says which slots do) and its bits are swept out a part at a
time, a part whenever `sweep` is called. Only then is its number given out again. Bits that wait to
be swept still count as entries; whoever runs out of room sweeps to the end at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.domain.cache import CacheTier
from baton.policy.prefix_cache.block_masks import HolderMasks

_MIN_RETIRED_SLOTS = 64
"""Retired slots make every mask wider: so many, or as many as are in use, are let wait."""


class ReportedBlocks:
    """Which slots hold which blocks in which tier, and which slots are in use."""

    __slots__ = ("_all", "_free", "_slots", "_step", "_sweeping", "_tiers", "_waiting", "live")

    def __init__(self, predicted: HolderMasks) -> None:
        """Start with nothing.

        Args:
            predicted: other masks of the same slots, to be swept too.
        """
        self._tiers = {tier: HolderMasks() for tier in CacheTier}
        self._all = (*self._tiers.values(), predicted)
        self._free: list[int] = []
        self._slots = 0
        self._waiting = 0
        """Retired slots that the sweep under way began without."""
        self._sweeping = 0
        self._step = 0
        self.live = 0
        """The slots in use."""

    @property
    def entries(self) -> int:
        """Pairs of a slot and a block in a tier, those that wait to be swept among them."""
        return sum(masks.entries for masks in self._tiers.values())

    @property
    def retired(self) -> int:
        """Slots whose bits are still to be swept."""
        return self._waiting | self._sweeping

    def tier(self, tier: CacheTier) -> HolderMasks:
        """Who holds what in one tier; mind `live`."""
        return self._tiers[tier]

    def take_slot(self) -> int:
        """The bit of a slot that nobody uses, the lowest there is."""
        if self._free:
            self._free.sort(reverse=True)
            slot = self._free.pop()
        else:
            slot = self._slots
            self._slots += 1
        self.live |= 1 << slot
        return 1 << slot

    def retire_slot(self, bit: int) -> None:
        """Whatever this slot holds no longer counts."""
        self.live &= ~bit
        self._waiting |= bit
        allowed = max(_MIN_RETIRED_SLOTS, self.live.bit_count())
        if self.retired.bit_count() > allowed:
            self.sweep_all()

    def sweep(self) -> None:
        """Sweep one part, if there is something to sweep."""
        if not self._sweeping:
            if not self._waiting:
                return
            self._sweeping, self._waiting, self._step = self._waiting, 0, 0
        parts = 0
        for masks in self._all:
            parts = masks.shard_count
            if masks.entries:
                masks.sweep(self._step, self._sweeping)
        self._step += 1
        if self._step == parts:
            self._free += _slots_of(self._sweeping)
            self._sweeping = 0

    def sweep_all(self) -> None:
        """Sweep until no slot is retired."""
        while self.retired:
            self.sweep()

    def check_integrity(self) -> None:
        """Every slot is in use, free or retired; no bit is set but of slots in use or retired.

        Raises:
            AssertionError: it is not so.
        """
        free = sum(1 << slot for slot in self._free)
        known = self.live | self.retired
        assert self.live & self.retired == 0, "a retired slot is in use"
        assert free & known == 0, "a free slot is in use or retired"
        assert free | known == (1 << self._slots) - 1, "a slot is lost"
        for masks in self._all:
            entries = 0
            for block, held in masks.masks():
                assert held, f"block {block} is kept without a holder"
                assert held & known == held, f"block {block} is held by a free slot"
                entries += held.bit_count()
            assert entries == masks.entries, "entries are miscounted"


def _slots_of(bits: int) -> Iterable[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
