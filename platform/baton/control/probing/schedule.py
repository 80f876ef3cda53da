"""Which pairs of replicas are probed, and which of them is next.

New and suspect pairs go first, in order; the others by due time. In a fleet too large for the
allowed rate the pair that waited longest is next, and the sweep takes longer. In any `t` seconds at
most `burst + t * per_s` probes start.

A thousand replicas have a million pairs. So a replica that joins is paired with at most `partners`
random others each way, and gets another when some leave. Other pairs are added when something goes
wrong on them, until they are known to be well. A broken side channel is found by its partners.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from random import Random

from baton.domain.fleet import ReplicaFacts, Role

_MAX_PARTNER_TRIES = 64
"""Others looked at for a new partner: hundreds of pairs must not look at all of thousands."""


class ReplicaSampler:
    """Replicas by layout, of which a few are drawn as quickly among thousands.

    A replica that leaves gives its place to the last.
    """

    def __init__(self) -> None:
        self._by_layout: dict[str, list[ReplicaFacts]] = {}
        self._positions: dict[str, int] = {}

    def add(self, facts: ReplicaFacts) -> None:
        """Add a replica, which is not among them."""
        same_layout = self._by_layout.setdefault(facts.layout, [])
        self._positions[facts.replica_id] = len(same_layout)
        same_layout.append(facts)

    def remove(self, facts: ReplicaFacts) -> None:
        """Take a replica out, if it is among them."""
        position = self._positions.pop(facts.replica_id, None)
        if position is None:
            return
        same_layout = self._by_layout[facts.layout]
        last = same_layout.pop()
        if position < len(same_layout):
            same_layout[position] = last
            self._positions[last.replica_id] = position
        if not same_layout:
            del self._by_layout[facts.layout]

    def sample(self, layout: str, limit: int, rng: Random) -> list[ReplicaFacts]:
        """All of a layout; of more than `limit`, a random sample of `limit`."""
        same_layout = self._by_layout.get(layout, [])
        return rng.sample(same_layout, limit) if len(same_layout) > limit else list(same_layout)

    def from_random_start(self, layout: str, limit: int, rng: Random) -> Iterator[ReplicaFacts]:
        """All of a layout, `limit` of them at most, from a place by lot."""
        same_layout = self._by_layout.get(layout, [])
        begin = rng.randrange(len(same_layout)) if same_layout else 0
        for step in range(min(limit, len(same_layout))):
            yield same_layout[(begin + step) % len(same_layout)]


class Pair:
    """A replica that may hand blocks over, another that may take them, and their checks."""

    __slots__ = (
        "failed_pulls_in_row",
        "failures_in_row",
        "has_transferred",
        "last_probe_at_s",
        "pulls_fail_since_s",
        "quarantine_reported",
        "queue_number",
        "sampled",
        "source",
        "suspect",
        "target",
        "unreachable",
    )

    def __init__(self, source: ReplicaFacts, target: ReplicaFacts, *, sampled: bool = True) -> None:
        self.source = source
        self.target = target
        self.sampled = sampled
        """To be watched for as long as both are there; else only until it is known to be well."""
        self.queue_number = 0
        """Of its entry in the queues that counts; 0 while it is being checked or is gone."""
        self.suspect = False
        """Something went wrong on it: the next check moves blocks."""
        self.has_transferred = False
        """Whether a probe has moved blocks on it yet."""
        self.failures_in_row = 0
        """In a row."""
        self.unreachable = False
        """Whether the last conclusive check found that the source does not answer."""
        self.failed_pulls_in_row = 0
        """Probes in a row whose pull failed though the source's side channel had answered."""
        self.pulls_fail_since_s = float("-inf")
        """When the first of them did."""
        self.quarantine_reported = False
        self.last_probe_at_s = float("-inf")


