from __future__ import annotations

from baton.domain.kv_events import BlocksRemoved, BlocksStored
from baton.simulator.engine.memory import HostTier


def stored(*names: bytes, after: bytes | None = None) -> BlocksStored:
    return BlocksStored(
        block_hashes=names,
        parent_hash=after,
        token_ids=tuple(range(2 * len(names))),
        block_size_tokens=2,
        tier="gpu",
    )


def filled(room: int, *names: bytes) -> HostTier:
    """A tier that has taken over these blocks, one prompt's, tails first."""
    tier = HostTier(room)
    tier.record_gpu_blocks(stored(*names))
    list(tier.store_evicted(names[::-1]))
    return tier


def evict(tier: HostTier, *names: bytes) -> list[bytes]:
    """Let another prompt's blocks come and go; what they push out."""
    tier.record_gpu_blocks(stored(*names))
    return [
        name
        for event in tier.store_evicted(names[::-1])
        if isinstance(event, BlocksRemoved)
        for name in event.block_hashes
    ]


def test_the_tail_of_what_was_kept_longest_goes_first() -> None:
    tier = filled(3, b"a", b"b", b"c")
    assert evict(tier, b"x", b"y") == [b"c", b"b"]
    assert tier.match([b"a", b"b"]) == 1


def test_what_is_used_stays_longer() -> None:
    tier = filled(4, b"a", b"b")
    assert evict(tier, b"c", b"d") == []
    tier.touch([b"a", b"b"])
    assert evict(tier, b"x") == [b"d"]


def test_what_is_evicted_again_stays_longer_and_is_not_told_of_twice() -> None:
    tier = filled(3, b"a", b"b")
    assert evict(tier, b"x") == []
    tier.record_gpu_blocks(stored(b"a", b"b"))
    assert list(tier.store_evicted([b"b", b"a"])) == []
    assert evict(tier, b"y") == [b"x"]


def test_an_event_holds_blocks_that_follow_each_other() -> None:
    tier = HostTier(9)
    tier.record_gpu_blocks(stored(b"a", b"b"))
    tier.record_gpu_blocks(stored(b"c", after=b"b"))
    tier.record_gpu_blocks(stored(b"x"))
    events = list(tier.store_evicted([b"c", b"b", b"x", b"a"]))
    # From the last to the first: a, then x, which begins a prompt, then b and c, which follow a.
    told = [(e.block_hashes, e.parent_hash) for e in events if isinstance(e, BlocksStored)]
    assert told == [((b"a",), None), ((b"x",), None), ((b"b", b"c"), b"a")]
    assert events[2] == BlocksStored(
        block_hashes=(b"b", b"c"),
        parent_hash=b"a",
        token_ids=(2, 3, 0, 1),
        block_size_tokens=2,
        tier="cpu",
    )


def test_without_room_nothing_is_kept_nor_told() -> None:
    tier = filled(0, b"a")
    assert tier.block_hashes() == frozenset()
    assert evict(tier, b"b") == []
