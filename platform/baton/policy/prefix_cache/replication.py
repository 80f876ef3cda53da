"""What is lost because a prefix is held by too few: when to have it computed once more.

*Theory of operation.* A request goes where it costs least, and those that begin alike therefore go
to who holds that beginning, for as long as they queue there for less than it takes to compute it.
Each of them might have been served sooner by another replica if that had held the prefix, too: so
much was *forgone*. What is forgone for one prefix is added up, for the replica that it brings
nearest to a copy, and fades. When it comes to three times what one more copy costs, the next such
request pays for one: it is computed where it is missing, and what it cost is taken off again. Loss
before a copy is so bounded by its price.

Source: Karlin, Manasse, Rudolph, Sleator, Competitive Snoopy Caching, Algorithmica 3 (1988): rent
until the rent paid comes to the price, then buy.

A prefix is named by the hash of its last block, which stands for all before it. Those for which
something was forgone longest ago are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp
from typing import Protocol

from baton.domain.handoff import ReplicationCredit

CREDIT_DECAY_S = 3.0
"""What was forgone so long ago counts for a third. Found by trying: with 30 s, prefixes that are
used now and then were stored several times, at the cost of others' (`make bench-routing`)."""
COPY_PRICE_MULTIPLE = 3.0
"""What must have been forgone, as a multiple of what a copy costs: a prefix may be about to go out
of use, and predictions are not exact. Found by trying: at 1 to 2, prefixes in modest use were
copied, and drove others out (`make bench-routing`); at 4, hot ones came too late."""
MAX_PREFIXES = 4096
"""Of all replicas together: some hundred bytes each."""


class ReplicationCredits(Protocol):
    """Of one prompt: what was forgone by others that began like it."""

    def of(self, replica_id: str, blocks: int) -> float:
        """Seconds forgone because this replica does not hold its first so many blocks."""
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
        """What was forgone for this prefix; 0 for one that is not known."""
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
        """Seconds forgone because this replica does not hold its first so many blocks."""
        if not 0 < blocks <= len(self._hashes):
            return 0.0
        return self._credits.of((replica_id, self._hashes[blocks - 1]), self._now_s)
