"""The prefix index: which replica holds how much of a prompt, as reported and as predicted.

*Theory of operation.* One index per coordinator. Its knowledge has two sources:

- *reported*: numbered updates from the replica (`baton.domain.cache`). A replica is *in step* while
  every number came: its record equals its cache at that number. After a gap it is out of step until
  a snapshot comes. Its reports are still used, for a wrong hint costs one prefill. `apply_update`
  and `on_heartbeat` return True when a snapshot should be requested, at most every
  `resync_interval_s`. An unreadable update counts as a gap.
- *predicted*: a routed request's prompt will be cached where it went (`predict`). That is valid for
  `unconfirmed_ttl_s` where the replica reports, and for `prediction_ttl_s` where it does not.

Hits are hints: engines match prefixes by themselves. An error here makes a placement worse and
breaks nothing; it is counted.

*Bounds.* At most `max_entries` reported pairs of replica and block are kept. The last tenth is for
replicas below their equal share. Blocks beyond that are dropped, the deepest of each report first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from baton.policy.prefix_cache.block_masks import (
    Chain,
    Level,
    PrefixSlots,
    ReportedBlocks,
)
from baton.policy.prefix_cache.hits import NO_HIT, NO_HITS, Hit, Hits
from baton.policy.prefix_cache.predicted_blocks import (
    PredictedBlocks,
    Prediction,
    ReplicaPredictions,
)
from baton.policy.resilience.liveness import STALE_AFTER_S

_MAX_CONTRADICTIONS = 2
"""This many contradicting answers in a row invalidate the index's record of a replica."""
_SLACK_BLOCKS = 1
"""Engines compute the last prompt token even when its block is cached, hence that block."""
_RESERVE_DIVISOR = 10
"""The part of `max_entries` for replicas below their share, as a divisor."""


@dataclass(slots=True, kw_only=True)
class _IndexCounters:
    """Counts of an index since its start."""

    updates: int = 0
    snapshots: int = 0
    gaps: int = 0
    """Replicas fell out of step: holes in their numbers, or answers that contradict them."""
    late_updates: int = 0
    """Older than the known state, or repeated: ignored."""
    invalid_updates: int = 0
    """They could not be read."""
    unknown_replicas: int = 0
    """Calls that named one: ignored."""
    dropped_blocks: int = 0
    lookups: int = 0
    chains_with_holes: int = 0
    """Lookups that saw a hole which an eviction had left."""
    contradictions: int = 0
    """Answers that less was cached than the index knew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIndexState:
    """The index's state of one replica, for operators."""

    gpu_blocks: int
    host_blocks: int
    predicted_blocks: int
    sequence: int
    in_sync: bool
    """The record equals the replica's cache at `sequence`."""
    is_stale: bool
    """It has not confirmed its reports for a while, or never did."""
    age_s: float | None
    """Since it last vouched; None when it never did."""
    gaps: int
    dropped_blocks: int


@dataclass(slots=True, eq=False, kw_only=True)
class _ReplicaRecord:
    """One life of one replica."""

    bit: int
    predictions: ReplicaPredictions
    lookahead_blocks: int | None = None
    """It tells of whole prefixes, by the block so far behind each; None: of blocks."""
    reported_blocks: dict[CacheTier, int] = field(
        default_factory=lambda: dict.fromkeys(CacheTier, 0)
    )
    """Blocks kept, by tier."""
    sequence: int = 0
    """Number of the last update taken. Before the first, a cache is empty: that is state 0."""
    in_sync: bool = True
    confirmed_at_s: float = 0.0
    is_confirmed: bool = False
    resync_requested_at_s: float | None = None
    """When a snapshot was asked for that has not come."""
    removals: int = 0
    """Reports that blocks were removed."""
    contradictions: int = 0
    """Answers in a row that contradict what was known."""
    gaps: int = 0
    dropped_blocks: int = 0

    @property
    def entries(self) -> int:
        """Blocks kept, over all tiers."""
        return sum(self.reported_blocks.values())

    def is_late(self, update: CacheUpdate) -> bool:
        """Whether an update says nothing new."""
        if update.is_snapshot:
            # Out of step, any state that the replica was in is better than the known state.
            return self.in_sync and update.sequence < self.sequence
        return update.sequence <= self.sequence

    def confirm(self, now_s: float) -> None:
        """Mark its reports as true at this moment."""
        self.confirmed_at_s, self.is_confirmed = now_s, True

    def is_stale(self, now_s: float, *, stale_s: float) -> bool:
        """Whether it has not vouched for so long."""
        return not self.is_confirmed or now_s - self.confirmed_at_s > stale_s

    def should_request_snapshot(self, now_s: float, *, every_s: float) -> bool:
        """Whether to ask for a snapshot now; True notes that it was asked for."""
        if self.in_sync:
            return False
        if self.resync_requested_at_s is not None and now_s - self.resync_requested_at_s < every_s:
            return False
        self.resync_requested_at_s = now_s
        return True

    def state(self, now_s: float, *, stale_s: float) -> ReplicaIndexState:
        """The view for operators."""
        return ReplicaIndexState(
            gpu_blocks=self.reported_blocks[CacheTier.GPU],
            host_blocks=self.reported_blocks[CacheTier.HOST],
            predicted_blocks=len(self.predictions.newest_by_block),
            sequence=self.sequence,
            in_sync=self.in_sync,
            is_stale=self.is_stale(now_s, stale_s=stale_s),
            age_s=max(0.0, now_s - self.confirmed_at_s) if self.is_confirmed else None,
            gaps=self.gaps,
            dropped_blocks=self.dropped_blocks,
        )


