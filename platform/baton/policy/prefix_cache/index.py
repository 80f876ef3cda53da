"""The prefix index: which replica holds how much of a prompt, from what is reported and predicted.

*Theory of operation.* One index per coordinator, without I/O; all times are the caller's. It knows
replicas from `join` to `leave`. What it believes has two sources:

- *reported*: numbered updates from the replica (`baton.domain.cache`). While every number came, the
  replica is *in step*: what is kept of it is what it held at that number. After a hole it is out of
  step until a snapshot comes; what it reports is still taken, for a wrong hint costs one prefill.
  `apply`, `heard` and `correct` return True when a snapshot should be asked for, at most every
  `resync_s` for the same hole. An update that cannot be read counts as a hole.
- *predicted*: a routed request's prompt will be in the cache of where it went (`predict`). It is
  believed for `unconfirmed_s` where the replica reports (by then its reports tell), for
  `predicted_s` where it does not, and never more of it than fits into its cache.

Hits are hints: engines match prefixes by themselves. So whatever is wrong here (lost or late
updates, collisions of hashes, garbage) makes a placement worse and breaks nothing; it is counted.

*Bounds.* At most `max_entries` reported pairs of replica and block are kept. The last tenth is for
replicas below their equal share; what does not fit is dropped, the deepest blocks of each report
first, and counted as `unkept_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import assert_never

from baton.domain.cache import (
    BLOCK_HASH_BYTES,
    CacheChange,
    CacheChangeKind,
    CacheTier,
    CacheUpdate,
    unpack_hashes,
)
from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.hits import NO_HITS, Hits
from baton.policy.prefix_cache.lookup import Chain, Marks, PrefixHits
from baton.policy.prefix_cache.predicted_blocks import PredictedBlocks, Prediction, Predictions
from baton.policy.prefix_cache.replica_record import IndexCounters, ReplicaIndexState, ReplicaRecord
from baton.policy.prefix_cache.reported_blocks import ReportedBlocks
from baton.policy.resilience.liveness import REST_S

_DOUBTS = 2
"""So many answers in a row that contradict the index make it doubt what it knows of a replica."""
_SLACK_BLOCKS = 1
"""Engines compute the last prompt token even when its block is cached, hence that block."""
_RESERVE = 10
"""One part in so many of `max_entries` is for replicas below their share."""


class IndexMode(StrEnum):
    """What the index believes."""

    EVENTS = "events"
    """What engines report."""
    PREDICTED = "predicted"
    """Our own routing decisions."""
    HYBRID = "hybrid"
    """Both; and what engines report as cached of each request corrects it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """How an index behaves."""

    mode: IndexMode = IndexMode.HYBRID
    max_entries: int = 4_000_000
    """Reported pairs of replica and block: 250 to 400 MB, more where few are shared."""
    predicted_s: float = 120.0
    """How long a prediction is believed of a replica that reports nothing, or not any more."""
    unconfirmed_s: float = 5.0
    """How long it is believed of one that does."""
    stale_s: float = 2.0 + REST_S
    """A replica that has not vouched for its blocks for so long is called stale. An idle one
    vouches every 4 s, with its heartbeat."""
    resync_s: float = 1.0
    """A snapshot that does not come is asked for again after so long."""

    def __post_init__(self) -> None:
        if self.max_entries < 1:
            raise ValueError(f"max_entries: got {self.max_entries}, wanted at least 1")
        for name in ("predicted_s", "unconfirmed_s", "stale_s", "resync_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted more than 0")


