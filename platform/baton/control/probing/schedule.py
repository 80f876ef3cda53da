"""Which pairs of replicas there are to check, and which of them is next.

Pairs that have just come into being, or into doubt, go first, in order; the others by when they are
due, so that in a fleet too large for the allowed rate the pair that waited longest is next and the
sweep just takes longer. Starts are spaced: in any `t` seconds at most `burst + t * per_s` of them.

A large fleet has more pairs than could ever be checked, or kept: of a thousand replicas a
million. So a replica that joins is paired with at most `partners` others each way, drawn by lot,
and with another when it has fewer left, because some went; a pair that nobody drew is watched from
the moment at which something goes wrong on it until it is known to be well. Whoever has a broken
side channel is found by its partners, as ever.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from random import Random

from baton.control.probing.replica_sampler import Candidates
from baton.domain.fleet import ReplicaFacts, Role

_MOST_TRIES = 64
"""Others looked at for a new partner: hundreds of pairs must not look at all of thousands."""


class Pair:
    """A replica that may hand blocks over, one that may take them, and how checks of them went."""

    __slots__ = (
        "doubted",
        "drawn",
        "due_number",
        "ended_at_s",
        "failures",
        "moved",
        "quarantine_said",
        "source",
        "target",
        "unreachable",
        "void_pulls",
        "void_since_s",
    )

    def __init__(self, source: ReplicaFacts, target: ReplicaFacts, *, drawn: bool = True) -> None:
        self.source = source
        self.target = target
        self.drawn = drawn
        """To be watched for as long as both are there; else only until it is known to be well."""
        self.due_number = 0
        """Of its entry in the queues that counts; 0 while it is being checked or is gone."""
        self.doubted = False
        """Something went wrong on it: the next check moves blocks."""
        self.moved = False
        """Whether a probe has moved blocks on it yet."""
        self.failures = 0
        """In a row."""
        self.unreachable = False
        """Whether the last check that could tell said that the source does not answer."""
        self.void_pulls = 0
        """Probes in a row whose pull failed though the source's side channel had answered."""
        self.void_since_s = float("-inf")
        """When the first of them did."""
        self.quarantine_said = False
        self.ended_at_s = float("-inf")


