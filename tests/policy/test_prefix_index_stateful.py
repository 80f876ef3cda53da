from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.domain.cache import (
    CacheChange,
    CacheChangeKind,
    CacheTier,
    CacheUpdate,
    pack_hashes,
)
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.policy.prefix_cache.hits import Hits
from baton.policy.prefix_cache.index import IndexMode, IndexOptions, PrefixIndex
from tests.policy.reference_index import ReferenceIndex

IDS = ("a", "b", "c")
ROOT = chain_root(model="m", block_size_tokens=2)
STEM = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
CHAINS = [
    chain_hashes(ROOT, tokens, 2)
    for tokens in (STEM, STEM[:6], STEM[:8] + (90,) * 10, STEM[:8] + (91,) * 6, (92,) * 12)
]
TIERS = st.sampled_from(list(CacheTier))
SPANS = st.tuples(st.sampled_from(CHAINS), st.integers(min_value=1, max_value=9))


@dataclass
class Engine:
    """What a replica really holds, and what it held at each number."""

    tiers: dict[CacheTier, list[int]] = field(
        default_factory=lambda: {tier: [] for tier in CacheTier}
    )
    sequence: int = 0
    pending: list[CacheChange] = field(default_factory=list)
    states: list[dict[CacheTier, frozenset[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states.append(self.state())

    def state(self) -> dict[CacheTier, frozenset[int]]:
        return {tier: frozenset(blocks) for tier, blocks in self.tiers.items()}

    def store(self, tier: CacheTier, blocks: list[int]) -> None:
        self.tiers[tier] += [block for block in blocks if block not in self.tiers[tier]]
        self.pending.append(CacheChange(CacheChangeKind.STORED, pack_hashes(blocks), tier))

    def remove(self, tier: CacheTier, blocks: list[int]) -> None:
        self.tiers[tier] = [block for block in self.tiers[tier] if block not in blocks]
        self.pending.append(CacheChange(CacheChangeKind.REMOVED, pack_hashes(blocks), tier))

    def clear(self, tier: CacheTier) -> None:
        self.tiers[tier] = []
        self.pending.append(CacheChange(CacheChangeKind.CLEARED, tier=tier))

    def take(self) -> CacheUpdate:
        self.sequence += 1
        update = CacheUpdate(self.sequence, tuple(self.pending))
        self.pending = []
        self.states.append(self.state())
        return update

    def snapshot(self) -> CacheUpdate:
        if self.pending:
            self.take()
        changes = [
            CacheChange(CacheChangeKind.STORED, pack_hashes(blocks), tier)
            for tier, blocks in self.tiers.items()
            if blocks
        ]
        return CacheUpdate(self.sequence, tuple(changes), is_snapshot=True)

    def leaves(self, tier: CacheTier) -> list[int]:
        """Blocks without a held child: what engines evict first."""
        held = set(self.tiers[tier])
        parents = {
            parent for blocks in CHAINS for parent, child in pairwise(blocks) if child in held
        }
        return [block for block in self.tiers[tier] if block not in parents]


class IndexMachine(RuleBasedStateMachine):
    """Engines that live, a link that loses and reorders, and an index that must make do."""

    mode = IndexMode.HYBRID
    updates = Bundle("updates")

    def __init__(self) -> None:
        super().__init__()
        options = IndexOptions(
            mode=self.mode, stale_after_s=1.0, prediction_ttl_s=4.0, unconfirmed_ttl_s=2.0
        )
        self.index = PrefixIndex(options, seed=1)
        self.twin = ReferenceIndex(options)
        self.engines: dict[str, Engine] = {}
        self.now_s = 100.0
        self.lives = 0

    # ---- membership and time

    @rule(replica_id=st.sampled_from(IDS), capacity=st.integers(min_value=0, max_value=14))
    def join(self, replica_id: str, capacity: int) -> None:
        self.index.add_replica(replica_id, capacity_blocks=capacity)
        self.twin.join(replica_id, capacity)
        self.engines[replica_id] = Engine()
        self.lives += 1

    @rule(replica_id=st.sampled_from(IDS))
    def leave(self, replica_id: str) -> None:
        self.index.remove_replica(replica_id)
        self.twin.remove(replica_id)
        self.engines.pop(replica_id, None)

    @rule(by_s=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s

    # ---- what engines do

    @rule(replica_id=st.sampled_from(IDS), tier=TIERS, span=SPANS)
    def store(self, replica_id: str, tier: CacheTier, span: tuple[list[int], int]) -> None:
        if engine := self.engines.get(replica_id):
            engine.store(tier, span[0][: span[1]])

    @rule(replica_id=st.sampled_from(IDS), tier=TIERS, count=st.integers(1, 5))
    def evict_leaves(self, replica_id: str, tier: CacheTier, count: int) -> None:
        engine = self.engines.get(replica_id)
        for _ in range(count if engine else 0):
            assert engine is not None
            if leaves := engine.leaves(tier):
                engine.remove(tier, leaves[:1])

    @rule(replica_id=st.sampled_from(IDS), tier=TIERS, seed=st.integers(0, 1 << 16))
    def evict_anything(self, replica_id: str, tier: CacheTier, seed: int) -> None:
        engine = self.engines.get(replica_id)
        if engine and engine.tiers[tier]:
            rng = Random(seed)
            held = engine.tiers[tier]
            engine.remove(tier, rng.sample(held, rng.randint(1, min(3, len(held)))))

    @rule(replica_id=st.sampled_from(IDS), tiers=st.lists(TIERS, min_size=1, max_size=2))
    def clear(self, replica_id: str, tiers: list[CacheTier]) -> None:
        if engine := self.engines.get(replica_id):
            for tier in tiers:
                engine.clear(tier)

    # ---- what is said, and what arrives

    @rule(target=updates, replica_id=st.sampled_from(IDS))
    def send_later(self, replica_id: str) -> object:
        engine = self.engines.get(replica_id)
        return (replica_id, self.lives, engine.take()) if engine else multiple()

    @rule(replica_id=st.sampled_from(IDS))
    def send_now(self, replica_id: str) -> None:
        if engine := self.engines.get(replica_id):
            self._deliver(replica_id, engine.take())

    @rule(update=consumes(updates), repeats=st.integers(min_value=0, max_value=2))
    def arrive(self, update: tuple[str, int, CacheUpdate], repeats: int) -> None:
        replica_id, life, content = update
        if life == self.lives:  # a link carries nothing over from an earlier life
            for _ in range(repeats):  # none: it is lost
                self._deliver(replica_id, content)

    @rule(replica_id=st.sampled_from(IDS))
    def snapshot(self, replica_id: str) -> None:
        if engine := self.engines.get(replica_id):
            self._deliver(replica_id, engine.snapshot())

    @rule(target=updates, replica_id=st.sampled_from(IDS))
    def snapshot_later(self, replica_id: str) -> object:
        engine = self.engines.get(replica_id)
        return (replica_id, self.lives, engine.snapshot()) if engine else multiple()

    @rule(replica_id=st.sampled_from(IDS), length=st.integers(1, 30), ahead=st.integers(-1, 3))
    def garbage(self, replica_id: str, length: int, ahead: int) -> None:
        engine = self.engines.get(replica_id)
        sequence = (engine.sequence if engine else 0) + ahead
        if length % 8 == 0:
            return
        stored = CacheChange(CacheChangeKind.STORED, pack_hashes(CHAINS[0]))
        broken = CacheChange(CacheChangeKind.STORED, b"x" * length)
        self._deliver(replica_id, CacheUpdate(sequence, (stored, broken)))

    @rule(replica_id=st.sampled_from([*IDS, "stranger"]))
    def beat(self, replica_id: str) -> None:
        engine = self.engines.get(replica_id)
        sequence = engine.sequence if engine else 7
        asks = self.index.on_heartbeat(replica_id, sequence, self.now_s)
        self.twin.heartbeat(replica_id, sequence, self.now_s)
        self._check_asked(replica_id, asks=asks)

    @rule()
    def ingest_of_unknown_replica(self) -> None:
        stored = CacheChange(CacheChangeKind.STORED, pack_hashes(CHAINS[0]))
        self._deliver("stranger", CacheUpdate(1, (stored,)))

    # ---- what we do

    @rule(replica_id=st.sampled_from([*IDS, "stranger"]), span=SPANS)
    def predict(self, replica_id: str, span: tuple[list[int], int]) -> None:
        hashes = span[0][: span[1]]
        self.index.predict(replica_id, hashes, self.now_s)
        self.twin.predict(replica_id, hashes, self.now_s)

    @rule(hashes=st.sampled_from(CHAINS), limit=st.integers(0, 5))
    def look_up(self, hashes: list[int], limit: int) -> None:
        hits = self.index.look_up(hashes, self.now_s)
        for replica_id in (*IDS, "stranger"):
            self._check_hit(hits, replica_id, hashes)
        depths = {
            replica_id: hits.of(replica_id).blocks
            for replica_id in IDS
            if hits.of(replica_id).blocks
        }
        named = hits.holders(limit)
        assert len(set(named)) == len(named) == min(limit, len(depths))
        assert [depths[name] for name in named] == sorted(depths.values(), reverse=True)[:limit]

    # ---- what must hold

    def _deliver(self, replica_id: str, update: CacheUpdate) -> None:
        asks = self.index.apply_update(replica_id, update, self.now_s)
        self.twin.apply(replica_id, update, self.now_s)
        self._check_asked(replica_id, asks=asks)

    def _check_asked(self, replica_id: str, *, asks: bool) -> None:
        one = self.twin.replicas.get(replica_id)
        assert not asks or (one is not None and not one.in_step)

    def _check_hit(self, hits: Hits, replica_id: str, hashes: list[int]) -> None:
        found = hits.of(replica_id)
        wanted = self.twin.hit(replica_id, hashes, self.now_s)
        if replica_id not in self.twin.replicas:
            assert found == wanted
            return
        if self.twin.is_whole(replica_id, hashes, self.now_s):
            assert found == wanted
            return
        assert wanted.blocks <= found.blocks
        assert not found.blocks or self.twin.holds(replica_id, hashes[found.blocks - 1])
        assert 0 <= found.host_blocks <= found.blocks
        if getattr(hits, "broken", False):
            assert found.blocks == wanted.blocks

    @invariant()
    def agrees_with_the_twin(self) -> None:
        self.index.check_integrity()
        for replica_id in IDS:
            state = self.index.replica_state(replica_id, self.now_s)
            one = self.twin.replicas.get(replica_id)
            assert (state is None) == (one is None)
            if state is None or one is None:
                continue
            assert state.sequence == one.sequence
            assert state.in_sync == one.in_step
            assert state.gpu_blocks == len(one.tiers[CacheTier.GPU])
            assert state.host_blocks == len(one.tiers[CacheTier.HOST])
            if self.mode is not IndexMode.PREDICTED and one.in_step:
                truth = self.engines[replica_id].states[one.sequence]
                assert {tier: frozenset(held) for tier, held in one.tiers.items()} == truth


class EventsMachine(IndexMachine):
    """The same when only reports count."""

    mode = IndexMode.EVENTS


class PredictedMachine(IndexMachine):
    """The same when only our own decisions count."""

    mode = IndexMode.PREDICTED


_SETTINGS = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestHybrid = IndexMachine.TestCase
TestHybrid.settings = _SETTINGS
TestEvents = EventsMachine.TestCase
TestEvents.settings = _SETTINGS
TestPredicted = PredictedMachine.TestCase
TestPredicted.settings = _SETTINGS
