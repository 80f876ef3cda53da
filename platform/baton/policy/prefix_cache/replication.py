"""The loss because too few replicas hold a prefix, and when that pays for one more copy.

*Theory of operation.* Requests that begin alike go to a holder of that beginning while they queue
there for less than it takes to compute it. Another replica might have served each of them sooner
with the prefix: that difference is *lost*. The losses for one prefix add up, for the replica
nearest to a copy, and decay. When they reach the price of a copy, the next such request computes
the prefix there, and the cost is subtracted. So the loss before a copy is bounded by its price.

The price is the cost of the copy, where the cache has room for it. A copy that evicts blocks of
others may have to be made again, and so may they: its price is `COPY_PRICE_MULTIPLE` times that.

Source: Karlin, Manasse, Rudolph, Sleator, Competitive Snoopy Caching, Algorithmica 3 (1988): rent
until the rent paid comes to the price, then buy.

A prefix is named by the hash of its last block. The prefixes with the oldest losses are forgotten
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp
from typing import Protocol

from baton.domain.handoff import ReplicationCredit

CREDIT_DECAY_S = 3.0
"""A loss this long ago counts for a third. Found by trying: with 30 s, prefixes that are used now
and then were stored several times, at the cost of others' (`make bench-routing`)."""
COPY_PRICE_MULTIPLE = 3.0
"""The price of a copy that evicts other blocks, as a multiple of its cost. Its prefix may be about
to go out of use, and predictions are not exact. Found by trying: at 1 to 2, prefixes in modest use
were copied, and evicted others (`make bench-routing`); at 4, hot prefixes were copied too late."""
MAX_PREFIXES = 4096
"""Of all replicas together: some hundred bytes each."""


class ReplicationCredits(Protocol):
    """Of one prompt: losses of other requests that began like it."""

    def of(self, replica_id: str, blocks: int) -> float:
        """Seconds forgone because this replica does not hold its first `blocks` blocks."""
        ...


class _NoCredits:
    def of(self, replica_id: str, blocks: int) -> float:
        return 0.0


NO_CREDITS: ReplicationCredits = _NoCredits()


class PrefixCredits:
    """Seconds by prefix, those that were changed last at the end."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[tuple[str, int], tuple[float, float]] = OrderedDict()
        """By the hash of a prefix' last block: how many, and when that was right."""

    def __len__(self) -> int:
        return len(self._seconds)

    def record(self, hashes: Sequence[int], credit: ReplicationCredit, now_s: float) -> None:
        """A prompt of these blocks was placed."""
        if not 0 < credit.blocks <= len(hashes):
            return
        key = credit.replica_id, hashes[credit.blocks - 1]
        total_s = self.of(key, now_s) + credit.seconds
        if total_s > 0:
            self._seconds[key] = (total_s, now_s)
            self._seconds.move_to_end(key)
        else:
            self._seconds.pop(key, None)
        if len(self._seconds) > MAX_PREFIXES:
            self._seconds.popitem(last=False)

    def of(self, key: tuple[str, int], now_s: float) -> float:
        """The loss for this prefix; 0 for an unknown prefix."""
        seconds, at_s = self._seconds.get(key, (0.0, now_s))
        return seconds * exp(-max(0.0, now_s - at_s) / CREDIT_DECAY_S)


class PromptCredits:
    """Those of one prompt's prefixes, as of one moment."""

    __slots__ = ("_credits", "_hashes", "_now_s")

    def __init__(self, prefix_credits: PrefixCredits, hashes: Sequence[int], now_s: float) -> None:
        self._credits = prefix_credits
        self._hashes = hashes
        self._now_s = now_s

    def of(self, replica_id: str, blocks: int) -> float:
        """Seconds forgone because this replica does not hold its first `blocks` blocks."""
        if not 0 < blocks <= len(self._hashes):
            return 0.0
        return self._credits.of((replica_id, self._hashes[blocks - 1]), self._now_s)
