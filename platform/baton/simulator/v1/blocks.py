"""The KV blocks of a counted engine: how many are empty, and which hashes are cached.

Theory of operation: a block is *empty*, *private* (used by one run, and nothing that anyone could
look for), *shared* (in the prefix cache and used by one run or more) or *idle* (in the prefix
cache, used by nobody). Empty and private ones are only counted; cached ones are known by their
chained hashes. Taking blocks uses up empty ones first, then evicts the idle one that was given back
longest ago, as vLLM's free queue does. Runs give their blocks back tail first and a block is only
shared behind shared ones, so whoever uses a block uses all before it: of any chain the cached
blocks are a beginning, and of those the shared ones are. So hits are found by bisection.
empty + private + shared + idle = total, always.

A cached block has one number: how many use it, or, when idle, minus the number of the return that
made it idle. Returns wait in line whole; a block that was used again since has another number, and
is passed over. So most things are done for a chain at once rather than block by block.

Unlike in vLLM, equal blocks are one: a run that computes what is cached already uses the cached
block and gives its own back at once, where vLLM keeps the copy until the run ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate, pack_hashes


class V1BlockPool:
    """Blocks by count, the prefix cache by hashes, and what has changed in it."""

    __slots__ = (
        "_cached",
        "_changes",
        "_eviction_queue",
        "_idle",
        "_return_count",
        "_returned_blocks",
        "empty",
        "sequence",
        "total",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.empty = total
        self.sequence = 0
        """The number of the last update that was taken."""
        self._cached: dict[int, int] = {}
        """Users of each cached block, or minus the number of its return."""
        self._idle = 0
        self._return_count = 0
        self._eviction_queue: deque[tuple[int, list[int]]] = deque()
        """Returns that may still have idle blocks: minus their number, and their blocks, the next
        to be evicted last."""
        self._returned_blocks = 0
        """Blocks in those, idle or not."""
        self._changes: dict[int, bool] = {}
        """Blocks that became cached (True) or ceased to be since the last update."""

    @property
    def available(self) -> int:
        """How many blocks `allocate` could hand out."""
        return self.empty + self._idle

    @property
    def used(self) -> int:
        """Private and shared blocks; what is merely cached is free for the taking."""
        return self.total - self.empty - self._idle

    @property
    def cached_blocks(self) -> int:
        """Shared and idle blocks."""
        return len(self._cached)

    # ------------------------------------------------------------------ the prefix cache
    def count_cached(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many leading blocks of a chain are cached, at most `limit`, and how many are idle."""
        users_of = self._cached.get
        cached = _count_leading(limit, lambda index: hashes[index] in self._cached)
        shared = _count_leading(cached, lambda index: users_of(hashes[index], 0) > 0)
        return cached, cached - shared

    def touch(self, hashes: Sequence[int]) -> None:
        """Use blocks that are cached, from the beginning of a chain on."""
        cached = self._cached
        for hash_ in hashes:
            users = cached[hash_]
            if users > 0:
                cached[hash_] = users + 1
            else:
                cached[hash_] = 1
                self._idle -= 1

    def cache_full_blocks(self, hashes: Sequence[int]) -> None:
        """Put private blocks, full now and next in their chain, into the prefix cache."""
        if not self._cached.keys().isdisjoint(hashes):
            copies = [hash_ for hash_ in hashes if hash_ in self._cached]
            hashes = [hash_ for hash_ in hashes if hash_ not in self._cached]
            self.touch(copies)
            self.empty += len(copies)
        self._cached.update(dict.fromkeys(hashes, 1))
        self._record_change(hashes, stored=True)

    # ------------------------------------------------------------------ in and out of use
    def allocate(self, blocks: int) -> None:
        """Make so many blocks private; there must be as many `available`."""
        evicted = blocks - self.empty
        if evicted <= 0:
            self.empty -= blocks
            return
        self.empty = 0
        self._evict(evicted)

    def free(self, hashes: Sequence[int], private: int) -> None:
        """End one run's use of a chain's shared blocks, and of its private ones."""
        self.empty += private
        if not hashes:
            return
        cached = self._cached
        first_unshared = _count_leading(len(hashes), lambda index: cached[hashes[index]] > 1)
        for hash_ in hashes[:first_unshared]:
            cached[hash_] -= 1
        unshared = list(hashes[first_unshared:])
        if unshared:
            self._return_count += 1
            cached.update(dict.fromkeys(unshared, -self._return_count))
            self._eviction_queue.append((-self._return_count, unshared))
            self._idle += len(unshared)
            self._returned_blocks += len(unshared)
            if self._returned_blocks > 2 * self.total:
                self._compact_eviction_queue()

    def _evict(self, blocks: int) -> None:
        cached, evicted = self._cached, []
        self._idle -= blocks
        while blocks:
            number, returned = self._eviction_queue[0]
            while blocks and returned:
                one = returned.pop()
                self._returned_blocks -= 1
                if cached.get(one) == number:
                    del cached[one]
                    evicted.append(one)
                    blocks -= 1
            if not returned:
                self._eviction_queue.popleft()
        self._record_change(evicted, stored=False)

    def _compact_eviction_queue(self) -> None:
        """Leave only what is idle in line: at most half of it is, so this is paid for."""
        entry_of = self._cached.get
        live_returns = (
            (number, [value for value in returned if entry_of(value) == number])
            for number, returned in self._eviction_queue
        )
        self._eviction_queue = deque(returned for returned in live_returns if returned[1])
        self._returned_blocks = self._idle

    # ------------------------------------------------------------------ what others are told
    @property
    def has_update(self) -> bool:
        """Whether `pop_update` would have anything to say."""
        return bool(self._changes)

    def pop_update(self) -> CacheUpdate | None:
        """What became of blocks since this was last called; None when nothing did."""
        if not self._changes:
            return None
        removed = [value for value, stored in self._changes.items() if not stored]
        stored = [value for value, stored in self._changes.items() if stored]
        self._changes = {}
        self.sequence += 1
        changes = []
        if removed:
            changes.append(CacheChange(CacheChangeKind.REMOVED, pack_hashes(removed)))
        if stored:
            changes.append(CacheChange(CacheChangeKind.STORED, pack_hashes(stored)))
        return CacheUpdate(self.sequence, tuple(changes))

    def snapshot(self) -> CacheUpdate:
        """All that is cached, parents before children."""
        cached_hashes = pack_hashes(self._cached)
        changes = (CacheChange(CacheChangeKind.STORED, cached_hashes),) if cached_hashes else ()
        return CacheUpdate(self.sequence, changes, is_snapshot=True)

    def users(self) -> dict[int, int]:
        """How many runs use each shared block."""
        return {value: users for value, users in self._cached.items() if users > 0}

    def idle_blocks(self) -> list[int]:
        """Cached blocks that nobody uses, those to be evicted first in front."""
        return [
            value
            for number, returned in self._eviction_queue
            for value in reversed(returned)
            if self._cached.get(value) == number
        ]

    def _record_change(self, hashes: Sequence[int], *, stored: bool) -> None:
        changes = self._changes
        if changes.keys().isdisjoint(hashes):
            changes.update(dict.fromkeys(hashes, stored))
            return
        for hash_ in hashes:  # what came and went in between was never there, and the reverse
            if hash_ in changes:
                del changes[hash_]
            else:
                changes[hash_] = stored


def _count_leading(limit: int, predicate: Callable[[int], bool]) -> int:
    """The first index below `limit` for which it does not hold, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if predicate(middle):
            low = middle + 1
        else:
            high = middle
    return low
