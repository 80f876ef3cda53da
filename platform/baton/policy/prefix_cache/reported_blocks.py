"""The blocks that replicas reported, per tier, and the slots by which they are known.

*Theory of operation.* There is no list of one replica's blocks: it would cost as much memory again.
Instead, a replica that leaves, or whose cache was emptied, gives up its slot. The slot is
*retired*: it no longer counts (`live_slots` says which slots do) and its bits are swept out a part
at a time, a part whenever `sweep` is called. Only then is its number given out again. Bits that
wait to be swept still count as entries; a caller that runs out of room sweeps to the end at
once.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.domain.cache import CacheTier
from baton.policy.prefix_cache.block_masks import HolderMasks

_MIN_RETIRED_SLOTS = 64
"""Retired slots make every mask wider: this many, or as many as are in use, may wait."""


class ReportedBlocks:
    """Which slots hold which blocks in which tier, and which slots are in use."""

    __slots__ = (
        "_awaiting_sweep",
        "_free",
        "_slot_count",
        "_sweep_step",
        "_sweeping_slots",
        "_swept_masks",
        "_tiers",
        "live_slots",
    )

    def __init__(self, predicted: HolderMasks) -> None:
        """Start with nothing.

        Args:
            predicted: other masks of the same slots, to be swept too.
        """
        self._tiers = {tier: HolderMasks() for tier in CacheTier}
        self._swept_masks = (*self._tiers.values(), predicted)
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
        return sum(masks.entries for masks in self._tiers.values())

    @property
    def retired_slots(self) -> int:
        """Slots whose bits are still to be swept."""
        return self._awaiting_sweep | self._sweeping_slots

    def tier(self, tier: CacheTier) -> HolderMasks:
        """The holders of one tier's blocks; mind `live_slots`."""
        return self._tiers[tier]

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
