from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from baton.domain.cache import CacheChange, CacheChangeKind, CacheTier, CacheUpdate, pack_hashes
from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.hits import NO_HIT, Hit
from baton.policy.prefix_cache.index import IndexMode, IndexOptions, PrefixIndex

CHAIN = list(range(100, 132))
OTHER = list(range(100, 110)) + list(range(500, 510))


def stored(hashes: Iterable[int], tier: CacheTier = CacheTier.GPU) -> CacheChange:
    return CacheChange(CacheChangeKind.STORED, pack_hashes(hashes), tier)


def removed(hashes: Iterable[int], tier: CacheTier = CacheTier.GPU) -> CacheChange:
    return CacheChange(CacheChangeKind.REMOVED, pack_hashes(hashes), tier)


def cleared(tier: CacheTier = CacheTier.GPU) -> CacheChange:
    return CacheChange(CacheChangeKind.CLEARED, tier=tier)


def update(sequence: int, *changes: CacheChange, snapshot: bool = False) -> CacheUpdate:
    return CacheUpdate(sequence, changes, is_snapshot=snapshot)


def index_of(*ids: str, options: IndexOptions | None = None, capacity: int = 1000) -> PrefixIndex:
    index = PrefixIndex(options)
    for id_ in ids:
        index.add_replica(id_, capacity_blocks=capacity)
    return index


def blocks(index: PrefixIndex, replica_id: str, hashes: list[int], now_s: float = 0.0) -> int:
    return index.look_up(hashes, now_s).of(replica_id).blocks


# ------------------------------------------------------------------ reports


def test_blocks_only_the_host_holds_are_counted_as_to_be_loaded() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN[:4]), stored(CHAIN[2:9], CacheTier.HOST)), 0.0)
    hit = index.look_up(CHAIN, 0.0).of("a")
    assert (hit.blocks, hit.host_blocks) == (9, 5)
    index.apply_update("a", update(2, removed(CHAIN[3:4])), 0.0)
    hit = index.look_up(CHAIN, 0.0).of("a")
    assert (hit.blocks, hit.host_blocks) == (9, 6)


def test_a_missing_update_is_noticed_by_the_next_one_and_repaired_by_a_snapshot() -> None:
    index = index_of("a")
    assert not index.apply_update("a", update(1, stored(CHAIN[:2])), 0.0)
    assert index.apply_update("a", update(3, stored(CHAIN[:6])), 1.0)
    state = index.replica_state("a", 1.0)
    assert state is not None
    assert (state.in_sync, state.gaps, state.age_s) == (False, 1, 1.0)
    assert blocks(index, "a", CHAIN) == 6  # still of use
    assert not index.apply_update("a", update(3, stored(CHAIN[:4]), snapshot=True), 2.0)
    state = index.replica_state("a", 2.0)
    assert state is not None
    assert (state.in_sync, state.age_s) == (True, 0.0)
    assert blocks(index, "a", CHAIN) == 4


def test_a_missing_update_is_noticed_by_a_load_report() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    assert not index.on_heartbeat("a", 1, 3.0)
    assert index.look_up(CHAIN, 3.5).of("a").age_s == 0.5
    assert index.on_heartbeat("a", 2, 4.0)
    assert index.look_up(CHAIN, 5.0).of("a").age_s == 2.0


def test_a_replica_that_was_there_before_us_is_asked_for_a_snapshot() -> None:
    index = index_of("a")
    assert not index.on_heartbeat("a", 0, 0.0)
    assert index.on_heartbeat("a", 812, 0.1)


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    index = index_of("a", options=IndexOptions(resync_interval_s=1.0))
    assert index.on_heartbeat("a", 5, 0.0)
    assert not index.on_heartbeat("a", 5, 0.9)
    assert not index.apply_update("a", update(6, stored(CHAIN)), 0.95)
    assert index.on_heartbeat("a", 6, 1.0)


def test_a_new_gap_after_a_snapshot_is_asked_about_at_once() -> None:
    index = index_of("a")
    assert index.on_heartbeat("a", 5, 0.0)
    index.apply_update("a", update(5, snapshot=True), 0.1)
    assert index.apply_update("a", update(8), 0.2)


