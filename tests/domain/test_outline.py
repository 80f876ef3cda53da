from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.cache import CacheChange, CacheChangeKind, CacheTier, pack_hashes, unpack_hashes
from baton.domain.hashed_prompt import HashedPrompt
from baton.policy.prefix_cache.block_hash import chain_hashes

ids = st.lists(st.integers(0, 5), max_size=6).map(tuple)
sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def outlines(draw: st.DrawFn) -> HashedPrompt:
    return HashedPrompt(
        draw(ids),
        draw(st.integers(0, 40)),
        block_tokens=draw(sizes),
        tail_id=draw(st.integers(0, 3)),
    )


def chained(outline: HashedPrompt, size: int) -> list[int]:
    return chain_hashes(7, outline, size)


@given(outlines(), outlines(), sizes)
def test_blocks_share_hashes_as_far_as_their_tokens_are_equal(
    one: HashedPrompt, other: HashedPrompt, size: int
) -> None:
    if one.block_tokens != other.block_tokens:
        return
    by_tokens = [
        hash_one == hash_other
        for hash_one, hash_other in zip(
            chain_hashes(7, tuple(one), size), chain_hashes(7, tuple(other), size), strict=False
        )
    ]
    by_blocks = [a == b for a, b in zip(chained(one, size), chained(other, size), strict=False)]
    # Tokens that iteration makes up may be equal by chance; blocks that are named alike are not.
    for tokens_equal, blocks_equal in zip(by_tokens, by_blocks, strict=True):
        assert tokens_equal or not blocks_equal
    if one.block_tokens == size and one.tail_id == other.tail_id:
        named = max(len(one.block_ids), len(other.block_ids))
        assert by_blocks[:named] == by_tokens[:named]


@given(outlines(), st.integers(0, 40), sizes)
def test_a_beginning_has_the_beginning_of_the_hashes(
    outline: HashedPrompt, tokens: int, size: int
) -> None:
    beginning = outline[:tokens]

    assert len(beginning) == min(tokens, len(outline))
    assert chained(beginning, size) == chained(outline, size)[: len(beginning) // size]


@given(outlines(), st.integers(0, 40), sizes)
def test_generated_tokens_continue_where_the_prompt_ended(
    outline: HashedPrompt, tokens: int, size: int
) -> None:
    longer = outline.extended(tokens)

    assert len(longer) == len(outline) + tokens
    assert chained(longer, size)[: len(outline) // size] == chained(outline, size)
    assert longer[: len(outline)] == outline


@given(outlines(), sizes, st.integers(0, 10))
def test_a_chain_can_be_gone_on_with(outline: HashedPrompt, size: int, first: int) -> None:
    whole = chained(outline, size)
    first = min(first, len(whole))
    previous = whole[first - 1] if first else 7

    assert outline.chain_hashes(previous, size, first_block=first) == whole[first:]


@given(outlines(), st.lists(st.tuples(st.integers(0, 2), sizes), max_size=4))
def test_earlier_questions_change_no_chain(
    outline: HashedPrompt, asked: list[tuple[int, int]]
) -> None:
    fresh = [
        HashedPrompt(
            outline.block_ids,
            len(outline),
            block_tokens=outline.block_tokens,
            tail_id=outline.tail_id,
        ).chain_hashes(previous, size)
        for previous, size in asked
    ]

    assert [outline.chain_hashes(previous, size) for previous, size in asked] == fresh


def test_a_session_finds_its_last_answer_in_its_next_prompt() -> None:
    turn = HashedPrompt((1, 2, 3, 4), 8, block_tokens=4, tail_id=1)
    next_turn = HashedPrompt((1, 2, 3, 4, 5), 20, block_tokens=4, tail_id=2)

    assert chained(turn.extended(8), 4) == chained(next_turn, 4)[:4]


def test_prompts_without_names_share_nothing() -> None:
    one, other = (HashedPrompt((), 32, block_tokens=8, tail_id=own) for own in (1, 2))

    assert not set(chained(one, 8)) & set(chained(other, 8))
    assert chained(one, 8) == chained(HashedPrompt((), 40, block_tokens=8, tail_id=1), 8)[:4]


def test_equal_ids_are_equal_tokens() -> None:
    outline = HashedPrompt((9, 9), 8, block_tokens=4)

    tokens = tuple(outline)

    assert tokens[:4] == tokens[4:]
    assert len(tokens) == 8
    assert outline[-1] == tokens[7]


def test_only_beginnings_can_be_cut_off() -> None:
    with pytest.raises(ValueError, match="only a beginning"):
        HashedPrompt((1, 2), 8, block_tokens=4)[2:5]
    with pytest.raises(IndexError, match="token 8"):
        HashedPrompt((1, 2), 8, block_tokens=4)[8]


def test_an_outline_has_blocks_of_some_size() -> None:
    with pytest.raises(ValueError, match="blocks of 0"):
        HashedPrompt((), 3, block_tokens=0)


def test_outlines_are_values() -> None:
    one, other = (HashedPrompt((1,), 3, block_tokens=4, tail_id=own) for own in (1, 2))

    assert one == HashedPrompt((1,), 3, block_tokens=4, tail_id=1)
    assert one != other
    assert len({one, other, one[:3]}) == 2
    assert "3 tokens" in repr(one)


# --------------------------------------------------------------------------- cache
HASHES = st.lists(st.integers(min_value=0, max_value=(1 << 63) - 1), max_size=20)


@given(hashes=HASHES)
def test_hashes_come_back_as_they_were_packed(hashes: list[int]) -> None:
    packed = pack_hashes(hashes)
    assert list(unpack_hashes(packed)) == hashes
    assert packed == b"".join(hash_.to_bytes(8, "little") for hash_ in hashes)


def test_hashes_that_do_not_fit_are_not_packed() -> None:
    with pytest.raises(OverflowError):
        pack_hashes([1 << 63])


@given(packed=st.binary(max_size=40))
def test_only_whole_hashes_are_unpacked(packed: bytes) -> None:
    if len(packed) % 8:
        with pytest.raises(ValueError, match=f"got {len(packed)} bytes, expected a multiple of 8"):
            unpack_hashes(packed)
    else:
        assert len(unpack_hashes(packed)) == len(packed) // 8


def test_a_change_is_of_the_gpu_unless_it_says_otherwise() -> None:
    assert CacheChange(CacheChangeKind.CLEARED).tier is CacheTier.GPU
