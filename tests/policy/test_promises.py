from __future__ import annotations

import random
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, Role
from baton.domain.handoff import HandoffMode, PlacementDecision
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.placement.candidates import PlacementOptions
from baton.policy.placement.port import PlacementQuery
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.placement.replica_cost import ReplicaCost, replica_cost
from baton.policy.placement.slo_impact import SloImpact, broken_fraction
from tests.fakes.timings import (
    FixedTimings,
    KnownHits,
    LinearTiming,
    placement_context,
    replica_view,
)

QUERY = PlacementQuery(prompt_tokens=1600, max_tokens=100)
FAST = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.0)


def cost(
    *, running: int = 20, queued_tokens: int = 0, share: float = 0.0, output_tokens: float = 100.0
) -> ReplicaCost:
    load = Load(running_requests=running, queued_tokens=queued_tokens)
    view = replica_view("d0", load=load)
    found = replica_cost(QUERY, view, FAST, output_tokens=output_tokens, at_s=0.0)
    found.prefill_time_fraction = share
    return found


def placed(
    options: PredictedOptions, *, share: float = 0.0, queued_tokens: int = 0
) -> PlacementDecision:
    decode = replica_view("d0", load=Load(running_requests=20))
    prefill = replica_view("p0", Role.PREFILL, Load(queued_tokens=queued_tokens))
    timings = FixedTimings(timing=FAST, output_tokens=100.0, shares={"d0": share})
    decision = PredictedPlacer(options).place(
        QUERY, placement_context(prefill, decode, timings=timings)
    )
    assert isinstance(decision, PlacementDecision)
    return decision


# ------------------------------------------------------------------ what a stall breaks


def test_the_share_of_broken_streams_is_that_of_lives_drawn_by_chance() -> None:
    rng = random.Random(1)
    lives = [rng.expovariate(1 / 50) for _ in range(20_000)]
    slack_s, stall_s = 0.004, 0.2
    short = sum(life for life in lives if life * slack_s < stall_s)  # met as often as long
    assert broken_fraction(stall_s, slack_s=slack_s, mean_output_tokens=50) == pytest.approx(
        short / sum(lives), abs=0.02
    )


def test_no_stall_breaks_nobody_and_an_endless_one_everybody() -> None:
    assert broken_fraction(0.0, slack_s=0.01, mean_output_tokens=10) == 0
    assert broken_fraction(1e9, slack_s=0.01, mean_output_tokens=10) == 1


@given(
    tight=st.floats(0.001, 0.2),
    looser=st.floats(1.0, 10.0),
    stall=st.floats(0.0, 5.0),
    life=st.floats(1.0, 1000.0),
)
def test_a_looser_objective_breaks_no_more_streams(
    tight: float, looser: float, stall: float, life: float
) -> None:
    strict = broken_fraction(stall, slack_s=tight, mean_output_tokens=life)
    assert broken_fraction(stall, slack_s=tight * looser, mean_output_tokens=life) <= strict + 1e-12


@given(
    slo=st.floats(0.005, 0.2),
    looser=st.floats(1.0, 10.0),
    running=st.integers(0, 60),
    share=st.floats(0.0, 0.9),
)
def test_a_looser_tpot_never_makes_a_feasible_option_infeasible(
    slo: float, looser: float, running: int, share: float
) -> None:
    one = cost(running=running, share=share)
    kept = SloImpact(slo).expected_misses(one) < 1
    assert not kept or SloImpact(slo * looser).expected_misses(one) < 1
    assert (
        SloImpact(slo * looser).expected_misses(one, 1600)
        <= SloImpact(slo).expected_misses(one, 1600) + 1e-9
    )


# ------------------------------------------------------------------ what one more request breaks


def test_a_prompt_breaks_the_streams_that_cannot_make_up_for_it() -> None:
    # 1,600 tokens take 0.16 s; streams gain 10 ms with each of 100 tokens.
    lives = 0.16 / (0.01 * 100)
    wanted = 20 * (1 - exp(-lives) * (1 + lives))
    assert SloImpact(0.02).expected_misses(cost(), 1600) == pytest.approx(wanted)
    assert SloImpact(0.02).expected_misses(cost()) == 0
    assert SloImpact(0.02).expected_misses(cost(running=0), 1600) == 0


def test_what_queues_there_anyway_is_not_counted_but_makes_it_worse() -> None:
    alone, behind = cost(), cost(queued_tokens=1600)
    assert SloImpact(0.02).expected_misses(behind) == 0
    assert SloImpact(0.02).expected_misses(behind, 1600) > SloImpact(0.02).expected_misses(
        alone, 1600
    )


def test_the_time_that_prompts_take_slows_every_token() -> None:
    assert SloImpact(0.02).expected_misses(cost(running=0, share=0.45)) == 0
    assert SloImpact(0.02).expected_misses(cost(running=0, share=0.55)) == 1
    slowed = SloImpact(0.02).expected_misses(cost(share=0.3), 1600)
    assert slowed > SloImpact(0.02).expected_misses(cost(), 1600)