def test_late_and_repeated_updates_are_ignored_and_counted() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    index.apply_update("a", update(2, removed(CHAIN[5:])), 0.0)
    assert not index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    assert not index.apply_update("a", update(2, stored(CHAIN)), 0.0)
    assert not index.apply_update("a", update(1, stored(CHAIN), snapshot=True), 0.0)
    assert blocks(index, "a", CHAIN) == 5
    assert index.counters.late_updates == 3
    assert index.counters.updates == 2


def test_an_update_that_cannot_be_read_changes_nothing_and_asks_for_a_snapshot() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN[:3])), 0.0)
    garbage = CacheChange(CacheChangeKind.STORED, b"1234567")
    assert index.apply_update("a", update(2, stored(CHAIN), garbage), 0.0)
    assert blocks(index, "a", CHAIN) == 3
    assert index.counters.invalid_updates == 1
    # Even when it pretended to a number that no update will ever reach.
    index.apply_update("a", update(1 << 62, garbage), 0.0)
    index.apply_update("a", update(3, stored(CHAIN), snapshot=True), 0.0)
    assert blocks(index, "a", CHAIN) == 32
    assert not index.apply_update("a", update(4, removed(CHAIN[9:])), 0.0)
    assert blocks(index, "a", CHAIN) == 9


def test_unknown_replicas_are_ignored_and_counted() -> None:
    index = index_of("a")
    assert not index.apply_update("x", update(1, stored(CHAIN)), 0.0)
    assert not index.on_heartbeat("x", 9, 0.0)
    index.predict("x", CHAIN, 0.0)
    index.check_prediction("x", CHAIN, 3, 0.0)
    index.remove_replica("x")
    assert index.replica_state("x", 0.0) is None
    assert index.counters.unknown_replicas == 4
    assert index.look_up(CHAIN, 0.0).holders(3) == []


def test_a_removed_replica_and_its_successor_hold_nothing() -> None:
    index = index_of("a", "b")
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    index.apply_update("b", update(1, stored(CHAIN[:7])), 0.0)
    index.remove_replica("a")
    index.add_replica("c", capacity_blocks=9)
    index.add_replica("a", capacity_blocks=9)
    hits = index.look_up(CHAIN, 0.0)
    assert [hits.of(replica_id).blocks for replica_id in "abc"] == [0, 7, 0]
    assert index.apply_update("a", update(2, stored(CHAIN)), 0.0)  # its numbers begin anew
    index.check_integrity()


def test_leftovers_of_a_lost_replica_do_not_look_like_a_gap() -> None:
    index = index_of("a", "b", "c")
    for name in "ab":
        index.apply_update(name, update(1, stored(range(5000))), 0.0)
    index.remove_replica("a")
    for sequence in range(1, 300):
        index.apply_update("c", update(sequence), 0.0)  # a part is swept with each
        hits = index.look_up(list(range(5000)), 0.0)
        assert hits.of("b").blocks == 5000
        assert hits.holders(9) == ["b"]
    assert index.entries < 10_000
    assert index.counters.chains_with_holes == 0


def test_slots_are_used_again_once_nothing_of_them_is_left() -> None:
    index = index_of("b")
    index.apply_update("b", update(1, stored(CHAIN)), 0.0)
    for life in range(500):
        index.add_replica("a", capacity_blocks=9)
        index.apply_update("a", update(1, stored([life, *CHAIN])), 0.0)
    index.remove_replica("a")
    for sequence in range(2, 2000):
        index.apply_update("b", update(sequence), 0.0)
    assert index.entries == index.unique_blocks() == len(CHAIN)
    for number in range(60):
        index.add_replica(f"r{number}", capacity_blocks=9)
    assert max(index._by_bit) < 1 << 70
    index.check_integrity()


def test_clearing_one_tier_forgets_both_and_asks_what_the_other_still_holds() -> None:
    index = index_of("a")
    host = stored(CHAIN[:9], CacheTier.HOST)
    index.apply_update("a", update(1, stored(CHAIN), host), 0.0)
    assert index.apply_update("a", update(2, cleared()), 0.0)
    assert blocks(index, "a", CHAIN) == 0
    index.apply_update("a", update(2, host, snapshot=True), 0.0)
    assert not index.apply_update("a", update(3, cleared(CacheTier.HOST), stored(CHAIN[:2])), 0.0)
    index.apply_update("a", update(4, host), 0.0)
    assert not index.apply_update("a", update(5, cleared(), cleared(CacheTier.HOST)), 0.0)
    assert index.apply_update("a", update(6, stored(CHAIN), cleared(CacheTier.HOST)), 0.0)


