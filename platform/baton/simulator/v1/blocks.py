"""The KV blocks of a counted engine: how many are empty, and which hashes are cached.

Theory of operation: a block is *empty*, *private* (used by one run, and nothing that anyone could
look for), *shared* (in the prefix cache and used by one run or more) or *idle* (in the prefix
cache, used by nobody). Empty and private ones are only counted; cached ones are known by their
chained hashes. Taking blocks uses up empty ones first, then evicts the idle one that was given back
longest ago, as vLLM's free queue does. Runs give their blocks back tail first and a block is only
shared behind shared ones, so whoever uses a block uses all before it: of any chain the cached
blocks are a beginning, and of those the shared ones are. So hits are found by bisection.
empty + private + shared + idle = total, always.

Unlike in vLLM, equal blocks are one: a run that computes what is cached already uses the cached
block and gives its own back at once, where vLLM keeps the copy until the run ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import chain as concatenate

from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate, pack_hashes


class CountedBlocks:
    """Blocks by count, the prefix cache by hashes, and what has changed in it."""

    __slots__ = ("_idle", "_news", "_users", "empty", "sequence", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.empty = total
        self.sequence = 0
        """The number of the last update that was taken."""
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._news: dict[int, bool] = {}
        """Blocks that became cached (True) or ceased to be since the last update."""

    @property
    def available(self) -> int:
        """How many blocks `take` could hand out."""
        return self.empty + len(self._idle)

    @property
    def used(self) -> int:
        """Private and shared blocks."""
        return self.total - self.empty - len(self._idle)

    # ------------------------------------------------------------------ the prefix cache
    def cached(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many leading blocks of a chain are cached, at most `limit`, and how many are idle."""
        shared = _leading(hashes, self._users, 0, limit)
        cached = _leading(hashes, self._idle, shared, limit)
        return cached, cached - shared

    def share(self, hashes: Sequence[int]) -> None:
        """Use blocks that are cached, from the beginning of a chain on."""
        users, idle = self._users, self._idle
        for one in hashes:
            if one in users:
                users[one] += 1
            else:
                del idle[one]
                users[one] = 1

    def publish(self, hashes: Sequence[int]) -> None:
        """Put private blocks, full now and next in their chain, into the prefix cache."""
        users, idle = self._users, self._idle
        if users.keys().isdisjoint(hashes) and idle.keys().isdisjoint(hashes):
            users.update(dict.fromkeys(hashes, 1))
            self._note(hashes, stored=True)
            return
        fresh = [one for one in hashes if one not in users and one not in idle]
        copies = [one for one in hashes if one in users or one in idle]
        self.share(copies)
        self.empty += len(copies)
        users.update(dict.fromkeys(fresh, 1))
        self._note(fresh, stored=True)

    # ------------------------------------------------------------------ in and out of use
    def take(self, blocks: int) -> None:
        """Make so many blocks private; there must be as many `available`."""
        evicted = blocks - self.empty
        if evicted <= 0:
            self.empty -= blocks
            return
        self.empty = 0
        pop = self._idle.popitem
        self._note([pop(last=False)[0] for _ in range(evicted)], stored=False)

    def give_back(self, hashes: Sequence[int], private: int) -> None:
        """End one run's use of a chain's shared blocks, and of its private ones."""
        self.empty += private
        users, idle = self._users, self._idle
        for one in reversed(hashes):
            left = users[one] - 1
            if left:
                users[one] = left
            else:
                del users[one]
                idle[one] = None

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
        held = pack_hashes(list(concatenate(self._users, reversed(self._idle))))
        changes = (CacheChange(CacheChangeKind.STORED, held),) if held else ()
        return CacheUpdate(self.sequence, changes, snapshot=True)

    def users(self) -> dict[int, int]:
        """How many runs use each shared block."""
        return dict(self._users)

    def idle(self) -> list[int]:
        """Cached blocks that nobody uses, those to be evicted first in front."""
        return list(self._idle)

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


def _leading(hashes: Sequence[int], held: Container[int], first: int, limit: int) -> int:
    """Where the run of hashes in `held` that begins at `first` ends, by bisection."""
    if first >= limit or hashes[first] not in held:
        return first
    low, high = first + 1, limit
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low
