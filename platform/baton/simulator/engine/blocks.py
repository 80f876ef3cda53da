"""Paged KV memory: ref-counted blocks, and a prefix cache in unused blocks.

Theory of operation: a block is *empty*, *idle* (in the prefix cache, without owner) or *used* (by
one or more owners; once full, in the prefix cache too). empty + idle + used = total. Allocation
takes empty blocks first, then evicts the idle block that was freed longest ago. Owners free their
blocks tail first, and equal full blocks are merged, so an owner of a block owns all blocks before
it. A prompt's tail is evicted before its head, and a cached block's predecessors are cached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from baton.domain.kv_events import BlockHash


class BlockPool:
    """The KV blocks of one engine."""

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._empty = list(range(total_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * total_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._evicted: list[BlockHash] = []

    @property
    def available_blocks(self) -> int:
        """Number of blocks that `try_allocate` could take."""
        return len(self._empty) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one owner."""
        return self.total_blocks - self.available_blocks

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The cached blocks of the longest prefix of `hashes`; the caller does not own them yet."""
        cached_blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            cached_blocks.append(block)
        return cached_blocks

    def try_allocate(self, cached: Sequence[int], new_blocks: int) -> list[int] | None:
        """Own the `cached` blocks and `new_blocks` more; None, without a change, if it is full."""
        idle_hits = sum(1 for block in cached if not self._owners[block])
        if new_blocks > self.available_blocks - idle_hits:
            return None
        for block in cached:
            if not self._owners[block]:
                del self._idle[block]
            self._owners[block] += 1
        return [*cached, *(self._allocate_block() for _ in range(new_blocks))]

    def free(self, blocks: Sequence[int]) -> None:
        """End one owner's use of `blocks`, which are in prompt order."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def cache_full_block(self, block: int, block_hash: BlockHash) -> int:
        """Put a used, full block into the prefix cache and return the block to use from now on.

        If an equal block is cached already, that block is returned and the caller's own is freed.
        """
        cached = self._block_of.setdefault(block_hash, block)
        if cached == block:
            self._hash_of[block] = block_hash
            return block
        if not self._owners[cached]:
            del self._idle[cached]
        self._owners[cached] += 1
        self.free((block,))
        return cached

    def reset_cache(self) -> bool:
        """Empty the prefix cache; False, without a change, while any block is used."""
        if self.used_blocks:
            return False
        self._empty.extend(self._idle)
        self._idle.clear()
        self._hash_of.clear()
        self._block_of.clear()
        return True

    def pop_evicted(self) -> tuple[BlockHash, ...]:
        """Hashes evicted since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that the maps agree with each other and with the blocks that owners list."""
        owners = Counter(block for blocks in owned for block in blocks)
        expected_owners = [owners[block] for block in range(self.total_blocks)]
        expect(
            self._owners == expected_owners, f"owners are {self._owners}, counted {expected_owners}"
        )
        used = [block for block, count in enumerate(self._owners) if count]
        places = sorted([*self._empty, *self._idle, *used])
        expect(places == list(range(self.total_blocks)), f"blocks in no or two places: {places}")
        expect(all(block in self._hash_of for block in self._idle), "an idle block has no hash")
        expect(not any(block in self._hash_of for block in self._empty), "an empty block has one")
        expect({h: b for b, h in self._hash_of.items()} == self._block_of, "hash maps differ")

    def _allocate_block(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            block_hash = self._hash_of.pop(block)
            del self._block_of[block_hash]
            self._evicted.append(block_hash)
        self._owners[block] = 1
        return block


def expect(condition: bool, message: str) -> None:  # noqa: FBT001 - reads like an assert
    """Raise AssertionError with `message` unless `condition`; unlike `assert`, -O keeps it."""
    if not condition:
        raise AssertionError(message)