class PrefixIndex:
    """Which replicas hold which prefixes. See the module's theory of operation."""

    def __init__(self, options: IndexOptions | None = None, *, seed: int = 0) -> None:
        self.options = options or IndexOptions()
        self._rng = Random(seed)  # noqa: S311 - spreads load, guards nothing
        self._replicas: dict[str, ReplicaRecord] = {}
        self._by_bit: dict[int, str] = {}
        self._predicted = PredictedBlocks()
        self._reported = ReportedBlocks(self._predicted.masks)
        self._counters = IndexCounters()
        self._marks: list[Marks] = []

    @property
    def mode(self) -> IndexMode:
        """What the index believes."""
        return self.options.mode

    @property
    def counters(self) -> IndexCounters:
        """What happened so far."""
        return replace(self._counters)

    # ------------------------------------------------------------------ membership

    def join(
        self, replica_id: str, *, capacity_blocks: int, peek_blocks: int | None = None
    ) -> None:
        """A replica begins a life with an empty cache; of an earlier life nothing is kept.

        Where `peek_blocks` is a number it tells of whole prefixes, each by the hash of the block so
        far behind its last; else of blocks.
        """
        self.leave(replica_id)
        bit = self._reported.take_slot()
        self._by_bit[bit] = replica_id
        own = Predictions(capacity_blocks=max(0, capacity_blocks))
        self._replicas[replica_id] = ReplicaRecord(
            bit=bit, predictions=own, peek_blocks=peek_blocks
        )
        self._marks = self._all_marks()

    def leave(self, replica_id: str) -> None:
        """A replica is gone, and all that it held; nothing happens when it is unknown."""
        known = self._replicas.pop(replica_id, None)
        if known is not None:
            self._predicted.abandon(known.predictions)
            self._reported.retire_slot(known.bit)
            del self._by_bit[known.bit]
            self._marks = self._all_marks()

    # ------------------------------------------------------------------ what replicas say

    def apply(self, replica_id: str, update: CacheUpdate, now_s: float) -> bool:
        """Take an update; True: ask the replica for a snapshot."""
        known = self._known(replica_id)
        if known is None or self.mode is IndexMode.PREDICTED:
            return False
        self._reported.sweep()
        if known.is_late(update):
            self._counters.late_updates += 1
            return False
        self._counters.updates += 1
        if any(len(change.hashes) % BLOCK_HASH_BYTES for change in update.changes):
            self._counters.refused_updates += 1
            known.sequence = max(known.sequence, update.sequence)
            self._lose_step(known)
            return self._asks(known, now_s)
        if update.snapshot:
            self._counters.snapshots += 1
            self._forget(replica_id, known)
            known.in_step, known.asked_at_s, known.doubts = True, None, 0
        elif update.sequence != known.sequence + 1:
            self._lose_step(known)
        known.sequence = update.sequence
        for position, change in enumerate(update.changes):
            self._change(replica_id, known, change, update.changes[position + 1 :])
        if known.in_step or not known.has_vouched:
            known.vouch(now_s)
        return self._asks(known, now_s)

    def heard(self, replica_id: str, sequence: int, now_s: float) -> bool:
        """A replica says which update it sent last; True: ask it for a snapshot.

        If that is the one we know, all that it reported is true to this moment.
        """
        known = self._known(replica_id)
        if known is None or self.mode is IndexMode.PREDICTED:
            return False
        self._reported.sweep()
        if sequence > known.sequence and known.in_step:
            self._lose_step(known)
        if sequence == known.sequence and known.in_step and sequence:
            known.vouch(now_s)
        return self._asks(known, now_s)

    def correct(
        self, replica_id: str, hashes: Sequence[int], cached_blocks: int, now_s: float
    ) -> None:
        """An engine says how many blocks of a prompt it had cached when it began with it.

        The prompt itself is in its cache by now, so its prediction stays. But if the engine had
        less than the index knew when the request was sent there (`predict`), twice in a row and
        without a removal reported meanwhile, then what the index knows is wrong. If it was
        predicted, all predictions for this replica are dropped; if it was the replica's own reports
        that said more, it is out of step, and `heard` will ask for a snapshot.
        """
        known = self._known(replica_id)
        if known is None or not hashes or self.mode is IndexMode.EVENTS:
            return
        self._predicted.expire(now_s)
        asked = known.predictions.newest.get(hashes[-1])
        if asked is None or asked.answered:
            return
        asked.answered = True
        if asked.promised_by is HitSource.NONE or asked.removals != known.removals:
            return
        if cached_blocks >= asked.promised_blocks - _SLACK_BLOCKS:
            known.doubts = 0
            return
        self._counters.contradictions += 1
        known.doubts += 1
        if known.doubts >= _DOUBTS:
            self._disbelieve(known, asked.promised_by)

    # ------------------------------------------------------------------ what we do

    def predict(
        self,
        replica_id: str,
        hashes: Sequence[int],
        now_s: float,
        *,
        most_blocks: int | None = None,
    ) -> None:
        """A prompt was sent to a replica: its cache will hold these blocks.

        It can find up to `most_blocks` of them cached; None: all. Of a replica that tells of whole
        prefixes only the whole of them is expected.
        """
        known = self._known(replica_id)
        if known is None or not hashes or self.mode is IndexMode.EVENTS:
            return
        self._reported.sweep()
        self._predicted.expire(now_s)
        chain = self._chain(hashes, most_blocks)
        reported = chain.leading(chain.reported, known.bit)
        promised, by = self._promise(known, chain, reported, now_s)
        own = known.predictions
        # What is reported needs no prediction; the last block carries the answer in any case.
        start = min(reported, len(hashes) - 1) if known.peek_blocks is None else len(hashes) - 1
        self._predicted.add(
            own,
            Prediction(
                bit=known.bit,
                at_s=now_s,
                lasts_s=self._believed_s(known, now_s),
                blocks=list(hashes[start:]),
                promised_blocks=promised,
                promised_by=by,
                removals=known.removals,
            ),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any block: then nobody needs a prompt's hashes."""
        return not (self._reported.entries or self._predicted.masks.entries)

    def look_up(
        self, hashes: Sequence[int], now_s: float, *, most_blocks: int | None = None
    ) -> Hits:
        """What each replica holds of a prompt; valid until the index changes.

        `most_blocks` end before its last token, which engines always compute; None: all.
        """
        self._predicted.expire(now_s)
        self._counters.lookups += 1
        if not hashes:
            return NO_HITS
        hits = PrefixHits(
            self._chain(hashes, most_blocks),
            now_s,
            holders=self._replicas,
            by_bit=self._by_bit,
            rng=self._rng,
        )
        self._counters.broken_chains += hits.broken
        return hits

    def free_blocks(self, replica_id: str) -> int:
        """Blocks of a KV cache that nothing is known to be stored in; 0 for an unknown replica."""
        known = self._replicas.get(replica_id)
        if known is None:
            return 0
        own = known.predictions
        return max(0, own.capacity_blocks - known.reported[CacheTier.GPU] - len(own.newest))

    # ------------------------------------------------------------------ for operators

    def state(self, replica_id: str, now_s: float) -> ReplicaIndexState | None:
        """What is known of a replica; None when it is unknown."""
        known = self._replicas.get(replica_id)
        if known is None:
            return None
        self._predicted.expire(now_s)
        return known.state(now_s, stale_s=self.options.stale_s)

    @property
    def entries(self) -> int:
        """Pairs of replica and reported block that take up memory."""
        return self._reported.entries

    def unique_blocks(self) -> int:
        """How many different blocks were reported, over all tiers."""
        return sum(self._reported.tier(tier).unique_blocks() for tier in CacheTier)

    def check_integrity(self) -> None:
        """Bounds hold, counts are right, and nothing is known of a replica that is gone.

        Raises:
            AssertionError: it is not so.
        """
        self._reported.check_integrity()
        everyone = self._replicas.values()
        self._predicted.check_integrity([(one.bit, one.predictions) for one in everyone])
        assert self._reported.entries <= self.options.max_entries, "more kept than allowed"
        assert self._reported.live == sum(one.bit for one in everyone), "slots and replicas differ"
        assert {self._replicas[name].bit: name for name in self._replicas} == self._by_bit
        assert self._marks == self._all_marks(), "slots that tell of prefixes are not up to date"
        for tier in CacheTier:
            counts = dict.fromkeys(self._by_bit, 0)
            for _, held in self._reported.tier(tier).masks():
                for bit in counts:
                    counts[bit] += bool(held & bit)
            assert counts == {one.bit: one.reported[tier] for one in everyone}, f"{tier} miscounted"

    # ------------------------------------------------------------------ inside

    def _known(self, replica_id: str) -> ReplicaRecord | None:
        known = self._replicas.get(replica_id)
        self._counters.unknown_replicas += known is None
        return known

    def _change(
        self,
        replica_id: str,
        known: ReplicaRecord,
        change: CacheChange,
        later: Sequence[CacheChange],
    ) -> None:
        masks = self._reported.tier(change.tier)
        match change.kind:
            case CacheChangeKind.STORED:
                self._store(known, change.tier, unpack_hashes(change.hashes))
            case CacheChangeKind.REMOVED:
                blocks = unpack_hashes(change.hashes)
                known.reported[change.tier] -= masks.discard(known.bit, blocks)
                known.removals += 1
                if change.tier is CacheTier.GPU and known.predictions.newest:
                    self._predicted.forget(known.predictions, blocks)
            case CacheChangeKind.CLEARED:
                known.removals += 1
                # Both tiers share a slot, so the other one is forgotten with it.
                cleared = {one.tier for one in later if one.kind is CacheChangeKind.CLEARED}
                cleared.add(change.tier)
                if any(known.reported[tier] for tier in CacheTier if tier not in cleared):
                    self._lose_step(known)
                self._forget(replica_id, known)
            case _:
                assert_never(change.kind)

    def _store(self, known: ReplicaRecord, tier: CacheTier, blocks: Sequence[int]) -> None:
        masks = self._reported.tier(tier)
        while blocks:
            room = self._room(known, len(blocks))
            if room <= 0:
                known.unkept_blocks += len(blocks)
                self._counters.unkept_blocks += len(blocks)
                return
            known.reported[tier] += masks.add(known.bit, blocks[:room])
            blocks = blocks[room:]

    def _room(self, known: ReplicaRecord, wanted: int) -> int:
        free = self.options.max_entries - self._reported.entries
        if free - self.options.max_entries // _RESERVE < wanted and self._reported.retired:
            self._reported.sweep_all()
            free = self.options.max_entries - self._reported.entries
        share = self.options.max_entries // len(self._replicas)
        return max(min(free, share - known.entries), free - self.options.max_entries // _RESERVE)

    def _forget(self, replica_id: str, known: ReplicaRecord) -> None:
        if not known.entries and not known.predictions.newest:
            return
        self._predicted.abandon(known.predictions)
        self._reported.retire_slot(known.bit)
        del self._by_bit[known.bit]
        known.bit = self._reported.take_slot()
        known.reported = dict.fromkeys(CacheTier, 0)
        self._by_bit[known.bit] = replica_id
        self._marks = self._all_marks()

    def _disbelieve(self, known: ReplicaRecord, source: HitSource) -> None:
        known.doubts = 0
        if source is HitSource.PREDICTED:
            self._predicted.forget_all(known.predictions)
        elif known.in_step:
            self._lose_step(known)

    def _lose_step(self, known: ReplicaRecord) -> None:
        known.gaps += 1
        known.in_step = False
        self._counters.gaps += 1

    def _asks(self, known: ReplicaRecord, now_s: float) -> bool:
        return known.asks(now_s, every_s=self.options.resync_s)

    def _chain(self, hashes: Sequence[int], most_blocks: int | None) -> Chain:
        reported = self._reported
        gpu, host = reported.tier(CacheTier.GPU), reported.tier(CacheTier.HOST)
        live = reported.live if reported.retired else None
        tiers = (gpu, host, self._predicted.masks)
        return Chain(hashes, tiers, live, marks=self._marks, most_blocks=most_blocks)

    def _all_marks(self) -> list[Marks]:
        slots: dict[int, int] = {}
        for one in self._replicas.values():
            if one.peek_blocks is not None:
                slots[one.peek_blocks] = slots.get(one.peek_blocks, 0) | one.bit
        return [Marks(*item) for item in slots.items()]

    def _promise(
        self, known: ReplicaRecord, chain: Chain, reported: int, now_s: float
    ) -> tuple[int, HitSource]:
        """How much the replica should find cached; NONE where it cannot be blamed if it does not.

        A prediction whose own request was not answered may not have been computed yet, unless it is
        old.
        """
        blocks = chain.leading(chain.held, known.bit)
        if blocks <= reported:
            return reported, HitSource.REPORTED if reported else HitSource.NONE
        basis = known.predictions.newest.get(chain.hashes[blocks - 1])
        if basis is None:
            return blocks, HitSource.NONE
        sure = basis.answered or now_s - basis.at_s >= self.options.unconfirmed_s
        return blocks, HitSource.PREDICTED if sure else HitSource.NONE

    def _believed_s(self, known: ReplicaRecord, now_s: float) -> float:
        reports = known.in_step and not known.stale(now_s, stale_s=self.options.stale_s)
        return self.options.unconfirmed_s if reports else self.options.predicted_s