class PairSchedule:
    """Every pair that is to be checked, and when."""

    def __init__(self, *, per_s: float, burst: int, partners: int, rng: Random) -> None:
        self._partners = partners
        self._rng = rng
        self._spacing_s = 1.0 / per_s
        self._burst_s = (burst - 1) * self._spacing_s
        self._spaced_until_s = float("-inf")
        self._facts: dict[str, ReplicaFacts] = {}
        self._sources, self._targets = Candidates(), Candidates()
        self._by_source: dict[str, dict[str, Pair]] = {}
        self._by_target: dict[str, dict[str, Pair]] = {}
        self._fresh: deque[tuple[int, Pair]] = deque()
        self._later: list[tuple[float, int, Pair]] = []
        self._number = 0
        self._undrawn = 0
        """Pairs that are watched though nobody drew them: few, if any."""

    def __len__(self) -> int:
        return sum(len(targets) for targets in self._by_source.values())

    def get(self, source_id: str, target_id: str) -> Pair | None:
        """The pair; None when the two are not to hand anything over."""
        return self._by_source.get(source_id, {}).get(target_id)

    def knows(self, replica_id: str) -> bool:
        """Whether the replica joined and has not left."""
        return replica_id in self._facts

    def from_source(self, source_id: str) -> Collection[Pair]:
        """Every pair with this source."""
        return self._by_source.get(source_id, {}).values()

    def into_target(self, target_id: str) -> Collection[Pair]:
        """Every pair with this target."""
        return self._by_target.get(target_id, {}).values()

    def targets(self) -> int:
        """How many replicas are the target of a pair."""
        return len(self._by_target)

    def join(self, facts: ReplicaFacts) -> None:
        """Add a replica's pairs with those that are there, to be checked at once."""
        hands_over, takes = _may_hand_over(facts), _may_take(facts)
        if hands_over:
            for target in self._targets.some(facts.layout, self._partners, self._rng):
                self._add(Pair(facts, target))
        if takes:
            for source in self._sources.some(facts.layout, self._partners, self._rng):
                self._add(Pair(source, facts))
        self._facts[facts.replica_id] = facts
        if hands_over:
            self._sources.join(facts)
        if takes:
            self._targets.join(facts)

    def watch(self, source_id: str, target_id: str) -> Pair | None:
        """The pair, which is watched from now on if it was not; None: it hands nothing over."""
        pair = self.get(source_id, target_id)
        source, target = self._facts.get(source_id), self._facts.get(target_id)
        if pair is not None or source is None or target is None or source is target:
            return pair
        # A replica that only decodes is never drawn as a source, but prefixes are fetched from it.
        if not (source.side_channel and _may_take(target) and source.layout == target.layout):
            return None
        pair = Pair(source, target, drawn=False)
        self._add(pair)
        return pair

    def forget(self, pair: Pair) -> None:
        """Watch a pair no more that waits for no check."""
        self._undrawn -= not pair.drawn
        _take_out(self._by_source, pair.source.replica_id, pair.target.replica_id)
        _take_out(self._by_target, pair.target.replica_id, pair.source.replica_id)

    def leave(self, replica_id: str) -> list[Pair]:
        """Take a replica's pairs out, and return them."""
        facts = self._facts.pop(replica_id, None)
        if facts is not None:
            self._sources.leave(facts)
            self._targets.leave(facts)
        pairs = [
            *self._by_source.pop(replica_id, {}).values(),
            *self._by_target.pop(replica_id, {}).values(),
        ]
        for pair in pairs:
            pair.due_number = 0
            self.forget(pair)
        if len(self._facts) > self._partners:
            self._draw_anew(replica_id, pairs)
        return pairs

    def put_first(self, pair: Pair) -> None:
        """Check the pair as soon as its turn comes, before any that is merely due."""
        self._number += 1
        pair.due_number = self._number
        self._fresh.append((self._number, pair))

    def put(self, pair: Pair, at_s: float) -> None:
        """Check the pair again at `at_s`."""
        self._number += 1
        pair.due_number = self._number
        heapq.heappush(self._later, (at_s, self._number, pair))

    def take(self, now_s: float) -> Pair | None:
        """Take the pair that is to be checked now; None when none is due or allowed yet."""
        at_s = self.next_at_s()
        if at_s is None or at_s > now_s:
            return None
        pair = self._fresh.popleft()[1] if self._fresh else heapq.heappop(self._later)[2]
        pair.due_number = 0
        self._spaced_until_s = max(self._spaced_until_s, now_s) + self._spacing_s
        return pair

    def next_at_s(self) -> float | None:
        """When a pair may be taken next, possibly in the past; None when none is waiting."""
        allowed_at_s = self._spaced_until_s - self._burst_s
        while self._fresh and self._fresh[0][1].due_number != self._fresh[0][0]:
            self._fresh.popleft()
        if self._fresh:
            return allowed_at_s
        while self._later and self._later[0][2].due_number != self._later[0][1]:
            heapq.heappop(self._later)
        return max(allowed_at_s, self._later[0][0]) if self._later else None

    def check_integrity(self, under_way: Iterable[Pair]) -> None:
        """Raise AssertionError unless every pair either waits once or is being checked."""
        busy = {id(pair) for pair in under_way}
        queued = [id(pair) for number, pair in self._waiting() if pair.due_number == number]
        assert len(queued) == len(set(queued)), "a pair waits twice"
        known = [pair for targets in self._by_source.values() for pair in targets.values()]
        assert {id(pair) for pair in known} == busy | set(queued), "a pair is lost or left over"
        assert not busy & set(queued), "a pair that is being checked waits"
        mirrored = [pair for sources in self._by_target.values() for pair in sources.values()]
        assert {id(pair) for pair in mirrored} == {id(pair) for pair in known}, "indexes differ"
        assert self._undrawn == sum(not pair.drawn for pair in known), (
            "undrawn pairs are miscounted"
        )

    def _waiting(self) -> Iterator[tuple[int, Pair]]:
        yield from self._fresh
        for _, number, pair in self._later:
            yield number, pair

    def _draw_anew(self, gone_id: str, pairs: Iterable[Pair]) -> None:
        """Give those another partner, where there is one, who have fewer than they shall have."""
        for pair in pairs:
            is_source = pair.source.replica_id == gone_id
            left = pair.target if is_source else pair.source
            partners = (self._by_target if is_source else self._by_source).get(left.replica_id, {})
            kept = len(partners) - self._undrawn  # at least
            if left.replica_id not in self._facts or kept >= self._partners:
                continue
            others = self._sources if is_source else self._targets
            for other in others.onwards(left.layout, _MOST_TRIES, self._rng):
                if other is not left and other.replica_id not in partners:
                    self._add(Pair(other, left) if is_source else Pair(left, other))
                    break

    def _add(self, pair: Pair) -> None:
        source_id, target_id = pair.source.replica_id, pair.target.replica_id
        self._undrawn += not pair.drawn
        self._by_source.setdefault(source_id, {})[target_id] = pair
        self._by_target.setdefault(target_id, {})[source_id] = pair
        self.put_first(pair)


def _may_hand_over(facts: ReplicaFacts) -> bool:
    return facts.role is not Role.DECODE and bool(facts.side_channel)


def _may_take(facts: ReplicaFacts) -> bool:
    return facts.role is not Role.PREFILL


def _take_out(index: dict[str, dict[str, Pair]], one: str, other: str) -> None:
    pairs = index.get(one)
    if pairs is not None:
        pairs.pop(other, None)
        if not pairs:
            del index[one]
