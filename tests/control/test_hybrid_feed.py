"""The cache feed of hybrid models: which prefixes it says are reusable.

That it says what vLLM does is held against vLLM's own cache manager in
`tests/engine/test_hybrid_cache.py`.
"""

from __future__ import annotations

from baton.control.fleet.hybrid_feed import HybridCacheFeed
from baton.domain.cache import (
    CacheChangeKind,
    CacheGroup,
    CacheShape,
    PrefixRequirement,
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
FULL, WINDOW, STATE = 0, 1, 2
Tokens = tuple[int, ...]
ATTENTION = CacheGroup(PrefixRequirement.ALL, SIZE)
TWO_BLOCKS = CacheGroup(PrefixRequirement.TRAILING_BLOCKS, SIZE, span=2)
PROMPT = (1, 1, 2, 2, 3, 3, 4, 4)


def name_of(tokens: Tokens) -> bytes:
    return repr(tokens).encode()


def stored(
    tokens: Tokens, since: int = 0, *, group: int = FULL, tier: str | None = None
) -> BlocksStored:
    ends = range((since + 1) * SIZE, len(tokens) + 1, SIZE)
    return BlocksStored(
        block_hashes=tuple(name_of(tokens[:end]) for end in ends),
        parent_hash=name_of(tokens[: since * SIZE]) if since else None,
        token_ids=tokens[since * SIZE :],
        block_size_tokens=SIZE,
        group=group,
        tier=tier,
    )


def named(*blocks: Tokens, group: int) -> BlocksStored:
    """A run with holes: which blocks of it there are, but not their tokens."""
    return BlocksStored(
        block_hashes=tuple(map(name_of, blocks)),
        parent_hash=None,
        token_ids=(),
        block_size_tokens=0,
        group=group,
    )


def removed(*blocks: Tokens, group: int = FULL) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=tuple(map(name_of, blocks)), group=group)


class Script:
    """A feed, the engine that feeds it, and a reader of its updates."""

    def __init__(self, *groups: CacheGroup, capacity_blocks: int = 100) -> None:
        self.feed = HybridCacheFeed(
            model=MODEL,
            block_size_tokens=SIZE,
            capacity_blocks=capacity_blocks,
            shape=CacheShape(groups, alignment_tokens=SIZE),
        )
        self._batches = 0
        self._told: set[int] = set()

    def say(self, *events: KvEvent) -> None:
        self.feed.apply(KvEventBatch(replica_id="r", sequence=self._batches, events=events))
        self._batches += 1
        self.feed.check_integrity()

    def lose(self) -> None:
        self._batches += 1

    def told(self, tokens: Tokens = PROMPT) -> list[int]:
        """By how many blocks of a prompt the reusable prefixes go that a reader knows."""
        update = self.feed.pop_update()
        self.feed.check_integrity()
        for change in () if update is None else update.changes:
            blocks = set(unpack_hashes(change.packed_hashes))
            match change.kind:
                case CacheChangeKind.STORED:
                    self._told |= blocks
                case CacheChangeKind.REMOVED:
                    self._told -= blocks
                case CacheChangeKind.CLEARED:
                    self._told.clear()
        snapshot = self.feed.snapshot()
        whole = {
            unpack_hash
            for change in snapshot.changes
            for unpack_hash in unpack_hashes(change.packed_hashes)
        }
        assert whole == self._told
        root = chain_root(model=MODEL, block_size_tokens=SIZE)
        blocks_of = enumerate(chain_hashes(root, tokens, SIZE), start=1)
        return [end for end, block in blocks_of if block in self._told]


def test_a_prefix_is_reusable_where_each_group_holds_what_it_needs() -> None:
    script = Script(ATTENTION, TWO_BLOCKS)
    script.say(stored(PROMPT))
    assert script.told() == []
    script.say(named(PROMPT[:6], PROMPT, group=WINDOW))
    assert script.told() == [4]
    script.say(stored(PROMPT[:2], group=WINDOW))
    assert script.told() == [1, 4]
    script.say(removed(PROMPT[:6], group=WINDOW))
    assert script.told() == [1]


