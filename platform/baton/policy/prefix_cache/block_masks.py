"""Block hash → bitmask of the slots that hold the block, for millions of blocks.

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

from collections.abc import Iterable
from itertools import cycle

_TABLE_BITS = 12
_TABLE_MASK = (1 << _TABLE_BITS) - 1
_WIDTHS = (6, 7, 8, 9, 10, 11)
"""Table entries per dictionary: sizes over nearly one doubling, which is what growth goes by."""
_MAX_POOLED_MASKS = 8192


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
