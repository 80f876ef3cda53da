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


class CountedBlocks:
    """Blocks by count, the prefix cache by hashes, and what has changed in it."""

    __slots__ = (
        "_cached",
        "_idle",
        "_news",
        "_queued",
        "_returned",
        "_returns",
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
        self._returns = 0
        self._returned: deque[tuple[int, list[int]]] = deque()
        """Returns that may still have idle blocks: minus their number, and their blocks, the next
        to be evicted last."""
        self._queued = 0
        """Blocks in those, idle or not."""
        self._news: dict[int, bool] = {}
        """Blocks that became cached (True) or ceased to be since the last update."""

    @property
    def available(self) -> int:
        """How many blocks `take` could hand out."""
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
    def cached(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many leading blocks of a chain are cached, at most `limit`, and how many are idle."""
        number_of = self._cached.get
        cached = _leading(limit, lambda index: hashes[index] in self._cached)
        shared = _leading(cached, lambda index: number_of(hashes[index], 0) > 0)
        return cached, cached - shared

    def share(self, hashes: Sequence[int]) -> None:
        """Use blocks that are cached, from the beginning of a chain on."""
        cached = self._cached
        for one in hashes:
            users = cached[one]
            if users > 0:
                cached[one] = users + 1
            else:
                cached[one] = 1
                self._idle -= 1

    def publish(self, hashes: Sequence[int]) -> None:
        """Put private blocks, full now and next in their chain, into the prefix cache."""
        if not self._cached.keys().isdisjoint(hashes):
            copies = [one for one in hashes if one in self._cached]
            hashes = [one for one in hashes if one not in self._cached]
            self.share(copies)
            self.empty += len(copies)
        self._cached.update(dict.fromkeys(hashes, 1))
        self._note(hashes, stored=True)

    # ------------------------------------------------------------------ in and out of use
    def take(self, blocks: int) -> None:
        """Make so many blocks private; there must be as many `available`."""
        evicted = blocks - self.empty
        if evicted <= 0:
            self.empty -= blocks
            return
        self.empty = 0
        self._evict(evicted)

    def give_back(self, hashes: Sequence[int], private: int) -> None:
        """End one run's use of a chain's shared blocks, and of its private ones."""
        self.empty += private
        if not hashes:
            return
        cached = self._cached
        first_alone = _leading(len(hashes), lambda index: cached[hashes[index]] > 1)
        for one in hashes[:first_alone]:
            cached[one] -= 1
        alone = list(hashes[first_alone:])
        if alone:
            self._returns += 1
            cached.update(dict.fromkeys(alone, -self._returns))
            self._returned.append((-self._returns, alone))
            self._idle += len(alone)
            self._queued += len(alone)
            if self._queued > 2 * self.total:
                self._forget_stale()

    def _evict(self, blocks: int) -> None:
        cached, evicted = self._cached, []
        self._idle -= blocks
        while blocks:
            number, returned = self._returned[0]
            while blocks and returned:
                one = returned.pop()
                self._queued -= 1
                if cached.get(one) == number:
                    del cached[one]
                    evicted.append(one)
                    blocks -= 1
            if not returned:
                self._returned.popleft()
        self._note(evicted, stored=False)

    def _forget_stale(self) -> None:
        """Leave only what is idle in line: at most half of it is, so this is paid for."""
        number_of = self._cached.get
        alive = (
            (number, [one for one in returned if number_of(one) == number])
            for number, returned in self._returned
        )
        self._returned = deque(one for one in alive if one[1])
        self._queued = self._idle

    # ------------------------------------------------------------------ what others are told
    @property
    def has_news(self) -> bool:
        """Whether `take_update` would have anything to say."""
        return bool(self._news)

    def take_update(self) -> CacheUpdate | None:
        """What became of blocks since this was last called; None when nothing did."""
        if not self._news:
            return None
        removed = [one for one, stored in self._news.items() if not stored]
        stored = [one for one, stored in self._news.items() if stored]
        self._news = {}
        self.sequence += 1
        changes = []
        if removed:
            changes.append(CacheChange(CacheChangeKind.REMOVED, pack_hashes(removed)))
        if stored:
            changes.append(CacheChange(CacheChangeKind.STORED, pack_hashes(stored)))
        return CacheUpdate(self.sequence, tuple(changes))

    def snapshot(self) -> CacheUpdate:
        """All that is cached, parents before children."""
        held = pack_hashes(self._cached)
        changes = (CacheChange(CacheChangeKind.STORED, held),) if held else ()
        return CacheUpdate(self.sequence, changes, snapshot=True)

    def users(self) -> dict[int, int]:
        """How many runs use each shared block."""
        return {one: users for one, users in self._cached.items() if users > 0}

    def idle(self) -> list[int]:
        """Cached blocks that nobody uses, those to be evicted first in front."""
        return [
            one
            for number, returned in self._returned
            for one in reversed(returned)
            if self._cached.get(one) == number
        ]

    def _note(self, hashes: Sequence[int], *, stored: bool) -> None:
        news = self._news
        if news.keys().isdisjoint(hashes):
            news.update(dict.fromkeys(hashes, stored))
            return
        for one in hashes:  # what came and went in between was never there, and the reverse
            if one in news:
                del news[one]
            else:
                news[one] = stored


def _leading(limit: int, holds: Callable[[int], bool]) -> int:
    """The first index below `limit` for which it does not hold, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low
