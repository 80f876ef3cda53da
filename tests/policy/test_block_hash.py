from __future__ import annotations

import subprocess
import sys
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root

TOKENS = st.lists(st.integers(min_value=0, max_value=200_000), max_size=40)
ROOT = chain_root(model="m", block_size_tokens=4)


@given(tokens=TOKENS, more=TOKENS)
def test_equal_hashes_mean_equal_prefixes(tokens: list[int], more: list[int]) -> None:
    one, other = chain_hashes(ROOT, tokens, 4), chain_hashes(ROOT, more, 4)
    for n, (left, right) in enumerate(zip(one, other, strict=False)):
        assert (left == right) == (tokens[: 4 * n + 4] == more[: 4 * n + 4])


@given(tokens=TOKENS, more=TOKENS)
def test_a_chain_can_be_continued_where_it_ended(tokens: list[int], more: list[int]) -> None:
    full = tokens[: len(tokens) // 4 * 4]
    begun = chain_hashes(ROOT, full, 4)
    assert chain_hashes(ROOT, full + more, 4) == begun + chain_hashes(
        begun[-1] if begun else ROOT, more, 4
    )


@given(tokens=TOKENS)
def test_only_full_blocks_have_a_hash_and_tuples_are_as_good_as_lists(tokens: list[int]) -> None:
    hashes = chain_hashes(ROOT, tokens, 4)
    assert len(hashes) == len(tokens) // 4
    assert hashes == chain_hashes(ROOT, tuple(tokens), 4)
    assert all(0 <= hash_ < 1 << 60 for hash_ in hashes)


def test_the_same_tokens_at_another_place_are_another_block() -> None:
    first, second = chain_hashes(ROOT, [1, 2, 3, 4, 1, 2, 3, 4], 4)
    assert first != second


def test_chains_of_different_models_block_sizes_adapters_and_salts_start_apart() -> None:
    roots = [
        chain_root(model="m", block_size_tokens=16),
        chain_root(model="m2", block_size_tokens=16),
        chain_root(model="m", block_size_tokens=32),
        chain_root(model="m", block_size_tokens=16, adapter="a"),
        chain_root(model="m", block_size_tokens=16, salt="a"),
        chain_root(model="m", block_size_tokens=16, adapter=""),
        chain_root(model="m", block_size_tokens=16, adapter="a", salt="b"),
        chain_root(model="m", block_size_tokens=16, adapter="b", salt="a"),
        chain_root(model="m1", block_size_tokens=6),
        chain_root(model="m\udcff", block_size_tokens=16),
    ]
    assert all(value != other for value, other in combinations(roots, 2))


def test_processes_agree_on_hashes() -> None:
    program = (
        "from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root;"
        "print(chain_hashes(chain_root(model='m', block_size_tokens=4, salt='s'), range(99), 4))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = chain_hashes(chain_root(model="m", block_size_tokens=4, salt="s"), range(99), 4)
    assert said == {f"{here}\n"}


def test_blocks_of_similar_prompts_do_not_collide() -> None:
    # 60 bits: a collision among 2^17 blocks would happen once in 10^8 runs. Tokens differ little,
    # as those of similar prompts do.
    hashes = {h for seed in range(1 << 13) for h in chain_hashes(ROOT, [seed] * 4 + [0] * 60, 4)}
    assert len(hashes) == (1 << 13) * 16
