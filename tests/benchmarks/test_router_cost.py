from __future__ import annotations

import json
from collections import Counter

import pytest

from baton.policy.prefix_cache.block_hash import chain_hashes
from benchmarks import router_cost
from benchmarks._router_load import (
    BLOCK_TOKENS,
    EVENT_BLOCKS,
    KINDS,
    ROOT,
    SHARED_BLOCKS,
    CacheUpdateFeed,
    Case,
    IndexLoad,
)

SMALL = Case(8, 4096, seed=3)


def test_events_are_of_128_blocks_and_no_replica_holds_a_block_twice() -> None:
    load = IndexLoad(SMALL)
    assert {len(event.shared_hashes) + len(event.own_hashes) for event in load.events} == {
        EVENT_BLOCKS
    }
    assert (
        sum(len(event.shared_hashes) + len(event.own_hashes) for event in load.events)
        == SMALL.entries
    )
    pairs = Counter(
        (event.replica_id, block)
        for event in load.events
        for block in event.shared_hashes + event.own_hashes
    )
    assert set(pairs.values()) == {1}


def test_most_events_begin_with_a_system_prompt_that_other_replicas_hold_too() -> None:
    shared = Counter(
        event.shared_hashes for event in IndexLoad(SMALL).events if event.shared_hashes
    )
    assert all(len(system) == SHARED_BLOCKS for system in shared)
    assert sum(shared.values()) >= 0.75 * len(IndexLoad(SMALL).events)
    assert max(shared.values()) > 4


@pytest.mark.parametrize("tokens", router_cost.LENGTHS)
def test_prompts_are_held_in_full_in_part_or_not_at_all(tokens: int) -> None:
    load = IndexLoad(SMALL)
    router = router_cost.RouterUnderTest(SMALL)
    router.apply(CacheUpdateFeed().stored_updates(load.events))
    blocks = tokens // BLOCK_TOKENS
    for kind, wanted in zip(KINDS, (blocks, blocks // 2, 0), strict=True):
        prompt = load.draw_prompt(kind, tokens)
        assert len(prompt) == tokens
        hits = router.index.look_up(chain_hashes(ROOT, prompt, BLOCK_TOKENS), router.now_s)
        assert max(hits.of(id_).blocks for id_ in SMALL.ids) == wanted


def test_updates_of_a_replica_are_numbered_without_holes() -> None:
    load, feed = IndexLoad(SMALL), CacheUpdateFeed()
    router = router_cost.RouterUnderTest(SMALL)
    router.apply(feed.stored_updates(load.events) + feed.removed_updates(load.events[:3]))
    assert router.index.counters.gaps == 0
    assert router.index.entries == SMALL.entries - sum(
        len(event.own_hashes) for event in load.events[:3]
    )
    router.index.check_integrity()


def test_a_small_case_gives_every_figure() -> None:
    found = router_cost.measure(SMALL, decisions=20, repeats=1)
    name = SMALL.name
    assert name == "8_4096"
    for key in ("p50_s", "p99_s", "hash_p50_s", "lookup_p50_s", "placement_p50_s", "note_p50_s"):
        for tokens in router_cost.LENGTHS:
            assert found[f"{key}_{name}_{tokens}"] > 0
    parts = sum(found[f"{part}_p50_s_{name}_512"] for part in ("hash", "lookup", "placement"))
    assert parts < 3 * found[f"p99_s_{name}_512"]
    for key in ("events_per_s", "removals_per_s", "snapshot_blocks_per_s", "stored_slowest_s"):
        assert found[f"{key}_{name}"] > 0
    assert found[f"entries_{name}"] == SMALL.entries
    json.dumps(router_cost.summarize(found))


def test_growth_is_told_between_the_smallest_and_the_largest_fleet() -> None:
    found = {"p50_s_10_1m_512": 1e-4, "p50_s_1000_1m_512": 2.5e-4}
    assert router_cost.summarize(found)["growth_10_to_1000_512"] == 2.5
    assert "growth_10_to_1000_8192" not in router_cost.summarize(found)
