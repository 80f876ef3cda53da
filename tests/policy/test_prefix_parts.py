from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate, pack_hashes
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.policy.prefix_cache.block_masks import (
    HolderMasks,
    Level,
    ReportedBlocks,
    find_levels,
    scan_levels,
)
from baton.policy.prefix_cache.index import PrefixIndex

SLOTS = 7
DEPTHS = st.lists(st.integers(min_value=0, max_value=40), min_size=SLOTS, max_size=SLOTS)


class CountingProbe:
    def __init__(self, masks: list[int]) -> None:
        self.masks = masks
        self.probed: list[int] = []

    def __call__(self, position: int) -> int:
        self.probed.append(position)
        return self.masks[position]


def masks_of(depths: list[int], length: int) -> list[int]:
    return [sum((n < depth) << slot for slot, depth in enumerate(depths)) for n in range(length)]


def depth_in(levels: list[Level], slot: int) -> int:
    return next((blocks for blocks, held in levels if held >> slot & 1), 0)


@given(depths=DEPTHS, length=st.integers(min_value=1, max_value=40))
def test_unbroken_chains_are_found_exactly_in_few_probes(depths: list[int], length: int) -> None:
    probe = CountingProbe(masks_of(depths, length))
    levels = find_levels(probe, length)
    assert levels is not None
    assert levels == scan_levels(probe.masks.__getitem__, length)
    clipped = [min(depth, length) for depth in depths]
    assert [depth_in(levels, slot) for slot in range(SLOTS)] == clipped
    assert [blocks for blocks, _ in levels] == sorted(set(clipped) - {0}, reverse=True)
    assert len(probe.probed) <= 1 + len(levels) * (length.bit_length() + 1)
    assert len(set(probe.probed)) == len(probe.probed)


def test_a_prefix_of_a_thousand_holders_takes_as_few_probes_as_one_of_one() -> None:
    everyone, one = (1 << 1000) - 1, 1 << 999
    masks = [everyone] * 32 + [one] * 96 + [0] * 384
    probe = CountingProbe(masks)
    assert find_levels(probe, 512) == [Level(128, one), Level(32, everyone)]
    assert len(probe.probed) <= 20


@given(
    masks=st.lists(st.integers(min_value=0, max_value=(1 << SLOTS) - 1), min_size=1, max_size=40)
)
def test_a_hole_never_hides_what_is_held_nor_spoils_others(masks: list[int]) -> None:
    levels = find_levels(masks.__getitem__, len(masks))
    exact = scan_levels(masks.__getitem__, len(masks))
    for slot in range(SLOTS):
        held = [mask >> slot & 1 for mask in masks]
        leading = held.index(0) if 0 in held else len(held)
        assert depth_in(exact, slot) == leading
        if levels is None:
            continue
        found = depth_in(levels, slot)
        assert found >= leading
        assert not found or held[found - 1]
        if sum(held) == leading:
            assert found == leading


def test_a_hole_that_a_probe_falls_into_is_seen() -> None:
    masks = [3] * 10 + [1] * 22
    masks[8] = 2  # between the probes that look for where the second one drops out
    assert find_levels(masks.__getitem__, 32) is None
    assert scan_levels(masks.__getitem__, 32) == [Level(10, 2), Level(8, 3)]
    masks = [2] * 8 + [3] * 24  # one replica holds the end only
    assert find_levels(masks.__getitem__, 32) is None
    assert scan_levels(masks.__getitem__, 32) == [Level(32, 2)]
    # Where the probes are neighbours.
    assert find_levels([2, 3].__getitem__, 2) is None
    assert find_levels([3, 2, 1, 1].__getitem__, 4) is None


# ------------------------------------------------------------------ holders


def shared_index(*, replicas: int, seed: int) -> PrefixIndex:
    index = PrefixIndex(seed=seed)
    packed = pack_hashes(range(50))
    for n in range(replicas):
        index.add_replica(f"r{n:03}", capacity_blocks=100)
        deep = packed if n % 10 == 0 else packed[: 8 * 20]
        change = CacheChange(CacheChangeKind.STORED, deep)
        index.apply_update(f"r{n:03}", CacheUpdate(1, (change,)), 0.0)
    return index