class PairSchedule:
    """Every pair that is to be checked, and when."""

    def __init__(self, *, per_s: float, burst: int, partners: int, rng: Random) -> None:
        self._partners = partners
        self._rng = rng
        self._interval_s = 1.0 / per_s
        self._burst_tolerance_s = (burst - 1) * self._interval_s
        self._next_slot_at_s = float("-inf")
        self._replicas: dict[str, ReplicaFacts] = {}
        self._sources, self._targets = ReplicaSampler(), ReplicaSampler()
        self._by_source: dict[str, dict[str, Pair]] = {}
        self._by_target: dict[str, dict[str, Pair]] = {}
        self._urgent: deque[tuple[int, Pair]] = deque()
        self._scheduled: list[tuple[float, int, Pair]] = []
        self._last_number = 0
        self._unsampled_count = 0
        """Pairs that are watched though they were not drawn: few, if any."""

    def __len__(self) -> int:
        return sum(len(targets) for targets in self._by_source.values())

    def get(self, source_id: str, target_id: str) -> Pair | None:
        """The pair; None when the two are not to hand anything over."""
        return self._by_source.get(source_id, {}).get(target_id)

    def has_replica(self, replica_id: str) -> bool:
        """Whether the replica joined and has not left."""
        return replica_id in self._replicas

    def pairs_from(self, source_id: str) -> Collection[Pair]:
        """Every pair with this source."""
        return self._by_source.get(source_id, {}).values()

    def pairs_to(self, target_id: str) -> Collection[Pair]:
        """Every pair with this target."""
        return self._by_target.get(target_id, {}).values()

    def target_count(self) -> int:
        """How many replicas are the target of a pair."""
        return len(self._by_target)

    def add_replica(self, facts: ReplicaFacts) -> None:
        """Add a replica's pairs with those that are there, to be checked at once."""
        can_be_source, can_be_target = _can_be_source(facts), _can_be_target(facts)
        if can_be_source:
            for target in self._targets.sample(facts.layout, self._partners, self._rng):
                self._add(Pair(facts, target))
        if can_be_target:
            for source in self._sources.sample(facts.layout, self._partners, self._rng):
                self._add(Pair(source, facts))
        self._replicas[facts.replica_id] = facts
        if can_be_source:
            self._sources.add(facts)
        if can_be_target:
            self._targets.add(facts)

    def get_or_add(self, source_id: str, target_id: str) -> Pair | None:
        """The pair, which is watched from now on if it was not; None: it hands nothing over."""
        pair = self.get(source_id, target_id)
        source, target = self._replicas.get(source_id), self._replicas.get(target_id)
        if pair is not None or source is None or target is None or source is target:
            return pair
        # A replica that only decodes is never drawn as a source, but prefixes are fetched from it.
        if not (source.side_channel and _can_be_target(target) and source.layout == target.layout):
            return None
        pair = Pair(source, target, sampled=False)
        self._add(pair)
        return pair

    def remove_pair(self, pair: Pair) -> None:
        """Watch a pair no more that waits for no check."""
        self._unsampled_count -= not pair.sampled
        _remove_from_index(self._by_source, pair.source.replica_id, pair.target.replica_id)
        _remove_from_index(self._by_target, pair.target.replica_id, pair.source.replica_id)

    def remove_replica(self, replica_id: str) -> list[Pair]:
        """Take a replica's pairs out, and return them."""
        facts = self._replicas.pop(replica_id, None)
        if facts is not None:
            self._sources.remove(facts)
            self._targets.remove(facts)
        pairs = [
            *self._by_source.pop(replica_id, {}).values(),
            *self._by_target.pop(replica_id, {}).values(),
        ]
        for pair in pairs:
            pair.queue_number = 0
            self.remove_pair(pair)
        if len(self._replicas) > self._partners:
            self._resample_partners(replica_id, pairs)
        return pairs

    def enqueue_urgent(self, pair: Pair) -> None:
        """Check the pair as soon as its turn comes, before any that is merely due."""
        self._last_number += 1
        pair.queue_number = self._last_number
        self._urgent.append((self._last_number, pair))

    def schedule(self, pair: Pair, at_s: float) -> None:
        """Check the pair again at `at_s`."""
        self._last_number += 1
        pair.queue_number = self._last_number
        heapq.heappush(self._scheduled, (at_s, self._last_number, pair))

    def pop_due(self, now_s: float) -> Pair | None:
        """Take the pair that is to be checked now; None when none is due or allowed yet."""
        at_s = self.next_at_s()
        if at_s is None or at_s > now_s:
            return None
        pair = self._urgent.popleft()[1] if self._urgent else heapq.heappop(self._scheduled)[2]
        pair.queue_number = 0
        self._next_slot_at_s = max(self._next_slot_at_s, now_s) + self._interval_s
        return pair

    def next_at_s(self) -> float | None:
        """When a pair may be taken next, possibly in the past; None when none is waiting."""
        allowed_at_s = self._next_slot_at_s - self._burst_tolerance_s
        while self._urgent and self._urgent[0][1].queue_number != self._urgent[0][0]:
            self._urgent.popleft()
        if self._urgent:
            return allowed_at_s
        while self._scheduled and self._scheduled[0][2].queue_number != self._scheduled[0][1]:
            heapq.heappop(self._scheduled)
        return max(allowed_at_s, self._scheduled[0][0]) if self._scheduled else None

    def check_integrity(self, in_progress: Iterable[Pair]) -> None:
        """Raise AssertionError unless every pair either waits once or is being checked."""
        in_progress_ids = {id(pair) for pair in in_progress}
        queued = [id(pair) for number, pair in self._queue_entries() if pair.queue_number == number]
        assert len(queued) == len(set(queued)), "a pair waits twice"
        known = [pair for targets in self._by_source.values() for pair in targets.values()]
        assert {id(pair) for pair in known} == in_progress_ids | set(queued), (
            "a pair is lost or left over"
        )
        assert not in_progress_ids & set(queued), "a pair that is being checked waits"
        mirrored = [pair for sources in self._by_target.values() for pair in sources.values()]
        assert {id(pair) for pair in mirrored} == {id(pair) for pair in known}, "indexes differ"
        assert self._unsampled_count == sum(not pair.sampled for pair in known), (
            "undrawn pairs are miscounted"
        )

    def _queue_entries(self) -> Iterator[tuple[int, Pair]]:
        yield from self._urgent
        for _, number, pair in self._scheduled:
            yield number, pair

    def _resample_partners(self, removed_id: str, pairs: Iterable[Pair]) -> None:
        """Give those another partner, where there is one, who have fewer than they shall have."""
        for pair in pairs:
            is_source = pair.source.replica_id == removed_id
            survivor = pair.target if is_source else pair.source
            partners = (self._by_target if is_source else self._by_source).get(
                survivor.replica_id, {}
            )
            partner_count = len(partners) - self._unsampled_count  # at least
            if survivor.replica_id not in self._replicas or partner_count >= self._partners:
                continue
            candidates = self._sources if is_source else self._targets
            for other in candidates.from_random_start(
                survivor.layout, _MAX_PARTNER_TRIES, self._rng
            ):
                if other is not survivor and other.replica_id not in partners:
                    self._add(Pair(other, survivor) if is_source else Pair(survivor, other))
                    break

    def _add(self, pair: Pair) -> None:
        source_id, target_id = pair.source.replica_id, pair.target.replica_id
        self._unsampled_count += not pair.sampled
        self._by_source.setdefault(source_id, {})[target_id] = pair
        self._by_target.setdefault(target_id, {})[source_id] = pair
        self.enqueue_urgent(pair)


def _can_be_source(facts: ReplicaFacts) -> bool:
    return facts.role is not Role.DECODE and bool(facts.side_channel)


def _can_be_target(facts: ReplicaFacts) -> bool:
    return facts.role is not Role.PREFILL


def _remove_from_index(index: dict[str, dict[str, Pair]], replica_id: str, partner_id: str) -> None:
    pairs = index.get(replica_id)
    if pairs is not None:
        pairs.pop(partner_id, None)
        if not pairs:
            del index[replica_id]