def test_a_hole_in_full_attention_ends_all_that_lies_behind_it() -> None:
    script = Script(ATTENTION, TWO_BLOCKS)
    script.say(stored(PROMPT), stored(PROMPT, group=WINDOW))
    assert script.told() == [1, 2, 3, 4]
    script.say(removed(PROMPT[:4]))
    assert script.told() == [1]
    script.say(stored(PROMPT[:4], since=1))
    assert script.told() == [1, 2, 3, 4]


def test_a_state_serves_the_prefix_at_whose_end_it_is_and_no_other() -> None:
    script = Script(ATTENTION, CacheGroup(PrefixRequirement.TRAILING_BLOCKS, SIZE, span=1))
    script.say(named(PROMPT[:6], group=1), stored(PROMPT))  # in the order of vLLM's groups
    assert script.told() == [3]


def test_blocks_are_held_as_often_as_they_were_stored() -> None:
    script = Script(ATTENTION, TWO_BLOCKS)
    script.say(stored(PROMPT[:2]), stored(PROMPT[:2], group=WINDOW))
    script.say(stored(PROMPT[:2], group=WINDOW))
    script.say(removed(PROMPT[:2], group=WINDOW))
    assert script.told() == [1]
    script.say(removed(PROMPT[:2], group=WINDOW))
    assert script.told() == []


def test_a_block_of_the_host_tier_is_not_reported() -> None:
    script = Script(ATTENTION, TWO_BLOCKS)
    script.say(stored(PROMPT), stored(PROMPT, group=WINDOW, tier="cpu"))
    assert script.told() == []
    assert script.feed.counters.other_tiers == 4


def test_where_drafts_peek_a_prefix_goes_by_the_block_behind_it() -> None:
    script = Script(
        ATTENTION._replace(needs_next_block=True),
        CacheGroup(PrefixRequirement.TRAILING_BLOCKS, SIZE, span=1),
    )
    script.say(stored(PROMPT[:6]), named(PROMPT[:4], group=1))
    assert script.told() == [3]
    script.say(removed(PROMPT[:6]))
    assert script.told() == []


def test_after_lost_events_nothing_is_told_until_it_is_proven() -> None:
    script = Script(ATTENTION, CacheGroup(PrefixRequirement.TRAILING_BLOCKS, SIZE, span=1))
    script.say(stored(PROMPT[:6]), named(PROMPT[:6], group=1))
    assert script.told() == [3]
    script.lose()
    script.say(stored(PROMPT, since=3))
    assert script.told() == []  # attention is proven, the state is not
    script.say(named(PROMPT, group=1))
    assert script.told() == [4]


def test_an_emptied_cache_is_told_as_empty() -> None:
    script = Script(ATTENTION, TWO_BLOCKS)
    script.say(stored(PROMPT), stored(PROMPT, group=WINDOW))
    assert script.told() == [1, 2, 3, 4]
    script.say(BlocksCleared())
    assert script.told() == []
    script.say(stored(PROMPT), stored(PROMPT, group=WINDOW))
    assert script.told() == [1, 2, 3, 4]


def test_the_number_of_kept_blocks_is_bounded_and_the_oldest_is_forgotten() -> None:
    script = Script(ATTENTION, TWO_BLOCKS, capacity_blocks=8)
    script.say(stored(PROMPT), stored(PROMPT, group=WINDOW))
    assert script.told() == [1, 2, 3, 4]
    for start in range(100, 200, 10):
        other = tuple(range(start, start + 8))
        script.say(stored(other), stored(other, group=WINDOW))
    assert script.told() == []
    assert script.told(tuple(range(190, 198))) == [1, 2, 3, 4]
    script.say(*(named((0, start), group=WINDOW) for start in range(200)))
    assert script.feed.counters.forgotten > 200 - 16


def test_groups_that_are_not_known_are_left_out() -> None:
    script = Script(ATTENTION)
    script.say(stored(PROMPT, group=3), stored(PROMPT[:2]))
    assert script.told() == [1]
    assert script.feed.counters.other_groups == 4
