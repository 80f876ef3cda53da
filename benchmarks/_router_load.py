"""What the router-cost benchmark feeds a prefix index with, and asks it for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate, pack_hashes
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root

MODEL = "none"
BLOCK_TOKENS = 16
EVENT_BLOCKS = 128
SHARED_BLOCKS = 32
"""Of each event: a system prompt that all replicas hold. These blocks are 512 tokens."""
LONG_EVENTS = 4
"""Events in a row of the longest stored prompt: 512 blocks, 8,192 tokens."""
KINDS = ("full", "part", "miss")
ROOT = chain_root(model=MODEL, block_size_tokens=BLOCK_TOKENS)
_VOCABULARY = 150_000
_HASH_BITS = 60


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet of this many replicas, with this many (replica, block) pairs in all."""

    replicas: int
    entries: int
    seed: int = 0

    @property
    def name(self) -> str:
        """As in the keys of the result: `1000_1m`."""
        size = {10_000: "10k", 100_000: "100k", 1_000_000: "1m"}.get(self.entries)
        return f"{self.replicas}_{size or self.entries}"

    @property
    def ids(self) -> tuple[str, ...]:
        """The replicas' ids."""
        return tuple(f"replica-{n:04}" for n in range(self.replicas))


@dataclass(slots=True)
class StoredEvent:
    """One event's worth of blocks on one replica."""

    replica_id: str
    shared_hashes: tuple[int, ...]
    own_hashes: tuple[int, ...]

    @property
    def packed_hashes(self) -> bytes:
        """The event's hashes as they arrive."""
        return pack_hashes(self.shared_hashes + self.own_hashes)


class IndexLoad:
    """Events of 128 blocks, of which 32 are a system prompt: of each prompt one event per replica.

    Hence all pairs of a replica and a block are different. A few events are the beginnings of
    prompts that are asked for later, and so have the hashes of real tokens; the others' blocks are
    drawn at random, as hashes are.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._rng = Random(case.seed)  # noqa: S311 - a workload, not a secret
        events = max(LONG_EVENTS, case.entries // EVENT_BLOCKS)
        groups = -(-events // case.replicas)
        self._system_prompts = [self._tokens(SHARED_BLOCKS) for _ in range(groups)]
        self._shared_hashes = [
            tuple(chain_hashes(ROOT, tokens, BLOCK_TOKENS)) for tokens in self._system_prompts
        ]
        self.long_prompts: list[tuple[int, ...]] = []
        group_replica_pairs = [(group, id_) for group in range(groups) for id_ in case.ids][:events]
        self.events = list(self._long_events(group_replica_pairs))
        long_event_count = len(self.events)
        self.events += [
            self._random_event(group, name)
            for group, name in group_replica_pairs[long_event_count:]
        ]
        self._rng.shuffle(self.events)

    def replacement_events(self) -> list[StoredEvent]:
        """As many events again, with other blocks of their own on the same system prompts."""
        return [
            StoredEvent(e.replica_id, e.shared_hashes, self._hashes(len(e.own_hashes)))
            for e in self.events
        ]

    def draw_prompt(self, kind: str, tokens: int) -> tuple[int, ...]:
        """A prompt: held in full if one so long is held, to half of that, or not at all."""
        blocks = tokens // BLOCK_TOKENS
        cached_tokens: tuple[int, ...] = ()
        if kind != "miss":
            long_prompt = self._rng.choice(self.long_prompts)
            cached_blocks = min(len(long_prompt) // BLOCK_TOKENS, blocks)
            cached_blocks = cached_blocks if kind == "full" else cached_blocks // 2
            cached_tokens = long_prompt[: cached_blocks * BLOCK_TOKENS]
        return cached_tokens + self._tokens(blocks - len(cached_tokens) // BLOCK_TOKENS)

    def draw_prompts(self, count: int, tokens: int) -> list[tuple[str, tuple[int, ...]]]:
        """Prompts of all kinds in turn."""
        kinds = [KINDS[n % len(KINDS)] for n in range(count)]
        return [(kind, self.draw_prompt(kind, tokens)) for kind in kinds]

    def _long_events(self, group_replica_pairs: Sequence[tuple[int, str]]) -> Iterator[StoredEvent]:
        """One event in 16, at most 64 prompts: chains of real tokens, in events of 128 blocks."""
        count = min(64, max(1, len(group_replica_pairs) // (16 * LONG_EVENTS)))
        for group, replica_id in group_replica_pairs[:count]:
            prompt = self._system_prompts[group] + self._tokens(
                LONG_EVENTS * EVENT_BLOCKS - SHARED_BLOCKS
            )
            self.long_prompts.append(prompt)
            hashes = chain_hashes(ROOT, prompt, BLOCK_TOKENS)
            yield StoredEvent(
                replica_id, self._shared_hashes[group], tuple(hashes[SHARED_BLOCKS:EVENT_BLOCKS])
            )
            for begin in range(EVENT_BLOCKS, len(hashes), EVENT_BLOCKS):
                yield StoredEvent(replica_id, (), tuple(hashes[begin : begin + EVENT_BLOCKS]))

    def _random_event(self, group: int, replica_id: str) -> StoredEvent:
        shared = self._shared_hashes[group]
        return StoredEvent(replica_id, shared, self._hashes(EVENT_BLOCKS - SHARED_BLOCKS))

    def _hashes(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.getrandbits(_HASH_BITS) for _ in range(count))

    def _tokens(self, blocks: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(_VOCABULARY), k=blocks * BLOCK_TOKENS))


class CacheUpdateFeed:
    """Numbers the updates of every replica."""

    def __init__(self) -> None:
        self._sequences: dict[str, int] = {}

    def update(self, replica_id: str, *changes: CacheChange, snapshot: bool = False) -> CacheUpdate:
        """The next update of a replica."""
        self._sequences[replica_id] = self._sequences.get(replica_id, 0) + 1
        return CacheUpdate(self._sequences[replica_id], changes, is_snapshot=snapshot)

    def stored_updates(self, events: Iterable[StoredEvent]) -> list[tuple[str, CacheUpdate]]:
        """One update for each event."""
        kind = CacheChangeKind.STORED
        return [
            (
                event.replica_id,
                self.update(event.replica_id, CacheChange(kind, event.packed_hashes)),
            )
            for event in events
        ]

    def removed_updates(self, events: Iterable[StoredEvent]) -> list[tuple[str, CacheUpdate]]:
        """One update for each event: its own blocks are gone, deepest first."""
        kind = CacheChangeKind.REMOVED
        return [
            (
                event.replica_id,
                self.update(
                    event.replica_id, CacheChange(kind, pack_hashes(reversed(event.own_hashes)))
                ),
            )
            for event in events
        ]