def test_those_that_hold_most_are_named_first() -> None:
    hits = shared_index(replicas=40, seed=1).look_up(list(range(50)), 0.0)
    named = hits.holders(12)
    assert sorted(named[:4]) == ["r000", "r010", "r020", "r030"]
    assert len(set(named)) == 12
    assert hits.holders(3) == named[:3]
    assert len(hits.holders(99)) == 40
    assert hits.holders(0) == []


def test_coordinators_with_different_seeds_name_different_holders() -> None:
    named = {
        tuple(shared_index(replicas=200, seed=s).look_up([0], 0.0).holders(4)) for s in range(4)
    }
    assert len(named) == 4


def test_in_the_long_run_every_holder_is_named() -> None:
    index = shared_index(replicas=60, seed=3)
    named = Counter(holder for _ in range(2000) for holder in index.look_up([0], 0.0).holders(3))
    assert len(named) == 60
    assert max(named.values()) < 3 * min(named.values())


def test_a_holder_that_is_gone_is_not_named() -> None:
    index = shared_index(replicas=3, seed=3)
    hits = index.look_up([0], 0.0)
    index.remove_replica("r001")
    assert sorted(hits.holders(3)) == ["r000", "r002"]


# ------------------------------------------------------------------ masks and slots


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "discard"]),
        st.integers(min_value=0, max_value=5),
        st.lists(st.integers(min_value=-3, max_value=9), max_size=12),
    ),
    max_size=30,
)


@given(operations=OPERATIONS, swept=st.sets(st.integers(min_value=0, max_value=5)))
def test_masks_are_sets_of_slots_by_block(
    operations: list[tuple[str, int, list[int]]], swept: set[int]
) -> None:
    masks, twin = HolderMasks(), {slot: set[int]() for slot in range(6)}
    for what, slot, blocks in operations:
        before = len(twin[slot])
        if what == "add":
            twin[slot] |= set(blocks)
            assert masks.add(1 << slot, blocks) == len(twin[slot]) - before
        else:
            twin[slot] -= set(blocks)
            assert masks.discard(1 << slot, blocks) == before - len(twin[slot])
    for step in range(masks.shard_count):
        masks.sweep(step, sum(1 << slot for slot in swept))
    for slot in swept:
        twin[slot].clear()
    wanted = {
        block: sum((block in held) << slot for slot, held in twin.items())
        for held in twin.values()
        for block in held
    }
    assert dict(masks.masks()) == wanted
    assert masks.entries == sum(map(len, twin.values()))
    assert masks.unique_blocks() == len(wanted)
    assert all(masks.holders_of(block) == held for block, held in wanted.items())


def test_blocks_with_the_same_holders_share_one_mask() -> None:
    masks = HolderMasks()
    for slot in (70, 300, 900):
        masks.add(1 << slot, range(32))
    assert len({id(masks.holders_of(block)) for block in range(32)}) == 1
    for block in range(16):  # one at a time
        masks.discard(1 << 300, [block])
    assert len({id(masks.holders_of(block)) for block in range(16)}) == 1


def test_more_masks_than_are_shared_cause_no_error() -> None:
    masks = HolderMasks()
    for number in range(1, 1 << 14):
        for slot in range(14):
            if number >> slot & 1:
                masks.add(1 << slot, [number])
    assert all(masks.holders_of(number) == number for number in range(1, 1 << 14))


def test_no_step_of_a_sweep_looks_at_many_blocks() -> None:
    masks, rng = HolderMasks(), Random(5)
    masks.add(1, (rng.getrandbits(60) for _ in range(50_000)))
    assert max(map(len, masks._shards)) < 50_000 / 100


def test_slots_that_wait_to_be_swept_are_few() -> None:
    reported = ReportedBlocks(HolderMasks())
    for n in range(1000):
        bit = reported.allocate_slot()
        reported.retire_slot(bit)
        assert bit < 1 << 66, f"after {n} lives"
        reported.check_integrity()


def test_the_lowest_free_slot_is_used_so_that_masks_stay_narrow() -> None:
    reported = ReportedBlocks(HolderMasks())
    bits = [reported.allocate_slot() for _ in range(9)]
    for bit in (bits[7], bits[2], bits[5]):
        reported.retire_slot(bit)
        reported.sweep_all()
    assert [reported.allocate_slot() for _ in range(4)] == [bits[2], bits[5], bits[7], 1 << 9]