def test_a_replica_with_unconfirmed_contents_is_stale() -> None:
    index = index_of("a", "b", options=IndexOptions(stale_after_s=2.0))
    index.apply_update("a", update(1), 0.0)
    states = [index.replica_state("a", now_s) for now_s in (2.0, 2.1)]
    assert [state.is_stale for state in states if state] == [False, True]
    silent = index.replica_state("b", 0.0)
    assert silent is not None
    assert (silent.is_stale, silent.age_s) == (True, None)


def test_a_hole_in_one_layer_does_not_outweigh_what_is_known_of_all_layers() -> None:
    index = index_of("a", "b")
    index.apply_update("a", update(1, stored(CHAIN), removed(CHAIN[8:9])), 0.0)
    assert blocks(index, "a", CHAIN) == 32  # no probe falls into the hole
    index.predict("b", CHAIN[:10], 0.0)
    assert index.look_up(CHAIN, 0.0).of("a") == Hit(8, 0, HitSource.REPORTED, 0.0)
    index.apply_update("b", update(1, stored(CHAIN[:10], CacheTier.HOST)), 0.0)
    assert index.look_up(CHAIN, 0.0).of("a") == Hit(8, 0, HitSource.REPORTED, 0.0)
    assert index.look_up(CHAIN, 0.0).of("b") == Hit(10, 10, HitSource.REPORTED, 0.0)
    assert index.counters.chains_with_holes == 3


# ------------------------------------------------------------------ bounds


def test_blocks_beyond_the_bound_are_dropped_deepest_first() -> None:
    index = index_of("a", options=IndexOptions(max_entries=20))
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    assert blocks(index, "a", CHAIN) == 20
    assert index.entries == 20
    assert index.counters.dropped_blocks == 12
    index.apply_update("a", update(2, removed(CHAIN[:5]), stored([1, 2, 3, *CHAIN])), 0.0)
    index.check_integrity()
    state = index.replica_state("a", 0.0)
    assert state is not None
    assert state.in_sync
    assert state.dropped_blocks == index.counters.dropped_blocks > 12


def test_blocks_that_are_kept_already_take_no_room() -> None:
    index = index_of("a", options=IndexOptions(max_entries=20))
    index.apply_update("a", update(1, stored(CHAIN[:18])), 0.0)
    index.apply_update("a", update(2, stored([*CHAIN[:18], 1, 2])), 0.0)
    assert index.counters.dropped_blocks == 0
    assert blocks(index, "a", [1, 2]) == 2


def test_a_snapshot_of_the_state_we_know_brings_back_what_did_not_fit() -> None:
    index = index_of("a", "b", options=IndexOptions(max_entries=40))
    index.apply_update("b", update(1, stored(range(30))), 0.0)
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    assert blocks(index, "a", CHAIN) == 10
    index.remove_replica("b")
    index.apply_update("a", update(1, stored(CHAIN), snapshot=True), 0.0)
    assert blocks(index, "a", CHAIN) == 32


def test_the_last_tenth_is_for_replicas_below_their_share() -> None:
    index = index_of("a", "b", options=IndexOptions(max_entries=100))
    index.apply_update("a", update(1, stored(range(100))), 0.0)
    index.apply_update("b", update(1, stored(range(200, 300))), 0.0)
    assert [blocks(index, "a", list(range(100))), blocks(index, "b", list(range(200, 300)))] == [
        90,
        10,
    ]
    # As a's engine evicts and stores, the room goes to b until the shares are equal.
    for n in range(2, 200):
        old = index.replica_state("a", 0.0)
        assert old is not None
        index.apply_update("a", update(n, removed([n - 2]), stored([1000 + n])), 0.0)
        index.apply_update("b", update(n, stored([2000 + n])), 0.0)
    states = [index.replica_state(name, 0.0) for name in "ab"]
    assert [state.gpu_blocks for state in states if state] == [50, 50]
    index.check_integrity()


def test_room_that_a_lost_replica_took_is_free_at_once() -> None:
    index = index_of("a", "b", options=IndexOptions(max_entries=100))
    index.apply_update("a", update(1, stored(range(90))), 0.0)
    index.remove_replica("a")
    index.apply_update("b", update(1, stored(range(200, 300))), 0.0)
    assert blocks(index, "b", list(range(200, 300))) == 100


