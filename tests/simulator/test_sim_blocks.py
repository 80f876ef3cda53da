from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.simulator.engine.blocks import BlockPool

TOTAL = 8


@dataclass(eq=False)
class SlowBlock:
    owners: int = 0
    block_hash: bytes | None = None
    given_back_at: int = 0


class SlowPool:
    """The same promises as BlockPool, kept by looking at every block every time."""

    def __init__(self) -> None:
        self.blocks = [SlowBlock() for _ in range(TOTAL)]
        self.clock = 0
        self.evicted: list[bytes] = []

    def match(self, hashes: list[bytes]) -> list[SlowBlock]:
        found = []
        for block_hash in hashes:
            same = [block for block in self.blocks if block.block_hash == block_hash]
            if not same:
                break
            found.append(same[0])
        return found

    def try_take(self, cached: list[SlowBlock], fresh: int) -> list[SlowBlock] | None:
        unowned = [b for b in self.blocks if not b.owners and b not in cached]
        if fresh > len(unowned):
            return None
        # Empty ones first, then the one given back longest ago.
        unowned.sort(key=lambda block: (block.block_hash is not None, block.given_back_at))
        for block in unowned[:fresh]:
            if block.block_hash is not None:
                self.evicted.append(block.block_hash)
            block.block_hash = None
        taken = [*cached, *unowned[:fresh]]
        for block in taken:
            block.owners += 1
        return taken

    def give_back(self, blocks: list[SlowBlock]) -> None:
        for block in reversed(blocks):
            self.clock += 1
            block.owners -= 1
            block.given_back_at = self.clock

    def remember(self, block: SlowBlock, block_hash: bytes) -> SlowBlock:
        equal = [other for other in self.blocks if other.block_hash == block_hash]
        if not equal or equal == [block]:
            block.block_hash = block_hash
            return block
        block.owners -= 1
        equal[0].owners += 1
        return equal[0]


def chain(prompt: list[int]) -> list[bytes]:
    """Block hashes that say all that is before them."""
    return [bytes(prompt[: end + 1]) for end in range(len(prompt))]


class PoolAgainstSlowTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.twin = SlowPool()
        self.held: list[tuple[list[bytes], list[int], list[SlowBlock]]] = []

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5), growth=st.integers(0, 2))
    def take(self, prompt: list[int], growth: int) -> None:
        hashes = chain(prompt)
        cached, twin_cached = self.pool.match(hashes), self.twin.match(hashes)
        assert len(cached) == len(twin_cached)
        fresh = len(prompt) - len(cached) + growth
        blocks = self.pool.try_allocate(cached, fresh)
        twin_blocks = self.twin.try_take(twin_cached, fresh)
        assert (blocks is None) == (twin_blocks is None)
        if blocks is not None and twin_blocks is not None:
            self.held.append((hashes, blocks, twin_blocks))
        assert list(self.pool.pop_evicted()) == self.twin.evicted
        self.twin.evicted = []

    @rule(index=st.integers(0, 10), full=st.integers(0, 5))
    def fill(self, index: int, full: int) -> None:
        if self.held:
            hashes, blocks, twin_blocks = self.held[index % len(self.held)]
            for position in range(min(full, len(hashes))):
                own, twin_own = blocks[position], twin_blocks[position]
                blocks[position] = self.pool.cache_full_block(own, hashes[position])
                twin_blocks[position] = self.twin.remember(twin_own, hashes[position])
                assert (blocks[position] == own) == (twin_blocks[position] is twin_own)

    @rule(index=st.integers(0, 10))
    def give_back(self, index: int) -> None:
        if self.held:
            _, blocks, twin_blocks = self.held.pop(index % len(self.held))
            self.pool.free(blocks)
            self.twin.give_back(twin_blocks)

    @invariant()
    def blocks_are_conserved_and_equal_the_twins(self) -> None:
        pool, twin = self.pool, self.twin.blocks
        pool.check_integrity([blocks for _, blocks, _ in self.held])
        assert len(pool._empty) + len(pool._idle) + pool.used_blocks == TOTAL
        assert pool.used_blocks == sum(1 for block in twin if block.owners)
        assert len(pool._idle) == sum(1 for b in twin if not b.owners and b.block_hash)

    @invariant()
    def a_cached_blocks_predecessors_are_cached(self) -> None:
        cached = self.pool._block_of
        assert all(block_hash[:-1] in cached for block_hash in cached if len(block_hash) > 1)


TestPoolAgainstSlowTwin = PoolAgainstSlowTwin.TestCase
TestPoolAgainstSlowTwin.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_taking_without_room_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.try_allocate((), 3)
    assert held is not None
    assert pool.try_allocate((), 2) is None
    assert pool.used_blocks == 3
    pool.check_integrity([held])


def test_integrity_notices_a_block_that_nobody_admits_to() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate((), 1) is not None
    with pytest.raises(AssertionError, match="owners are"):
        pool.check_integrity([])