class IndexMode(StrEnum):
    """The sources of the index."""

    EVENTS = "events"
    """Reports of engines."""
    PREDICTED = "predicted"
    """Our own routing decisions."""
    HYBRID = "hybrid"
    """Both; corrected by the cached tokens that engines report for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """How an index behaves."""

    mode: IndexMode = IndexMode.HYBRID
    max_entries: int = 4_000_000
    """Reported pairs of replica and block: 250 to 400 MB, more where few are shared."""
    prediction_ttl_s: float = 120.0
    """How long a prediction is believed of a replica that reports nothing, or not any more."""
    unconfirmed_ttl_s: float = 5.0
    """How long a prediction of a reporting replica is valid."""
    stale_after_s: float = STALE_AFTER_S
    """A replica whose heartbeats have not confirmed its blocks for so long is called stale."""
    resync_interval_s: float = 1.0
    """A snapshot that does not come is asked for again after so long."""

    def __post_init__(self) -> None:
        if self.max_entries < 1:
            raise ValueError(f"max_entries: got {self.max_entries}, expected at least 1")
        for name in ("prediction_ttl_s", "unconfirmed_ttl_s", "stale_after_s", "resync_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected more than 0")


class PrefixIndex:
    """Which replicas hold which prefixes. See the module's theory of operation."""

    def __init__(self, options: IndexOptions | None = None, *, seed: int = 0) -> None:
        self.options = options or IndexOptions()
        self._rng = Random(seed)  # noqa: S311 - spreads load, guards nothing
        self._replicas: dict[str, _ReplicaRecord] = {}
        self._by_bit: dict[int, str] = {}
        self._predicted = PredictedBlocks()
        self._reported = ReportedBlocks(self._predicted.masks)
        self._counters = _IndexCounters()
        self._prefix_slots: list[PrefixSlots] = []

    @property
    def counters(self) -> _IndexCounters:
        """Counts since the start."""
        return replace(self._counters)

    # ------------------------------------------------------------------ membership

    def add_replica(
        self, replica_id: str, *, capacity_blocks: int, lookahead_blocks: int | None = None
    ) -> None:
        """A replica begins a life with an empty cache; of an earlier life nothing is kept.

        Where `lookahead_blocks` is a number it tells of whole prefixes, each by the hash of the
        block so far behind its last; else of blocks.
        """
        self.remove_replica(replica_id)
        bit = self._reported.allocate_slot()
        self._by_bit[bit] = replica_id
        predictions = ReplicaPredictions(capacity_blocks=max(0, capacity_blocks))
        self._replicas[replica_id] = _ReplicaRecord(
            bit=bit, predictions=predictions, lookahead_blocks=lookahead_blocks
        )
        self._prefix_slots = self._build_prefix_slots()

    def remove_replica(self, replica_id: str) -> None:
        """A replica is gone, and all that it held; nothing happens when it is unknown."""
        record = self._replicas.pop(replica_id, None)
        if record is not None:
            self._predicted.clear(record.predictions)
            self._reported.retire_slot(record.bit)
            del self._by_bit[record.bit]
            self._prefix_slots = self._build_prefix_slots()

    # ------------------------------------------------------------------ what replicas say

    def apply_update(self, replica_id: str, update: CacheUpdate, now_s: float) -> bool:
        """Take an update; True: ask the replica for a snapshot."""
        record = self._record(replica_id)
        if record is None or self.options.mode is IndexMode.PREDICTED:
            return False
        self._reported.sweep()
        if record.is_late(update):
            self._counters.late_updates += 1
            return False
        self._counters.updates += 1
        if any(len(change.packed_hashes) % BLOCK_HASH_BYTES for change in update.changes):
            self._counters.invalid_updates += 1
            record.sequence = max(record.sequence, update.sequence)
            self._mark_out_of_sync(record)
            return self._should_request_snapshot(record, now_s)
        if update.is_snapshot:
            self._counters.snapshots += 1
            self._clear_replica(replica_id, record)
            record.in_sync, record.resync_requested_at_s, record.contradictions = True, None, 0
        elif update.sequence != record.sequence + 1:
            self._mark_out_of_sync(record)
        record.sequence = update.sequence
        for position, change in enumerate(update.changes):
            self._apply_change(replica_id, record, change, update.changes[position + 1 :])
        if record.in_sync or not record.is_confirmed:
            record.confirm(now_s)
        return self._should_request_snapshot(record, now_s)

    def on_heartbeat(self, replica_id: str, sequence: int, now_s: float) -> bool:
        """A replica says which update it sent last; True: ask it for a snapshot.

        If that is the one we know, all that it reported is true to this moment.
        """
        record = self._record(replica_id)
        if record is None or self.options.mode is IndexMode.PREDICTED:
            return False
        self._reported.sweep()
        if sequence > record.sequence and record.in_sync:
            self._mark_out_of_sync(record)
        if sequence == record.sequence and record.in_sync and sequence:
            record.confirm(now_s)
        return self._should_request_snapshot(record, now_s)

    def check_prediction(
        self, replica_id: str, hashes: Sequence[int], cached_blocks: int, now_s: float
    ) -> None:
        """An engine says how many blocks of a prompt it had cached when it began with it.

        The prompt itself is in its cache by now, so its prediction stays. But if the engine had
        less than the index expected when the request was sent there (`predict`), the index may be
        wrong. It is wrong after two such answers in a row without a reported removal. If the blocks
        were predicted, all predictions for this replica are dropped. If the replica itself had
        reported them, it is out of step, and `on_heartbeat` will ask for a snapshot.
        """
        record = self._record(replica_id)
        if record is None or not hashes or self.options.mode is IndexMode.EVENTS:
            return
        self._predicted.expire(now_s)
        prediction = record.predictions.newest_by_block.get(hashes[-1])
        if prediction is None or prediction.is_confirmed:
            return
        prediction.is_confirmed = True
        if (
            prediction.expected_from is HitSource.NONE
            or prediction.removals_before != record.removals
        ):
            return
        if cached_blocks >= prediction.expected_blocks - _SLACK_BLOCKS:
            record.contradictions = 0
            return
        self._counters.contradictions += 1
        record.contradictions += 1
        if record.contradictions >= _MAX_CONTRADICTIONS:
            self._discard_source(record, prediction.expected_from)

    # ------------------------------------------------------------------ what we do

    def predict(
        self,
        replica_id: str,
        hashes: Sequence[int],
        now_s: float,
        *,
        max_blocks: int | None = None,
    ) -> None:
        """A prompt was sent to a replica: its cache will hold these blocks.

        It can find up to `max_blocks` of them cached; None: all. Of a replica that tells of whole
        prefixes only the whole of them is expected.
        """
        record = self._record(replica_id)
        if record is None or not hashes or self.options.mode is IndexMode.EVENTS:
            return
        self._reported.sweep()
        self._predicted.expire(now_s)
        chain = self._chain(hashes, max_blocks)
        reported = chain.leading_blocks(chain.reported_probe, record.bit)
        expected_blocks, source = self._expected_blocks(record, chain, reported, now_s)
        predictions = record.predictions
        # Reported blocks need no prediction; the last block carries the answer in any case.
        start = (
            min(reported, len(hashes) - 1) if record.lookahead_blocks is None else len(hashes) - 1
        )
        self._predicted.add(
            predictions,
            Prediction(
                bit=record.bit,
                at_s=now_s,
                ttl_s=self._prediction_ttl_s(record, now_s),
                blocks=list(hashes[start:]),
                expected_blocks=expected_blocks,
                expected_from=source,
                removals_before=record.removals,
            ),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no block is known: then no caller needs a prompt's hashes."""
        return not (self._reported.entries or self._predicted.masks.entries)

    def look_up(
        self, hashes: Sequence[int], now_s: float, *, max_blocks: int | None = None
    ) -> Hits:
        """The blocks of a prompt that each replica holds; valid until the index changes.

        `max_blocks` end before its last token, which engines always compute; None: all.
        """
        self._predicted.expire(now_s)
        self._counters.lookups += 1
        if not hashes:
            return NO_HITS
        hits = _PrefixHits(
            self._chain(hashes, max_blocks),
            now_s,
            records=self._replicas,
            by_bit=self._by_bit,
            rng=self._rng,
        )
        self._counters.chains_with_holes += hits.has_hole
        return hits

    def free_blocks(self, replica_id: str) -> int:
        """Blocks of a KV cache that nothing is known to be stored in; 0 for an unknown replica."""
        record = self._replicas.get(replica_id)
        if record is None:
            return 0
        predictions = record.predictions
        return max(
            0,
            predictions.capacity_blocks
            - record.reported_blocks[CacheTier.GPU]
            - len(predictions.newest_by_block),
        )

    # ------------------------------------------------------------------ for operators

    def replica_state(self, replica_id: str, now_s: float) -> ReplicaIndexState | None:
        """The state of a replica; None when it is unknown."""
        record = self._replicas.get(replica_id)
        if record is None:
            return None
        self._predicted.expire(now_s)
        return record.state(now_s, stale_s=self.options.stale_after_s)

    @property
    def entries(self) -> int:
        """Pairs of replica and reported block that take up memory."""
        return self._reported.entries

    def unique_blocks(self) -> int:
        """How many different blocks were reported, over all tiers."""
        return sum(self._reported.tiers[tier].unique_blocks() for tier in CacheTier)

    def check_integrity(self) -> None:
        """Bounds hold, counts are right, and nothing is known of a replica that is gone.

        Raises:
            AssertionError: it is not so.
        """
        self._reported.check_integrity()
        records = self._replicas.values()
        self._predicted.check_integrity([(record.bit, record.predictions) for record in records])
        assert self._reported.entries <= self.options.max_entries, "more kept than allowed"
        assert self._reported.live_slots == sum(record.bit for record in records), (
            "slots and replicas differ"
        )
        assert {self._replicas[name].bit: name for name in self._replicas} == self._by_bit
        assert self._prefix_slots == self._build_prefix_slots(), (
            "slots that tell of prefixes are not up to date"
        )
        for tier in CacheTier:
            counts = dict.fromkeys(self._by_bit, 0)
            for _, mask in self._reported.tiers[tier].masks():
                for bit in counts:
                    counts[bit] += bool(mask & bit)
            assert counts == {record.bit: record.reported_blocks[tier] for record in records}, (
                f"{tier} miscounted"
            )

    # ------------------------------------------------------------------ inside

    def _record(self, replica_id: str) -> _ReplicaRecord | None:
        record = self._replicas.get(replica_id)
        self._counters.unknown_replicas += record is None
        return record

    def _apply_change(
        self,
        replica_id: str,
        record: _ReplicaRecord,
        change: CacheChange,
        later_changes: Sequence[CacheChange],
    ) -> None:
        masks = self._reported.tiers[change.tier]
        match change.kind:
            case CacheChangeKind.STORED:
                self._store(record, change.tier, unpack_hashes(change.packed_hashes))
            case CacheChangeKind.REMOVED:
                blocks = unpack_hashes(change.packed_hashes)
                record.reported_blocks[change.tier] -= masks.discard(record.bit, blocks)
                record.removals += 1
                if change.tier is CacheTier.GPU and record.predictions.newest_by_block:
                    self._predicted.discard(record.predictions, blocks)
            case CacheChangeKind.CLEARED:
                record.removals += 1
                # Both tiers share a slot, so the other one is forgotten with it.
                cleared = {
                    later_change.tier
                    for later_change in later_changes
                    if later_change.kind is CacheChangeKind.CLEARED
                }
                cleared.add(change.tier)
                if any(record.reported_blocks[tier] for tier in CacheTier if tier not in cleared):
                    self._mark_out_of_sync(record)
                self._clear_replica(replica_id, record)
            case _:
                assert_never(change.kind)

    def _store(self, record: _ReplicaRecord, tier: CacheTier, blocks: Sequence[int]) -> None:
        masks = self._reported.tiers[tier]
        while blocks:
            free_entries = self._free_entries(record, len(blocks))
            if free_entries <= 0:
                record.dropped_blocks += len(blocks)
                self._counters.dropped_blocks += len(blocks)
                return
            record.reported_blocks[tier] += masks.add(record.bit, blocks[:free_entries])
            blocks = blocks[free_entries:]

    def _free_entries(self, record: _ReplicaRecord, needed: int) -> int:
        free = self.options.max_entries - self._reported.entries
        if (
            free - self.options.max_entries // _RESERVE_DIVISOR < needed
            and self._reported.retired_slots
        ):
            self._reported.sweep_all()
            free = self.options.max_entries - self._reported.entries
        share = self.options.max_entries // len(self._replicas)
        return max(
            min(free, share - record.entries), free - self.options.max_entries // _RESERVE_DIVISOR
        )

    def _clear_replica(self, replica_id: str, record: _ReplicaRecord) -> None:
        if not record.entries and not record.predictions.newest_by_block:
            return
        self._predicted.clear(record.predictions)
        self._reported.retire_slot(record.bit)
        del self._by_bit[record.bit]
        record.bit = self._reported.allocate_slot()
        record.reported_blocks = dict.fromkeys(CacheTier, 0)
        self._by_bit[record.bit] = replica_id
        self._prefix_slots = self._build_prefix_slots()

    def _discard_source(self, record: _ReplicaRecord, source: HitSource) -> None:
        record.contradictions = 0
        if source is HitSource.PREDICTED:
            self._predicted.discard_all(record.predictions)
        elif record.in_sync:
            self._mark_out_of_sync(record)

    def _mark_out_of_sync(self, record: _ReplicaRecord) -> None:
        record.gaps += 1
        record.in_sync = False
        self._counters.gaps += 1

    def _should_request_snapshot(self, record: _ReplicaRecord, now_s: float) -> bool:
        return record.should_request_snapshot(now_s, every_s=self.options.resync_interval_s)

    def _chain(self, hashes: Sequence[int], max_blocks: int | None) -> Chain:
        reported = self._reported
        gpu, host = reported.tiers[CacheTier.GPU], reported.tiers[CacheTier.HOST]
        live_slots = reported.live_slots if reported.retired_slots else None
        tiers = (gpu, host, self._predicted.masks)
        return Chain(
            hashes, tiers, live_slots, prefix_slots=self._prefix_slots, max_blocks=max_blocks
        )

    def _build_prefix_slots(self) -> list[PrefixSlots]:
        slots: dict[int, int] = {}
        for replica in self._replicas.values():
            if replica.lookahead_blocks is not None:
                slots[replica.lookahead_blocks] = (
                    slots.get(replica.lookahead_blocks, 0) | replica.bit
                )
        return [PrefixSlots(*item) for item in slots.items()]

    def _expected_blocks(
        self, record: _ReplicaRecord, chain: Chain, reported: int, now_s: float
    ) -> tuple[int, HitSource]:
        """How much the replica should find cached; NONE where it cannot be blamed if it does not.

        A prediction whose own request was not answered may not have been computed yet, unless it is
        old.
        """
        blocks = chain.leading_blocks(chain.expected_probe, record.bit)
        if blocks <= reported:
            return reported, HitSource.REPORTED if reported else HitSource.NONE
        basis = record.predictions.newest_by_block.get(chain.hashes[blocks - 1])
        if basis is None:
            return blocks, HitSource.NONE
        is_reliable = basis.is_confirmed or now_s - basis.at_s >= self.options.unconfirmed_ttl_s
        return blocks, HitSource.PREDICTED if is_reliable else HitSource.NONE

    def _prediction_ttl_s(self, record: _ReplicaRecord, now_s: float) -> float:
        is_reporting = record.in_sync and not record.is_stale(
            now_s, stale_s=self.options.stale_after_s
        )
        return self.options.unconfirmed_ttl_s if is_reporting else self.options.prediction_ttl_s


class _PrefixHits:
    """The answer to one lookup; it reads the index, so it is valid until that changes."""

    __slots__ = (
        "_by_bit",
        "_chain",
        "_expected_levels",
        "_gpu_levels",
        "_now_s",
        "_records",
        "_reported_levels",
        "_rng",
        "_top_holders",
        "_top_holders_limit",
        "has_hole",
    )

    def __init__(
        self,
        chain: Chain,
        now_s: float,
        *,
        records: Mapping[str, _ReplicaRecord],
        by_bit: Mapping[int, str],
        rng: Random,
    ) -> None:
        self._chain = chain
        self._now_s = now_s
        self._records = records
        self._by_bit = by_bit
        self._rng = rng
        self._expected_levels, self.has_hole = chain.levels(chain.expected_probe)
        """`has_hole`: an eviction was seen to have left a hole in the chain."""
        # Found when they are asked for.
        self._top_holders: list[str] = []
        self._top_holders_limit = 0
        self._reported_levels = (
            self._expected_levels if chain.reported_probe is chain.expected_probe else None
        )
        self._gpu_levels = (
            self._reported_levels if chain.gpu_probe is chain.reported_probe else None
        )

    def of(self, replica_id: str) -> Hit:
        """The hit of one replica; `NO_HIT` when it holds nothing or is unknown."""
        record = self._records.get(replica_id)
        if record is None:
            return NO_HIT
        bit = record.bit
        for blocks, held in self._expected_levels:
            if held & bit:
                return self._hit(record, blocks)
        return NO_HIT

    def holders(self, limit: int) -> Sequence[str]:
        """Up to `limit` replicas that hold something, those that hold most first."""
        if limit > self._top_holders_limit:
            self._top_holders, self._top_holders_limit = self._find_top_holders(limit), limit
        return self._top_holders[:limit]

    def depths(self) -> Sequence[int]:
        """The different numbers of leading blocks that replicas hold, the most first."""
        return [level.blocks for level in self._expected_levels]

    def _hit(self, record: _ReplicaRecord, blocks: int) -> Hit:
        chain, bit = self._chain, record.bit
        if self._reported_levels is None:
            self._reported_levels, _ = chain.levels(chain.reported_probe)
        reported_blocks = min(blocks, _depth(self._reported_levels, bit))
        host_blocks = 0
        if chain.gpu_probe is not chain.reported_probe:
            if self._gpu_levels is None:
                self._gpu_levels, _ = chain.levels(chain.gpu_probe)
            host_blocks = reported_blocks - min(reported_blocks, _depth(self._gpu_levels, bit))
        if reported_blocks == blocks:
            age_s = self._now_s - record.confirmed_at_s
            return Hit(blocks, host_blocks, HitSource.REPORTED, max(0.0, age_s))
        newest = record.predictions.newest_by_block.get(chain.hashes[blocks - 1])
        known_at_s = record.confirmed_at_s if newest is None else newest.at_s
        return Hit(blocks, host_blocks, HitSource.PREDICTED, max(0.0, self._now_s - known_at_s))

    def _find_top_holders(self, limit: int) -> list[str]:
        replica_ids: list[str] = []
        deeper_slots = 0
        for _, held in self._expected_levels:
            new_slots = held ^ deeper_slots  # holders of more hold this much
            deeper_slots = held
            while new_slots and len(replica_ids) < limit:
                bit = self._random_bit(new_slots)
                new_slots ^= bit
                # A caller may ask after the index has changed, for a replica that is gone.
                if (replica_id := self._by_bit.get(bit)) is not None:
                    replica_ids.append(replica_id)
        return replica_ids

    def _random_bit(self, bits: int) -> int:
        """One of the bits: the first at or above a random place."""
        above = bits >> (start := int(self._rng.random() * bits.bit_length()))
        return (above & -above) << start


def _depth(levels: Sequence[Level], bit: int) -> int:
    for blocks, held in levels:
        if held & bit:
            return blocks
    return 0