@pytest.mark.parametrize(
    "wrong", [{"max_entries": 0}, {"prediction_ttl_s": 0.0}, {"stale_after_s": float("nan")}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        IndexOptions(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------ predictions


def test_sent_prompts_are_predicted_hits_until_reports_are_due() -> None:
    index = index_of("a", options=IndexOptions(unconfirmed_ttl_s=5.0, prediction_ttl_s=50.0))
    index.apply_update("a", update(1), 9.0)
    index.predict("a", CHAIN, 10.0)
    assert index.look_up(CHAIN, 14.0).of("a") == Hit(32, 0, HitSource.PREDICTED, 4.0)
    assert index.look_up(CHAIN, 15.0).of("a") == NO_HIT


def test_where_nothing_is_reported_or_not_any_more_it_is_expected_for_longer() -> None:
    options = IndexOptions(unconfirmed_ttl_s=5.0, prediction_ttl_s=50.0, stale_after_s=2.0)
    index = index_of("never", "stale", "astray", options=options)
    index.apply_update("stale", update(1), 0.0)
    index.apply_update("astray", update(1), 10.0)
    index.apply_update("astray", update(3), 10.0)
    for name in ("never", "stale", "astray"):
        index.predict(name, CHAIN, 10.0)
        assert blocks(index, name, CHAIN, 59.9) == 32
    assert index.look_up(CHAIN, 60.0).holders(5) == []


def test_a_report_takes_the_place_of_a_prediction() -> None:
    index = index_of("a")
    index.predict("a", CHAIN, 0.0)
    index.apply_update("a", update(1, stored(CHAIN[:20])), 1.0)
    assert index.look_up(CHAIN[:20], 1.5).of("a") == Hit(20, 0, HitSource.REPORTED, 0.5)
    assert index.look_up(CHAIN, 1.5).of("a") == Hit(32, 0, HitSource.PREDICTED, 1.5)
    index.apply_update("a", update(2, removed(CHAIN[10:20])), 1.0)
    assert blocks(index, "a", CHAIN[:20], 1.5) == 10


def test_removal_from_the_host_leaves_predictions_alone() -> None:
    index = index_of("a")
    index.predict("a", CHAIN, 0.0)
    index.apply_update("a", update(1, removed(CHAIN, CacheTier.HOST)), 0.0)
    assert blocks(index, "a", CHAIN) == 32


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_cache_that_was_emptied_is_not_expected_to_hold_anything(*, snapshot: bool) -> None:
    index = index_of("a")
    index.predict("a", CHAIN, 0.0)
    index.apply_update("a", update(1, cleared(), snapshot=snapshot), 0.0)
    assert blocks(index, "a", CHAIN) == 0
    index.check_integrity()


def test_only_what_is_not_reported_is_predicted() -> None:
    index = index_of("a", options=IndexOptions(max_entries=1000))
    index.apply_update("a", update(1, stored(CHAIN[:30])), 0.0)
    index.predict("a", CHAIN, 0.0)
    state = index.replica_state("a", 0.0)
    assert state is not None
    assert state.predicted_blocks == 2


def test_the_least_recent_prediction_is_evicted_its_deepest_block_first() -> None:
    index = index_of("a", capacity=30)
    index.predict("a", OTHER, 0.0)
    index.predict("a", list(range(900, 909)), 1.0)
    index.predict("a", OTHER[:12], 2.0)  # used again, but for its last 8 blocks
    index.predict("a", list(range(800, 805)), 3.0)
    assert blocks(index, "a", OTHER, 3.0) == 16
    assert blocks(index, "a", list(range(900, 909)), 3.0) == 9
    index.predict("a", list(range(700, 706)), 4.0)
    assert blocks(index, "a", OTHER, 4.0) == 12
    assert blocks(index, "a", list(range(900, 909)), 4.0) == 7
    index.check_integrity()


def test_predictions_of_a_lost_replica_do_not_pass_to_the_next_of_its_slot() -> None:
    options = IndexOptions(mode=IndexMode.PREDICTED, prediction_ttl_s=10.0)
    index = index_of("a", options=options)
    index.predict("a", CHAIN, 0.0)
    index.remove_replica("a")
    index.add_replica("b", capacity_blocks=9)
    assert index.look_up(CHAIN, 0.0).holders(3) == []
    for _ in range(600):
        index.predict("b", [1], 1.0)  # each sweeps a part
    index.add_replica("c", capacity_blocks=99)
    assert index._replicas["c"].bit == 1
    index.predict("c", CHAIN[:5], 5.0)
    assert index.look_up(CHAIN, 10.0).of("c").blocks == 5  # though a's prediction has expired
    index.check_integrity()


def test_a_repeated_prediction_outlives_the_first() -> None:
    index = index_of("a", options=IndexOptions(mode=IndexMode.PREDICTED, prediction_ttl_s=10.0))
    index.predict("a", CHAIN, 0.0)
    index.predict("a", CHAIN[:9], 4.0)
    assert index.look_up(CHAIN, 10.0).of("a") == Hit(9, 0, HitSource.PREDICTED, 6.0)
    assert blocks(index, "a", CHAIN, 14.0) == 0
    index.check_integrity()


def test_a_prompt_that_is_sent_again_and_again_is_kept_a_few_times_only() -> None:
    index = index_of("r")
    index.predict("r", [1, 2, 77], 0.0)
    for time in range(2000):
        index.predict("r", [*range(1, 30), 1000 + time % 2], time * 0.001)
    index.check_integrity()
    own = index._replicas["r"].predictions
    assert len(own.oldest_first) <= 100
    assert sum(len(prediction.blocks) for prediction in own.oldest_first) <= 100 * 30
    assert blocks(index, "r", [*range(1, 30), 1001], 2.0) == 30
    assert blocks(index, "r", [1, 2, 77], 2.0) == 3, "of what is older, the rest is kept"


def some_prompt(dice: random.Random) -> list[int]:
    """A path from the root of a tree of blocks, most often along its first branches."""
    path = [1]
    for _ in range(dice.randint(1, 20)):
        path.append(4 * path[-1] + (dice.randint(1, 3) if dice.random() < 0.2 else 0))
    return path


@pytest.mark.parametrize("seed", range(5))
def test_dropping_what_newer_predictions_replace_changes_nothing_that_is_predicted(
    seed: int,
) -> None:
    dice = random.Random(seed)
    ever, never = index_of("r", capacity=200), index_of("r", capacity=200)
    of_ever, of_never = (index._replicas["r"].predictions for index in (ever, never))
    of_never.cleanup_threshold = 10**9
    for step in range(400):
        of_ever.cleanup_threshold, now_s = 0, step * 0.05
        prompt, asked = some_prompt(dice), some_prompt(dice)
        change = removed([dice.choice(prompt)]) if dice.random() < 0.1 else stored(())
        for index in (ever, never):
            index.predict("r", prompt, now_s)
            index.apply_update("r", update(step + 1, change), now_s)
            index.check_integrity()
        known = {block: prediction.at_s for block, prediction in of_ever.newest_by_block.items()}
        assert known == {
            block: prediction.at_s for block, prediction in of_never.newest_by_block.items()
        }
        assert blocks(ever, "r", asked, now_s) == blocks(never, "r", asked, now_s)
    assert len(of_ever.oldest_first) < len(of_never.oldest_first)


def test_no_more_is_predicted_than_fits() -> None:
    index = index_of("a", capacity=5)
    index.predict("a", CHAIN, 0.0)
    assert blocks(index, "a", CHAIN) == 5
    index.add_replica("b", capacity_blocks=0)
    index.predict("b", CHAIN, 0.0)
    assert blocks(index, "b", CHAIN) == 0
    index.check_integrity()


@pytest.mark.parametrize("mode", list(IndexMode))
def test_each_mode_believes_its_own_sources(mode: IndexMode) -> None:
    index = index_of("a", "b", options=IndexOptions(mode=mode))
    assert index.options.mode is mode
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    index.predict("b", CHAIN, 0.0)
    assert blocks(index, "a", CHAIN) == (0 if mode is IndexMode.PREDICTED else 32)
    assert blocks(index, "b", CHAIN) == (0 if mode is IndexMode.EVENTS else 32)
    assert index.on_heartbeat("a", 9, 0.0) == (mode is not IndexMode.PREDICTED)


# ------------------------------------------------------------------ answers


def ask(index: PrefixIndex, tail: int, cached: int, now_s: float) -> None:
    """A request that begins with CHAIN is sent to a, which says how much was cached."""
    hashes = [*CHAIN, tail]
    index.predict("a", hashes, now_s)
    index.check_prediction("a", hashes, cached, now_s + 0.1)


def test_a_cold_request_does_not_contradict_its_own_prediction() -> None:
    index = index_of("a", options=IndexOptions(mode=IndexMode.PREDICTED))
    ask(index, 1, 0, 0.0)
    ask(index, 2, 32, 1.0)
    assert index.counters.contradictions == 0
    assert blocks(index, "a", CHAIN, 1.0) == 32


def test_predictions_that_prove_wrong_twice_in_a_row_are_dropped() -> None:
    index = index_of("a", options=IndexOptions(mode=IndexMode.PREDICTED))
    ask(index, 1, 0, 0.0)
    ask(index, 2, 3, 1.0)
    assert blocks(index, "a", CHAIN, 1.0) == 32
    ask(index, 3, 3, 2.0)
    assert index.counters.contradictions == 2
    assert blocks(index, "a", CHAIN, 2.0) == 0
    index.check_integrity()


def test_a_confirming_answer_clears_the_suspicion() -> None:
    index = index_of("a", options=IndexOptions(mode=IndexMode.PREDICTED))
    # All but one block is as good as all: engines compute the last token anew.
    for tail, cached in enumerate([0, 3, 32, 3, 31, 3]):
        ask(index, tail, cached, float(tail))
        assert blocks(index, "a", CHAIN, float(tail)) == 32
    assert index.counters.contradictions == 3


def test_requests_that_overlap_do_not_contradict_each_other() -> None:
    index = index_of("a", options=IndexOptions(mode=IndexMode.PREDICTED))
    for tail in (1, 2, 3):
        index.predict("a", [*CHAIN, tail], 0.0)
    for tail in (1, 2, 3):
        index.check_prediction("a", [*CHAIN, tail], 0, 1.0)
    assert index.counters.contradictions == 0


def test_a_prediction_that_was_never_answered_counts_when_it_is_old() -> None:
    options = IndexOptions(mode=IndexMode.PREDICTED, unconfirmed_ttl_s=5.0)
    index = index_of("a", options=options)
    index.predict("a", CHAIN, 0.0)
    ask(index, 1, 0, 5.0)
    assert index.counters.contradictions == 1


def test_reports_that_prove_wrong_twice_in_a_row_put_a_replica_out_of_step() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    ask(index, 1, 4, 0.0)
    assert not index.on_heartbeat("a", 1, 0.5)
    ask(index, 2, 4, 1.0)
    assert blocks(index, "a", CHAIN, 1.0) == 32
    assert index.on_heartbeat("a", 1, 1.2)
    assert index.counters.gaps == 1


def test_a_removal_reported_meanwhile_explains_why_less_was_cached() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    for n in (2, 3, 4):
        hashes = [*CHAIN, n]
        index.predict("a", hashes, 0.0)
        index.apply_update("a", update(n, removed([777])), 0.0)
        index.check_prediction("a", hashes, 4, 0.1)
    assert index.counters.contradictions == 0


def test_one_answer_counts_once() -> None:
    index = index_of("a")
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    index.predict("a", CHAIN, 0.0)
    for _ in range(3):
        index.check_prediction("a", CHAIN, 0, 0.0)
    assert index.counters.contradictions == 1


def test_events_mode_heeds_no_answers() -> None:
    index = index_of("a", options=IndexOptions(mode=IndexMode.EVENTS))
    index.apply_update("a", update(1, stored(CHAIN)), 0.0)
    for tail in range(5):
        ask(index, tail, 0, 0.0)
    assert index.counters.contradictions == 0
    assert blocks(index, "a", CHAIN) == 32


# ------------------------------------------------------------------ hashes that collide


def test_colliding_hashes_cause_no_error() -> None:
    index = index_of("a", "b", capacity=6)
    for n in range(200):
        hashes = [(n * step * step) % 16 for step in range(1, 20)]
        index.predict("a", hashes, n / 10)
        change = removed(hashes) if n % 3 else stored(hashes)
        index.apply_update("b", update(n + 1, change), n / 10)
        hits = index.look_up(hashes, n / 10)
        assert all(0 <= hits.of(replica_id).blocks <= len(hashes) for replica_id in "ab")
        index.check_prediction("a", hashes, 0, n / 10)
        index.check_integrity()


def test_an_empty_prompt_hits_nothing() -> None:
    index = index_of("a")
    index.predict("a", [], 0.0)
    index.check_prediction("a", [], 0, 0.0)
    assert index.look_up([], 0.0).holders(3) == ()