def test_streams_that_seem_lost_are_not_given_up() -> None:
    lost = cost(share=0.6)  # a token every 25 ms, expected every 20
    more = SloImpact(0.02).expected_misses(lost, 1600) - SloImpact(0.02).expected_misses(lost)
    assert more > 9


def test_a_stream_more_counts_where_it_makes_steps_too_long() -> None:
    crowded = replace(cost(), step_s=0.021, step_increase_s=0.002)
    assert SloImpact(0.02).expected_misses(crowded) == 1
    queueing = replace(cost(queued_tokens=1600), step_s=0.014, step_increase_s=0.004)
    assert (
        SloImpact(0.02).expected_misses(queueing) > 0.1
    )  # they have less slack for what queues there
    assert SloImpact(0.02).expected_misses(replace(queueing, step_increase_s=0.0)) == 0


def test_a_miss_costs_more_than_all_that_a_request_may_take() -> None:
    one = cost()
    assert SloImpact(0.02, 0.5).miss_penalty_s(one) == pytest.approx(4 * (0.5 + 100 * 0.02))
    assert SloImpact(0.02).miss_penalty_s(one) == pytest.approx(4 * 100 * 0.02)


# ------------------------------------------------------------------ what is chosen


def test_a_strict_tpot_leaves_a_prompt_to_the_prefill_pool_though_it_queues_there() -> None:
    queued = 60_000  # 6 s, far more than the 3.2 s that 20 streams lose by 0.16 s
    free = placed(PredictedOptions(), queued_tokens=queued)
    strict = placed(PredictedOptions(tpot_slo_s=0.0105), queued_tokens=queued)
    loose = placed(PredictedOptions(tpot_slo_s=0.5), queued_tokens=queued)
    assert free.route.mode is loose.route.mode is HandoffMode.LOCAL
    assert strict.route.mode is HandoffMode.PULL
    assert strict.options[0].expected_misses == 0
    assert strict.options[1].expected_misses > 1


def test_a_first_token_that_would_be_late_is_a_miss_like_any_other() -> None:
    # One miss for certain behind the queue, or a small part of one beside the streams.
    aims = PredictedOptions(tpot_slo_s=0.1, ttft_slo_s=1.0)
    late = placed(aims, queued_tokens=60_000)
    assert late.route.mode is HandoffMode.LOCAL
    assert late.options[0].expected_misses < 0.01
    assert late.options[1].expected_misses == 1


def test_without_a_tpot_objective_nothing_is_counted_and_no_share_is_asked_for() -> None:
    decision = placed(PredictedOptions(ttft_slo_s=0.1), share=0.9, queued_tokens=60_000)
    assert [option.expected_misses for option in decision.options] == [0, 0]
    assert decision == placed(PredictedOptions(ttft_slo_s=0.1), queued_tokens=60_000)


@given(prompts=st.lists(st.integers(1, 30_000), min_size=1, max_size=4), replicas=st.integers(1, 3))
def test_an_objective_that_is_kept_changes_nothing_in_an_idle_fleet(
    prompts: list[int], replicas: int
) -> None:
    views = [replica_view(f"d{index}") for index in range(replicas)]
    around = placement_context(*views, replica_view("p0", Role.PREFILL))
    for tokens in prompts:
        query = PlacementQuery(prompt_tokens=tokens, max_tokens=100)
        plain = PredictedPlacer().place(query, around)
        aiming = PredictedPlacer(PredictedOptions(tpot_slo_s=0.1)).place(query, around)
        assert aiming == plain


def test_what_is_computed_after_a_prefix_was_fetched_breaks_streams_too() -> None:
    holder, target = (
        replica_view(name, load=Load(running_requests=20), supports_prefix_fetch=True)
        for name in ("h", "t")
    )
    query = evolve(QUERY, hits=KnownHits({"h": 50}))  # 800 of 1,600 tokens are left
    around = placement_context(
        holder, target, timings=FixedTimings(timing=FAST, output_tokens=100.0)
    )
    ways = PlacementOptions(query, around, slo=Slo(), slo_impact=SloImpact(0.02))
    costs = ways.costs(["h", "t"])
    (fetch,) = ways.prefix_fetches(
        costs, {cost.view.replica_id: cost for cost in costs}, best_hit_tokens=0
    )
    assert fetch.option.decode_replica_id == "t"
    assert fetch.expected_misses == pytest.approx(SloImpact(0.02).expected_misses(costs[1], 800))
    assert fetch.expected_misses > 0


@pytest.mark.parametrize(("slowed", "other"), [("a", "b"), ("b", "a")])
def test_the_decode_replica_that_keeps_the_pace_is_chosen_at_handoff(
    slowed: str, other: str
) -> None:
    few = replica_view(slowed, load=Load(running_requests=2))
    many = replica_view(other, load=Load(running_requests=12))
    timings = FixedTimings(timing=FAST, shares={slowed: 0.6})
    around = placement_context(few, many, timings=timings)
    source = replica_view("p0", Role.PREFILL)
    aiming = PredictedPlacer(PredictedOptions(tpot_slo_s=0.02))
    assert aiming.place_decode(QUERY, source, around) == other
