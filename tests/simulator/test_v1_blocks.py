"""Counted blocks against lists of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.simulator.v1.blocks import CountedBlocks
from tests.simulator.v1_cores import Mirror

CHAINS = [[10, 11, 12, 13, 14], [10, 11, 22, 23, 24], [10, 31, 32, 33, 34], [41, 42, 43, 44, 45]]


class Listed:
    """Which blocks are used by how many, and the idle ones, the next to be evicted first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.users: dict[int, int] = {}
        self.idle: list[int] = []
        self.private = 0

    @property
    def empty(self) -> int:
        return self.total - len(self.users) - len(self.idle) - self.private

    def use(self, one: int) -> None:
        if one in self.idle:
            self.idle.remove(one)
        self.users[one] = self.users.get(one, 0) + 1

    def take(self, blocks: int) -> None:
        for _ in range(blocks - self.empty):
            self.idle.pop(0)
        self.private += blocks

    def publish(self, hashes: list[int]) -> None:
        for one in hashes:
            self.use(one)
            self.private -= 1

    def give_back(self, hashes: list[int], private: int) -> None:
        self.private -= private
        for one in reversed(hashes):
            self.users[one] -= 1
            if not self.users[one]:
                del self.users[one]
                self.idle.append(one)


@hypothesis_settings(max_examples=80)
@given(
    st.integers(8, 16),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), max_size=80),
)
def test_counted_blocks_are_as_listed_ones(total: int, acts: list[tuple[int, int, int]]) -> None:
    blocks, listed, mirror = CountedBlocks(total), Listed(total), Mirror()
    runs: list[tuple[list[int], int]] = []
    for which, length, own in acts:
        hashes = CHAINS[which][:length]
        cached, idle = blocks.cached(hashes, len(hashes))
        known = listed.users.keys() | set(listed.idle)
        assert cached == next((n for n, one in enumerate(hashes) if one not in known), len(hashes))
        assert idle == sum(one in listed.idle for one in hashes[:cached])
        fresh = length - cached + own
        if fresh + idle <= blocks.available and length:
            blocks.share(hashes[:cached])
            for one in hashes[:cached]:
                listed.use(one)
            for each in (blocks, listed):
                each.take(fresh)
            for each in (blocks, listed):
                each.publish(hashes[cached:])
            runs.append((hashes, own))
        elif runs:
            hashes, private = runs.pop(which % len(runs))
            for each in (blocks, listed):
                each.give_back(hashes, private)
        assert blocks.idle() == listed.idle
        assert blocks.users() == listed.users
        assert (blocks.empty, blocks.available) == (listed.empty, listed.empty + len(listed.idle))
        assert blocks.used == listed.private + len(listed.users)
        mirror.take(blocks.take_update())
        assert mirror.held == known_to(listed)


def known_to(listed: Listed) -> set[int]:
    return listed.users.keys() | set(listed.idle)


def test_computing_what_is_cached_gives_the_copy_back() -> None:
    blocks = CountedBlocks(10)
    blocks.take(4)
    blocks.publish([1, 2])
    blocks.publish([1, 2])
    assert (blocks.empty, blocks.users()) == (8, {1: 2, 2: 2})
    blocks.give_back([1, 2], 0)
    blocks.give_back([1, 2], 0)
    blocks.take(2)
    blocks.publish([1, 2])
    assert (blocks.empty, blocks.available, blocks.users()) == (8, 8, {1: 1, 2: 1})


def test_using_the_same_blocks_for_ever_takes_no_more_memory() -> None:
    blocks = CountedBlocks(10)
    blocks.take(5)
    blocks.publish([1, 2, 3, 4, 5])
    for _ in range(100):
        blocks.give_back([1, 2, 3, 4, 5], 0)
        blocks.share([1, 2, 3, 4, 5])
    assert sum(len(returned) for _, returned in blocks._returned) <= 25
    blocks.give_back([1, 2, 3, 4, 5], 0)
    assert blocks.idle() == [5, 4, 3, 2, 1]


def test_what_comes_and_goes_between_two_updates_is_not_told() -> None:
    blocks = CountedBlocks(2)
    blocks.take(2)
    blocks.publish([1, 2])
    blocks.give_back([1, 2], 0)
    blocks.take(2)
    assert not blocks.has_news
    assert blocks.take_update() is None
