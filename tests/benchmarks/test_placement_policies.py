"""Placement policies of other projects: their formulas, worked out by hand from the published text.

Each is loaded as a configuration names it, from outside the package.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.derive.policies import load_chooser
from baton.config.schema.routing import MOVED_POLICIES
from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery
from benchmarks.policies import power_of_two
from benchmarks.policies.dynamo import DynamoFormula, DynamoKvCost, DynamoParameters, softmin
from benchmarks.policies.llmd import LlmdParameters, LlmdScorers, queue_scores
from benchmarks.policies.mooncake import choose_by_conductor, tbt_s, ttft_s
from benchmarks.policies.sglang import SglangCacheAware, SglangParameters
from benchmarks.policies.terms import lowest
from tests.policy.candidates import (
    BLOCK,
    GROUPED,
    SHARED_BLOCKS,
    busier,
    candidate,
    choose,
    kinds,
    prompts,
    several,
)


def costs(
    *candidates: Candidate,
    kind: LegKind = LegKind.LOCAL,
    query: PlacementQuery = GROUPED,
    **parameters: object,
) -> list[float]:
    made = DynamoParameters(**parameters)  # type: ignore[arg-type]
    return DynamoKvCost(made).costs(query, kind, candidates)


# --------------------------------------------------------------------------------------- dynamo


def test_dynamo_adds_uncached_prefill_blocks_and_active_blocks() -> None:
    # raw = (1600 + 3990) / 16 = 349.375; less 187 cached: 162.375; in use 100, and 250 of its own.
    one = candidate(hit=SHARED_BLOCKS, used=100, queued_tokens=1000, unseen_tokens=600)
    unseen_blocks = 600 / BLOCK
    assert costs(one) == [pytest.approx(162.375 + 100 + unseen_blocks + 250)]


def test_dynamo_lets_one_request_more_overrule_a_hit_of_3000_tokens() -> None:
    # As its own text has it: another request costs 250 decode blocks, the hit is worth 187.
    holder, idle = candidate("a", hit=SHARED_BLOCKS, used=250, running=1), candidate("b")
    assert costs(holder, idle) == [pytest.approx(562.375), pytest.approx(499.375)]
    assert choose(DynamoKvCost(), holder, idle) == "b"
    less_busy = candidate("a", hit=SHARED_BLOCKS, used=186, running=1)
    assert choose(DynamoKvCost(), less_busy, idle) == "a"


def test_dynamo_at_credit_4_prefers_the_hit_until_the_prefill_is_free() -> None:
    # 249.375 - 4 x 187 is below 0, so the hit is worth at most the whole prefill of 249.375 blocks.
    holder, idle = candidate("a", hit=SHARED_BLOCKS, used=249), candidate("b")
    assert costs(holder, idle, overlap_score_credit=4.0) == [
        pytest.approx(0 + 249 + 250),
        pytest.approx(249.375 + 250),
    ]


def test_dynamo_gives_host_blocks_three_quarters_of_a_credit() -> None:
    # 249.375 - (100 + 0.75 x 40) = 119.375
    assert costs(candidate(hit=140, host=40)) == [pytest.approx(119.375 + 250)]


def test_dynamo_decays_the_credit_with_the_backlog_over_the_calmest() -> None:
    # a: backlog (8000 - 4000) / 16 = 250 blocks = 1 request of 250 blocks: decay 1 / (1 + 2 x 1).
    busy = candidate("a", hit=SHARED_BLOCKS, queued_tokens=8000)
    calm = candidate("b", hit=SHARED_BLOCKS, queued_tokens=4000)
    assert costs(busy, calm, overlap_score_credit_decay=2.0) == [
        pytest.approx((8000 + 3990) / 16 - SHARED_BLOCKS / 3 + 250),
        pytest.approx((4000 + 3990) / 16 - SHARED_BLOCKS + 250),
    ]


def test_dynamo_weighs_prefill_and_active_requests() -> None:
    one = candidate(queued=1, running=2, pulling=1, unseen_legs=1)
    found = costs(one, prefill_load_scale=4.0, decode_active_request_weight=10.0)
    assert found == [pytest.approx(4 * 249.375 + 250 + 10 * 5)]


def test_dynamos_lmetric_multiplies() -> None:
    one = candidate(hit=SHARED_BLOCKS, used=100)
    assert costs(one, formula=DynamoFormula.LMETRIC) == [pytest.approx(62.375 * 351)]


def test_dynamo_tracks_no_decode_blocks_in_a_prefill_pool() -> None:
    one = candidate(hit=SHARED_BLOCKS, used=100)
    assert costs(one, kind=LegKind.PREFILL) == [pytest.approx(62.375)]


def test_dynamo_sees_nothing_but_active_blocks_in_a_decode_pool() -> None:
    one = candidate(hit=SHARED_BLOCKS, used=100, queued_tokens=9999)
    assert costs(one, kind=LegKind.DECODE) == [pytest.approx(350)]
    assert costs(one, kind=LegKind.DECODE, formula=DynamoFormula.LMETRIC) == [pytest.approx(350)]


# ----------------------------------------------------------------------------------------- llmd


def test_llmd_weighs_prefix_queue_and_kv() -> None:
    # a: 3 x 2992/3990 + 2 x (4-4)/(4-0) + 2 x (1 - 0.5);  b: 0 + 2 x 1 + 2 x (1 - 0.1)
    busy = candidate("a", hit=SHARED_BLOCKS, queued=4, used=500)
    idle = candidate("b", queued=0, used=100)
    assert LlmdScorers().scores(GROUPED, (busy, idle)) == [
        pytest.approx(3 * 2992 / 3990 + 0 + 1),
        pytest.approx(0 + 2 + 1.8),
    ]
    assert choose(LlmdScorers(), busy, idle) == "b"


def test_llmds_queues_are_all_good_when_they_are_equal() -> None:
    assert queue_scores([3, 3]) == [1.0, 1.0]
    assert queue_scores([0, 1, 4]) == [1.0, 0.75, 0.0]


def test_llmd_may_score_the_length_of_a_match() -> None:
    parameters = LlmdParameters(long_match_weight=1.0, queue_weight=0, kv_weight=0)
    (score,) = LlmdScorers(parameters).scores(GROUPED, [candidate(hit=128)])
    assert score == pytest.approx(3 * (2048 / 8192) ** 2)
    longest = PlacementQuery(prompt_tokens=20_000)
    (score,) = LlmdScorers(parameters).scores(longest, [candidate(hit=1000)])
    assert score == pytest.approx(3)


def test_llmd_does_not_see_what_was_sent_since_the_last_report() -> None:
    sent, idle = candidate("a", unseen_legs=9, unseen_tokens=9999, legs=9), candidate("b")
    scores = LlmdScorers().scores(GROUPED, (sent, idle))
    assert scores[0] == scores[1]


# --------------------------------------------------------------------------------------- sglang


def test_sglang_sends_a_match_above_the_threshold_to_the_best_match() -> None:
    query = PlacementQuery(prompt_tokens=1600)
    views = candidate("a", hit=30, legs=9), candidate("b", hit=31, legs=9), candidate("c")
    assert choose(SglangCacheAware(), *views, query=query) == "b"  # 0.31
    assert choose(SglangCacheAware(), views[0], views[2], query=query) == "c"  # 0.30: not more


@pytest.mark.parametrize(
    ("high", "low", "imbalanced"),
    [(65, 0, True), (64, 0, False), (195, 130, False), (196, 130, True), (400, 300, False)],
)
def test_sglang_is_imbalanced_only_when_loads_differ_by_number_and_by_ratio(
    high: int, low: int, *, imbalanced: bool
) -> None:
    # 196 - 130 = 66 > 64 and 196 > 1.5 x 130 = 195; 400 - 300 > 64 but 400 < 450.
    assert SglangCacheAware().imbalanced([low, high]) is imbalanced
    holder, other = candidate("a", hit=SHARED_BLOCKS, legs=high), candidate("b", legs=low)
    assert choose(SglangCacheAware(), holder, other) == ("b" if imbalanced else "a")


def test_sglangs_load_is_the_routers_own_and_ties_go_to_the_first() -> None:
    others = candidate("a", running=50, queued=50)
    assert choose(SglangCacheAware(), others, candidate("b")) == "a"
    assert choose(SglangCacheAware(), others, candidate("b", legs=1)) == "a"
    assert choose(SglangCacheAware(), candidate("a", legs=1), candidate("b")) == "b"


def test_sglang_takes_of_equal_matches_the_one_of_last() -> None:
    older, newer = candidate("a", hit=200, age_s=3.0), candidate("b", hit=200, age_s=1.0)
    assert choose(SglangCacheAware(), older, newer) == "b"


def test_sglangs_parameters_are_used() -> None:
    small = SglangCacheAware(
        SglangParameters(balance_abs_threshold=1, balance_rel_threshold=1.1, cache_threshold=0.9)
    )
    assert small.imbalanced([0, 2])
    assert choose(small, candidate("a", legs=1), candidate("b", hit=SHARED_BLOCKS, legs=2)) == "a"


# ------------------------------------------------------------------------------------- mooncake


def test_mooncake_adds_the_queue_and_the_rest_of_the_prompt() -> None:
    # 10 ms a step, 0.1 ms a token: queue 10 + 0.1 x 500 ms, prompt 10 + 0.1 x (3990 - 2992) ms.
    one = candidate(hit=SHARED_BLOCKS, queued_tokens=300, unseen_tokens=200)
    assert ttft_s(GROUPED, one) == pytest.approx(0.060 + 0.1098)
    assert ttft_s(GROUPED, candidate()) == pytest.approx(0.409)
    assert ttft_s(GROUPED, candidate(hit=250)) == pytest.approx(0.0101)  # one token at least


def test_mooncake_waits_for_a_prefix_as_long_as_it_saves() -> None:
    # The hit saves 0.2992 s: worth a queue of 10 + 0.1 x 2891 ms, not of 10 + 0.1 x 2893 ms.
    holder, idle = candidate("a", hit=SHARED_BLOCKS, queued_tokens=2891), candidate("b")
    assert choose(choose_by_conductor, holder, idle) == "a"
    longer = candidate("a", hit=SHARED_BLOCKS, queued_tokens=2893)
    assert choose(choose_by_conductor, longer, idle) == "b"


def test_mooncake_decodes_where_steps_are_shortest() -> None:
    few, many = candidate("a", running=1, queued=1, unseen_legs=1), candidate("b", running=4)
    assert tbt_s(GROUPED, few) == pytest.approx(0.010 + 0.001 * 4)
    assert choose(choose_by_conductor, few, many, kind=LegKind.DECODE) == "a"
    holder = candidate("b", running=4, hit=SHARED_BLOCKS)
    assert choose(choose_by_conductor, few, holder, kind=LegKind.DECODE) == "a"


def test_mooncake_breaks_a_tie_of_ttft_by_the_time_between_tokens() -> None:
    busy, idle = candidate("a", running=3), candidate("b", running=2)
    assert {choose(choose_by_conductor, busy, idle, seed=seed) for seed in range(9)} == {"b"}


# ---------------------------------------------------------------------------------- power of two


def test_power_of_two_takes_the_less_loaded_of_two_and_never_the_worst_of_three() -> None:
    all_three = candidate("a", legs=1), candidate("b", legs=2), candidate("c", legs=3)
    chosen = Counter(choose(power_of_two.choose, *all_three, seed=seed) for seed in range(300))
    # Of the three pairs a wins two and b one.
    assert chosen["c"] == 0
    assert 160 < chosen["a"] < 240
    assert choose(power_of_two.choose, all_three[2]) == "c"


def test_power_of_two_spreads_equals() -> None:
    equals = [candidate(replica_id) for replica_id in "abc"]
    chosen = Counter(choose(power_of_two.choose, *equals, seed=seed) for seed in range(300))
    assert min(chosen.values()) > 60


# ---------------------------------------------------------------------------------------- draws


def test_equal_costs_are_drawn_uniformly_and_others_never() -> None:
    rng = Random(1)
    drawn = Counter(lowest([1.0, 0.0, 0.0], rng) for _ in range(300))
    assert drawn[0] == 0
    assert 110 < drawn[1] < 190


def test_a_temperature_draws_by_the_distance_from_the_lowest() -> None:
    # exp(0), exp(-0.5 / 1), exp(-1 / 1) at temperature 1: 0.506, 0.307, 0.186
    rng = Random(1)
    drawn = Counter(softmin([10.0, 15.0, 20.0], 1.0, rng) for _ in range(3000))
    shares = [drawn[index] / 3000 for index in range(3)]
    assert shares == pytest.approx([0.506, 0.307, 0.186], abs=0.03)
    assert {softmin([2.0, 1.0], 0.0, rng) for _ in range(50)} == {1}
    assert {softmin([1.0, 1.0], 1.0, rng) for _ in range(50)} == {0, 1}


# ----------------------------------------------------------------------------------- properties


@given(several, st.sampled_from(sorted(MOVED_POLICIES)), kinds, prompts, st.integers(0, 9))
def test_every_policy_answers_with_an_index_and_the_same_one_for_the_same_seed(
    found: list[Candidate], name: str, kind: LegKind, query: PlacementQuery, seed: int
) -> None:
    place = MOVED_POLICIES[name]
    first, again = (load_chooser(place)(query, kind, found, Random(seed)) for _ in range(2))
    assert first == again
    assert first in range(len(found))


@given(several, st.randoms(use_true_random=False))
def test_a_score_belongs_to_its_candidate_wherever_it_stands(
    found: list[Candidate], shuffler: Random
) -> None:
    def scores(order: list[Candidate]) -> list[dict[str, float]]:
        formulas = [
            costs(*order, overlap_score_credit_decay=1.0),
            LlmdScorers().scores(GROUPED, order),
            [ttft_s(GROUPED, other) for other in order],
        ]
        ids = [other.view.replica_id for other in order]
        return [dict(zip(ids, formula, strict=True)) for formula in formulas]

    before = scores(found)
    shuffler.shuffle(found)
    assert scores(found) == before


@given(several, st.sampled_from(["dynamo", "llmd", "mooncake"]), kinds, st.integers(0, 9))
def test_load_on_the_others_never_drives_a_request_away(
    found: list[Candidate], name: str, kind: LegKind, seed: int
) -> None:
    chooser = load_chooser(MOVED_POLICIES[name])
    index = chooser(GROUPED, kind, found, Random(seed))
    others = [other if place == index else busier(other) for place, other in enumerate(found)]
    assert chooser(GROUPED, kind, others, Random(seed)) == index


@given(several, st.sampled_from(["dynamo", "llmd", "mooncake"]), st.integers(0, 9))
def test_a_longer_hit_never_drives_a_request_away(
    found: list[Candidate], name: str, seed: int
) -> None:
    chooser = load_chooser(MOVED_POLICIES[name])
    index = chooser(GROUPED, LegKind.LOCAL, found, Random(seed))
    assert index is not None
    longer = found[index].hit._replace(blocks=found[index].hit.blocks + 20)
    with_more = [*found[:index], found[index]._replace(hit=longer), *found[index + 1 :]]
    assert chooser(GROUPED, LegKind.LOCAL, with_more, Random(seed)) == index
