"""The cache feed: engine events in, numbered updates with our own hashes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.control.fleet.cache_feed import CacheFeed
from baton.domain.cache import (
    CacheChange,
    CacheChangeKind,
    CacheTier,
    CacheUpdate,
    pack_hashes,
    unpack_hashes,
)
from baton.domain.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
)
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root

SIZE = 2
MODEL = "tiny"
GPU, HOST = CacheTier.GPU, CacheTier.HOST
Tokens = tuple[int, ...]


def name_of(tokens: Tokens, salt: str | None = None) -> bytes:
    """What our engine calls the last block of these tokens."""
    return f"{salt}:{tokens}".encode()


def hash_of(tokens: Tokens, *, salt: str | None = None, adapter: str | None = None) -> int:
    root = chain_root(model=MODEL, block_size_tokens=SIZE, adapter=adapter, salt=salt)
    return chain_hashes(root, tokens, SIZE)[-1]


def stored(
    tokens: Tokens, since: int = 0, *, tier: str | None = None, salt: str | None = None
) -> BlocksStored:
    """The engine stored the blocks of `tokens` from block `since` on."""
    ends = range((since + 1) * SIZE, len(tokens) + 1, SIZE)
    return BlocksStored(
        block_hashes=tuple(name_of(tokens[:end], salt) for end in ends),
        parent_hash=name_of(tokens[: since * SIZE], salt) if since else None,
        token_ids=tokens[since * SIZE :],
        block_size_tokens=SIZE,
        tier=tier,
        cache_salt=None if since else salt,  # engines need not repeat it: the parent implies it
    )


def removed(*blocks: Tokens, tier: str | None = None, salt: str | None = None) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=tuple(name_of(b, salt) for b in blocks), tier=tier)


class Script:
    """A feed, the engine that feeds it, and a reader of its updates."""

    def __init__(self, capacity_blocks: int = 100, host_blocks: int = 0) -> None:
        self.feed = CacheFeed(
            model=MODEL,
            block_size_tokens=SIZE,
            capacity_blocks=capacity_blocks,
            host_blocks=host_blocks,
        )
        self.known: dict[CacheTier, set[int]] = {tier: set() for tier in CacheTier}
        self._read = 0
        self._batches = 0

    def say(self, *events: KvEvent) -> None:
        batch = KvEventBatch(replica_id="r", sequence=self._batches, events=events)
        self._batches += 1
        self.feed.apply(batch)
        self.feed.check_integrity()

    def lose(self) -> None:
        """A batch is lost on its way."""
        self._batches += 1

    def read(self) -> CacheUpdate | None:
        """Take an update as a coordinator does."""
        update = self.feed.pop_update()
        if update is not None:
            assert update.sequence == self._read + 1
            self._read = update.sequence
            apply(self.known, update)
        return update

    def believed(self, tier: CacheTier = GPU) -> set[int]:
        self.read()
        return self.known[tier]


def apply(known: dict[CacheTier, set[int]], update: CacheUpdate) -> None:
    """What any reader makes of an update."""
    if update.is_snapshot:
        for blocks in known.values():
            blocks.clear()
    for change in update.changes:
        match change.kind:
            case CacheChangeKind.STORED:
                known[change.tier] |= set(unpack_hashes(change.packed_hashes))
            case CacheChangeKind.REMOVED:
                known[change.tier] -= set(unpack_hashes(change.packed_hashes))
            case CacheChangeKind.CLEARED:
                known[change.tier].clear()


def blocks(*prompts: Tokens, salt: str | None = None) -> set[int]:
    return {hash_of(prompt, salt=salt) for prompt in prompts}


A, AB, ABC = (1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)


def test_stored_blocks_have_hashes_that_are_computable_from_tokens() -> None:
    script = Script()
    script.say(stored(AB))
    root = chain_root(model=MODEL, block_size_tokens=SIZE)
    change = CacheChange(CacheChangeKind.STORED, pack_hashes(chain_hashes(root, AB, SIZE)))
    assert script.feed.pop_update() == CacheUpdate(1, (change,))


def test_a_block_stored_twice_is_gone_when_it_was_removed_twice() -> None:
    script = Script()
    script.say(stored(A), stored(A), removed(A))
    assert script.believed() == blocks(A)
    script.say(removed(A))
    assert script.believed() == set()


def test_salts_and_adapters_keep_equal_tokens_apart() -> None:
    script = Script()
    script.say(stored(AB, salt="tenant"))
    assert script.believed() == blocks(A, AB, salt="tenant")
    adapted = BlocksStored(
        block_hashes=(b"x",),
        parent_hash=None,
        token_ids=A,
        block_size_tokens=SIZE,
        adapter="lora",
    )
    script.say(adapted)
    assert hash_of(A, adapter="lora") in script.believed()
    assert not script.believed() & blocks(A, AB)


def test_the_parents_salt_holds_for_a_block_whose_own_event_does_not_say_it() -> None:
    script = Script()
    script.say(stored(A, salt="tenant"), stored(ABC, since=1, salt="tenant"))
    assert script.believed() == blocks(A, AB, ABC, salt="tenant")


def test_opaque_blocks_and_those_behind_them_are_left_out() -> None:
    script = Script()
    image = stored(AB, since=1)
    opaque = BlocksStored(
        block_hashes=image.block_hashes,
        parent_hash=image.parent_hash,
        token_ids=image.token_ids,
        block_size_tokens=SIZE,
        has_hidden_content=True,
    )
    script.say(stored(A), opaque, stored(ABC, since=2))
    assert script.believed() == blocks(A)
    assert (script.feed.counters.opaque, script.feed.counters.orphans) == (1, 1)


def test_a_block_whose_parent_is_unknown_is_left_out_and_counted() -> None:
    script = Script()
    script.say(stored(ABC, since=1))
    assert script.believed() == set()
    assert script.feed.counters.orphans == 2


def test_a_block_of_another_size_is_left_out_and_counted() -> None:
    script = Script()
    script.say(
        BlocksStored(block_hashes=(b"half",), parent_hash=None, token_ids=(1,), block_size_tokens=1)
    )
    script.say(
        BlocksStored(block_hashes=(b"?",), parent_hash=None, token_ids=(), block_size_tokens=0)
    )
    assert script.read() is None
    assert script.feed.counters.other_size == 2


def test_removing_what_was_never_stored_changes_nothing() -> None:
    script = Script()
    script.say(stored(A))
    script.read()
    script.say(removed(AB))
    script.say(removed(A, tier="cpu"))
    assert script.read() is None
    assert script.believed() == blocks(A)
    assert script.feed.counters.unknown_removed == 1


def test_a_block_that_one_tier_holds_needs_no_tokens_to_be_known_in_another() -> None:
    script = Script()
    script.say(stored(A))
    named_only = BlocksStored(
        block_hashes=(name_of(A), b"unheard of"),
        parent_hash=None,
        token_ids=(),
        block_size_tokens=0,
        tier="cpu",
    )
    script.say(named_only)
    assert script.believed(HOST) == blocks(A)
    assert script.feed.counters.other_size == 1


@pytest.mark.parametrize("tier", ["gpu", "cpu"])
@pytest.mark.parametrize("parent", [None, name_of(A), b"unheard of"])
def test_names_without_tokens_are_counted_and_their_successors_reported(
    tier: str, parent: bytes | None
) -> None:
    script = Script()
    placeholder = BlocksStored(
        block_hashes=(b"one", b"two"),
        parent_hash=parent,
        token_ids=(),
        block_size_tokens=0,
        tier=tier,
    )
    script.say(stored(A), placeholder, stored(AB, since=1))
    assert script.believed(GPU) == blocks(A, AB)
    assert script.believed(HOST) == set()
    counters = script.feed.counters
    assert (counters.other_size, counters.orphans) == (
        (2, 0) if parent != b"unheard of" else (0, 2)
    )
    script.say(BlocksRemoved(block_hashes=(b"one", b"two"), tier=tier))
    assert script.feed.counters.unknown_removed == 2
    assert script.believed(GPU) == blocks(A, AB)


def test_a_cleared_cache_is_reported_once_and_later_blocks_are_kept() -> None:
    script = Script()
    script.say(stored(AB), stored(A, tier="cpu"))
    script.read()
    script.say(BlocksCleared(), stored(A))
    update = script.read()
    assert update is not None
    assert [(c.kind, c.tier) for c in update.changes] == [
        (CacheChangeKind.CLEARED, GPU),
        (CacheChangeKind.STORED, GPU),
        (CacheChangeKind.CLEARED, HOST),
    ]
    assert script.known == {GPU: blocks(A), HOST: set()}
    script.say(BlocksCleared())
    script.read()
    script.say(BlocksCleared())
    assert script.read() is None


def test_many_events_become_one_update_that_says_what_became_of_each_block() -> None:
    script = Script()
    script.say(stored(A))
    script.read()
    for n in range(50):
        script.say(stored((9, n)), removed((9, n)), removed(A), stored(A))
    assert script.read() is None
    assert script.feed.sequence == 1
    script.say(stored(AB, since=1))
    script.say(stored((7, 7)), removed(A))
    assert script.read() == CacheUpdate(
        2,
        (
            CacheChange(CacheChangeKind.REMOVED, pack_hashes(blocks(A))),
            CacheChange(CacheChangeKind.STORED, pack_hashes([hash_of(AB), hash_of((7, 7))])),
        ),
    )


def test_a_late_or_repeated_batch_is_ignored() -> None:
    feed = CacheFeed(model=MODEL, block_size_tokens=SIZE, capacity_blocks=9)
    for sequence in (5, 5, 4):
        feed.apply(KvEventBatch(replica_id="r", sequence=sequence, events=(stored(A),)))
    feed.apply(KvEventBatch(replica_id="r", sequence=6, events=(removed(A),)))
    assert feed.pop_update() is None
    assert (feed.counters.late_batches, feed.counters.gaps) == (2, 0)


# ---------------------------------------------------------------------- gaps


def test_after_a_gap_nothing_is_claimed_until_the_engine_proves_that_it_holds_it() -> None:
    script = Script()
    script.say(stored(AB), stored((8, 8)))
    script.read()
    script.lose()
    script.say()
    assert script.believed() == set()
    assert script.feed.counters.gaps == 1
    script.say(stored(ABC, since=2))
    assert script.believed() == blocks(A, AB, ABC)


def test_confirmed_blocks_are_reported_parents_first() -> None:
    script = Script()
    script.say(stored(AB))
    script.lose()
    script.say(stored(ABC, since=2))
    update = script.feed.pop_update()
    assert update is not None
    assert [list(unpack_hashes(c.packed_hashes)) for c in update.changes] == [
        [],
        [hash_of(A), hash_of(AB), hash_of(ABC)],
    ]


def test_an_unconfirmed_block_that_is_removed_is_not_confirmed_later() -> None:
    script = Script()
    script.say(stored(AB))
    script.lose()
    script.say(removed(AB))
    script.say(stored(ABC, since=2))
    assert script.believed() == set()
    assert script.feed.counters.orphans == 1


def test_a_block_stored_in_host_memory_proves_nothing_about_those_before_it() -> None:
    script = Script()
    script.say(stored(AB), stored(AB, tier="cpu"))
    script.lose()
    script.say(stored(ABC, since=2, tier="cpu"))
    assert script.believed(HOST) == blocks(ABC)
    assert script.believed(GPU) == set()


# ---------------------------------------------------------------------- snapshots


def test_a_snapshot_holds_all_tiers_parents_first_under_the_number_of_the_last_update() -> None:
    script = Script()
    script.say(stored(AB), stored(A, tier="cpu"))
    script.read()
    script.say(stored(ABC, since=2))
    script.read()
    assert script.feed.snapshot() == CacheUpdate(
        2,
        (
            CacheChange(
                CacheChangeKind.STORED, pack_hashes([hash_of(A), hash_of(AB), hash_of(ABC)])
            ),
            CacheChange(CacheChangeKind.STORED, pack_hashes([hash_of(A)]), HOST),
        ),
        is_snapshot=True,
    )


@pytest.mark.parametrize(("limit", "told"), [(0, []), (1, [1]), (3, [2, 1]), (9, [2, 2])])
def test_a_snapshot_that_must_be_short_keeps_the_beginnings(limit: int, told: list[int]) -> None:
    script = Script()
    script.say(stored(AB), stored(AB, tier="cpu"))
    snapshot = script.feed.snapshot(limit)
    assert [len(unpack_hashes(change.packed_hashes)) for change in snapshot.changes] == told


def test_an_empty_cache_has_an_empty_snapshot() -> None:
    assert Script().feed.snapshot() == CacheUpdate(0, (), is_snapshot=True)


# ---------------------------------------------------------------------- bounds


def test_no_more_than_twice_the_capacity_is_remembered_and_the_oldest_goes_first() -> None:
    script = Script(capacity_blocks=8)
    prompts = [(n, n) for n in range(17)]
    for prompt in prompts:
        script.say(stored(prompt))
    assert script.believed() == blocks(*prompts[2:])
    assert script.feed.counters.forgotten == 2
    script.say(removed(*prompts))
    assert script.believed() == set()
    assert script.feed.counters.unknown_removed == 2


@pytest.mark.parametrize(
    ("host_blocks", "tier", "kept"), [(16, "cpu", 32), (16, "gpu", 16), (0, "cpu", 16)]
)
def test_each_tier_has_its_own_bound_and_host_memory_counts_no_less_than_the_kv_cache(
    host_blocks: int, tier: str, kept: int
) -> None:
    script = Script(capacity_blocks=8, host_blocks=host_blocks)
    prompts = [(n, n) for n in range(kept + 1)]
    for prompt in prompts[:-1]:
        script.say(stored(prompt, tier=tier))
    assert script.feed.counters.forgotten == 0
    script.say(stored(prompts[-1], tier=tier))
    forgotten = kept // 8
    assert script.feed.counters.forgotten == forgotten
    place = HOST if tier == "cpu" else GPU
    assert script.believed(place) == blocks(*prompts[forgotten:])


def test_unconfirmed_blocks_are_forgotten_before_confirmed_ones() -> None:
    script = Script(capacity_blocks=4)
    script.say(*(stored((n, n)) for n in range(4)))
    script.lose()
    held = [(n, n) for n in range(10, 18)]
    script.say(*(stored(prompt) for prompt in held))
    assert script.believed() == blocks(*held)


def test_an_engine_that_gives_one_block_ever_new_names_costs_no_memory() -> None:
    script = Script(capacity_blocks=2)
    for n in range(100):
        script.say(
            BlocksStored(
                block_hashes=(b"%d" % n,), parent_hash=None, token_ids=A, block_size_tokens=SIZE
            )
        )
    assert script.believed() == blocks(A)


def test_a_name_that_stands_for_other_tokens_than_before_stands_for_those_only() -> None:
    script = Script()
    for tokens in (A, (5, 5)):
        script.say(
            BlocksStored(
                block_hashes=(b"n",), parent_hash=None, token_ids=tokens, block_size_tokens=SIZE
            )
        )
    assert script.believed() == blocks((5, 5))


# ---------------------------------------------------------------------- against a slow twin


class _Block(NamedTuple):
    """A block, written out in full."""

    salt: str | None
    tokens: Tokens

    @property
    def before(self) -> _Block | None:
        tokens = self.tokens[:-SIZE]
        return _Block(self.salt, tokens) if tokens else None


class Twin:
    """The rules said again with whole prompts for names, and nothing remembered but sets."""

    def __init__(self) -> None:
        self.held: dict[CacheTier, Counter[_Block]] = {tier: Counter() for tier in CacheTier}
        self.doubted: dict[CacheTier, set[_Block]] = {tier: set() for tier in CacheTier}

    def _known(self, block: _Block) -> bool:
        return any(self.held[t][block] or block in self.doubted[t] for t in CacheTier)

    def store(self, run: list[_Block], tier: CacheTier) -> None:
        before = run[0].before
        if before is not None and not self._known(before):
            run = [block for block in run if self._known(block)]
        elif before is not None and tier is GPU:
            while before is not None and before in self.doubted[tier]:
                self._hold(before, tier)
                before = before.before
        for block in run:
            self._hold(block, tier)

    def _hold(self, block: _Block, tier: CacheTier) -> None:
        self.doubted[tier].discard(block)
        self.held[tier][block] += 1

    def remove(self, block: _Block, tier: CacheTier) -> None:
        self.doubted[tier].discard(block)
        if self.held[tier][block]:
            self.held[tier][block] -= 1

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc] # all is as in the beginning

    def gap(self) -> None:
        for tier in CacheTier:
            self.doubted[tier] |= set(+self.held[tier])
            self.held[tier].clear()

    def believed(self, tier: CacheTier) -> set[int]:
        return {hash_of(block.tokens, salt=block.salt) for block in +self.held[tier]}


token_runs = st.lists(st.sampled_from([0, 1]), min_size=SIZE, max_size=4 * SIZE).map(
    lambda tokens: tuple(tokens[: len(tokens) // SIZE * SIZE])
)
tiers = st.sampled_from(["gpu", "cpu", None])
salts = st.sampled_from([None, "s"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), token_runs, st.integers(0, 3), tiers, salts),
        st.tuples(st.just("store"), token_runs, st.just(0), tiers, salts),
        st.tuples(st.just("remove"), token_runs, st.just(0), tiers, salts),
        st.tuples(
            st.sampled_from(["clear", "gap", "read", "read"]),
            st.just(A),
            st.just(0),
            st.none(),
            st.none(),
        ),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_the_feed_tells_what_a_slow_twin_believes(
    script_of: list[tuple[str, Tokens, int, str | None, str | None]],
) -> None:
    script, twin = Script(), Twin()
    for kind, tokens, since, tier, salt in script_of:
        place = HOST if tier == "cpu" else GPU
        first = min(since, len(tokens) // SIZE - 1)
        match kind:
            case "store":
                script.say(stored(tokens, first, tier=tier, salt=salt))
                run = [_Block(salt, t) for t in prefixes(tokens)]
                twin.store(run[first:], place)
            case "remove":
                script.say(removed(tokens, tier=tier, salt=salt))
                twin.remove(_Block(salt, tokens), place)
            case "clear":
                script.say(BlocksCleared())
                twin.clear()
            case "gap":
                script.lose()
                script.say()
                twin.gap()
            case _:
                script.read()
                assert script.known == {place: twin.believed(place) for place in CacheTier}
        check(script, twin)


def prefixes(tokens: Tokens) -> Iterable[Tokens]:
    return (tokens[:end] for end in range(SIZE, len(tokens) + 1, SIZE))


def check(script: Script, twin: Twin) -> None:
    snapshot: dict[CacheTier, set[int]] = {tier: set() for tier in CacheTier}
    apply(snapshot, script.feed.snapshot())
    assert snapshot == {tier: twin.believed(tier) for tier in CacheTier}
    assert [script.feed.held_blocks(t) for t in CacheTier] == [len(snapshot[t]) for t in CacheTier]


@settings(max_examples=50, deadline=None)
@given(steps, st.integers(1, 3))
def test_a_reader_ends_up_with_the_snapshot_and_the_bound_holds(
    script_of: list[tuple[str, Tokens, int, str | None, str | None]], capacity_blocks: int
) -> None:
    script = Script(capacity_blocks)
    for kind, tokens, since, tier, salt in script_of:
        match kind:
            case "store":
                script.say(
                    stored(tokens, min(since, len(tokens) // SIZE - 1), tier=tier, salt=salt)
                )
            case "remove":
                script.say(removed(tokens, tier=tier, salt=salt))
            case "clear":
                script.say(BlocksCleared())
            case "gap":
                script.lose()
            case _:
                script.read()
    script.read()
    snapshot: dict[CacheTier, set[int]] = {held: set() for held in CacheTier}
    apply(snapshot, script.feed.snapshot())
    assert script.known == snapshot
    assert all(len(held) <= 2 * capacity_blocks for held in snapshot.values())


def test_groups_of_layers_that_are_not_there_are_left_out() -> None:
    script = Script()
    script.say(stored((1, 1)), replace(stored((2, 2)), group=1), replace(removed((1, 1)), group=1))
    assert script.believed() == {hash_of((1, 1))}
    assert script.feed.counters.other_groups == 2