@pytest.mark.parametrize("retired_during_a_sweep", [False, True])
def test_a_slot_is_not_given_out_before_all_of_it_is_swept(*, retired_during_a_sweep: bool) -> None:
    reported = ReportedBlocks(HolderMasks())
    first, second = reported.allocate_slot(), reported.allocate_slot()
    masks = list(reported.tiers.values())
    for held in masks:
        held.add(first, range(5000))
        held.add(second, range(5000))
    reported.retire_slot(first)
    if retired_during_a_sweep:
        for _ in range(100):
            reported.sweep()
        reported.retire_slot(second)
    steps = 0
    while reported.retired_slots:
        fresh = reported.allocate_slot()
        assert not any(mask & fresh for held in masks for _, mask in held.masks())
        reported.retire_slot(fresh)
        reported.sweep()
        steps += 1
        if steps == 2 * masks[0].shard_count:
            break
    reported.sweep_all()
    left = 0 if retired_during_a_sweep else second
    assert all(mask == left for held in masks for _, mask in held.masks())


# ------------------------------------------------------------------ whole prefixes
LENGTH = 12
HELD = st.sets(st.integers(min_value=1, max_value=LENGTH))


def told(index: PrefixIndex, replica_id: str, ends: set[int]) -> None:
    hashes = pack_hashes(sorted(ends))
    change = CacheChange(CacheChangeKind.STORED, hashes)
    assert not index.apply_update(replica_id, CacheUpdate(1, (change,)), 0.0)


@given(
    prefixes=st.lists(st.tuples(HELD, st.integers(0, 2)), min_size=1, max_size=4),
    depths=st.lists(st.integers(min_value=0, max_value=LENGTH), max_size=4),
    most=st.integers(min_value=0, max_value=LENGTH),
)
def test_of_whole_prefixes_the_longest_counts_and_of_blocks_the_leading_ones(
    prefixes: list[tuple[set[int], int]], depths: list[int], most: int
) -> None:
    index = PrefixIndex()
    wanted = {}
    for place, (ends, peek) in enumerate(prefixes):
        index.add_replica(f"p{place}", capacity_blocks=100, lookahead_blocks=peek)
        told(index, f"p{place}", ends)
        wanted[f"p{place}"] = max((end - peek for end in ends if peek < end <= most), default=0)
    for place, depth in enumerate(depths):
        index.add_replica(f"b{place}", capacity_blocks=100)
        told(index, f"b{place}", set(range(1, depth + 1)))
        wanted[f"b{place}"] = depth
    index.check_integrity()
    hits = index.look_up(range(1, LENGTH + 1), 0.0, max_blocks=most)
    assert {replica_id: hits.of(replica_id).blocks for replica_id in wanted} == wanted
    assert hits.depths() == sorted(set(wanted.values()) - {0}, reverse=True)
    holders = hits.holders(10)
    assert sorted(holders) == sorted(name for name in wanted if wanted[name])
    assert [wanted[holder] for holder in holders] == sorted(
        (wanted[holder] for holder in holders), reverse=True
    )


def test_of_a_replica_that_tells_of_whole_prefixes_the_whole_prompt_is_predicted() -> None:
    index = PrefixIndex()
    index.add_replica("p", capacity_blocks=100, lookahead_blocks=0)
    index.predict("p", range(1, 9), 0.0)
    assert index.look_up(range(1, 13), 0.0).of("p").blocks == 8
    assert index.look_up(range(1, 8), 0.0).of("p").blocks == 0


def test_a_replica_whose_cache_was_emptied_still_tells_of_whole_prefixes() -> None:
    index = PrefixIndex()
    index.add_replica("p", capacity_blocks=100, lookahead_blocks=0)
    told(index, "p", {3})
    emptied = CacheChange(CacheChangeKind.CLEARED)
    again = CacheChange(CacheChangeKind.STORED, pack_hashes([5]))
    index.apply_update("p", CacheUpdate(2, (emptied, again)), 0.0)
    index.check_integrity()
    assert index.look_up(range(1, 13), 0.0).of("p").blocks == 5


# --------------------------------------------------------------------------- block hash
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
