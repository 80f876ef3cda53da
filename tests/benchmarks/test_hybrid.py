from __future__ import annotations

import math
from itertools import product

import pytest

from baton.simulator.outcome import Objectives
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._hybrid_runs import (
    TraceLoad,
    Variant,
    capacity,
    geometric_rates,
    highest_rate,
    hybrid_variant,
)
from benchmarks.hybrid import (
    RATE_LEVELS,
    TPOT_SCALES,
    TTFT_SCALES,
    highest_level,
    max_request_rate,
    objectives_grid,
    single_request_times_s,
    summarize,
)

RATES = geometric_rates(1.0, 20.0)
TRACE = Trace(
    name="t", requests=tuple(TraceRequest(number / 4, 1000, 100) for number in range(400))
)


def test_rates_rise_by_the_same_ratio_until_the_highest_is_passed() -> None:
    found = geometric_rates(1.0, 2.0, ratio=1.5)
    assert found == pytest.approx([1.0, 1.5, 2.25])


def test_capacity_is_where_attainment_falls_through_the_target() -> None:
    assert capacity({1.0: 1.0, 2.0: 0.92, 4.0: 0.82}) == pytest.approx(2.4)
    assert capacity({1.0: 0.8, 2.0: 0.95}) == 0.0
    assert capacity({1.0: 1.0, 2.0: 0.9}) == 2.0
    assert capacity({1.0: 1.0, 2.0: 0.9, 4.0: 0.9, 8.0: 0.5}) == 4.0
    assert capacity({}) == 0.0


def test_capacity_ends_where_the_target_is_first_missed() -> None:
    assert capacity({1.0: 1.0, 2.0: 0.8, 4.0: 1.0}) == pytest.approx(1.5)


@pytest.mark.parametrize("near", [0.0, 1.0, 5.0, 9.7, 100.0])
def test_the_highest_rate_does_not_depend_on_the_guess(near: float) -> None:
    def share(rate: float) -> float:
        return 1 / (1 + math.exp(rate - 10))

    every = {rate: share(rate) for rate in RATES}
    assert highest_rate(share, RATES, guess=near) == pytest.approx(capacity(every))


def test_the_lowest_rate_is_found_where_no_other_will_do() -> None:
    share = {rate: 0.95 if rate == RATES[0] else 0.5 for rate in RATES}
    assert highest_rate(share.__getitem__, RATES, guess=6.0) == pytest.approx(capacity(share))
    assert capacity(share) >= RATES[0]


def test_a_target_that_is_missed_at_any_rate_gives_no_capacity() -> None:
    assert highest_rate(lambda _: 0.5, RATES, guess=5.0) == 0.0


def test_a_load_at_a_lower_rate_is_part_of_that_at_a_higher_one() -> None:
    load = TraceLoad(trace=TRACE, window_s=50.0)
    low, high = load.at_rate(2.0), load.at_rate(3.5)
    assert set(low.requests) < set(high.requests)
    assert high.requests[-1].at_s < 50.0
    assert len(high) == pytest.approx(175, rel=0.15)


def test_objectives_are_multiples_of_the_latency_of_a_lone_request() -> None:
    ttft_s, tpot_s = single_request_times_s(1000, 1050)
    grid = objectives_grid(TRACE)
    assert len(grid) == 36
    assert grid[0].ttft_s == pytest.approx(TTFT_SCALES[0] * ttft_s)
    assert grid[-1] == Objectives(ttft_s=TTFT_SCALES[-1] * ttft_s, tpot_s=TPOT_SCALES[-1] * tpot_s)


def test_longer_prompts_leave_room_for_fewer_requests() -> None:
    longer = tuple(request._replace(prompt_tokens=4000) for request in TRACE.requests)
    assert max_request_rate(Trace(name="l", requests=longer)) < max_request_rate(TRACE) / 2.5


def test_losing_cells_are_shown_and_cells_without_service_are_not_counted() -> None:
    def cell(better: float, hybrid: float) -> dict[str, float | str]:
        without = min(better, hybrid)
        return {"better": better, "hybrid": hybrid, "hybrid_no_admission": without}

    found = summarize(
        {"a": [cell(1.0, 0.9), cell(1.0, 1.3)], "b": [cell(0.0, 0.0), cell(2.0, 2.0)]}
    )
    assert found["cells"] == 4
    assert found["cells_that_somebody_serves"] == 3
    assert found["hybrid_worst_ratio"] == pytest.approx(0.9)
    assert found["share_not_2_percent_under"] == pytest.approx(2 / 3)
    assert found["share_a_fifth_over"] == pytest.approx(1 / 3)
    assert found["no_admission_share_not_2_percent_under"] == pytest.approx(2 / 3)
    assert found["no_admission_share_a_fifth_over"] == 0
    assert found["losing"] == [{"trace": "a", **cell(1.0, 0.9)}]


def test_a_level_below_the_better_rivals_rate_is_that_share_of_it_to_the_digit() -> None:
    rates = [1.1**number for number in range(40)]
    cells: list[dict[str, float | str]] = [
        {"better": x, "hybrid": 0.98 * x, "hybrid_no_admission": 0.98 * x} for x in rates
    ]
    assert any(0.98 * x / x < 0.98 for x in rates)
    found = summarize({"a": cells})
    assert (found["share_not_2_percent_under"], found["losing"]) == (1.0, [])


@pytest.mark.parametrize(("first", "second"), list(product((0.0, *RATE_LEVELS), repeat=2)))
def test_the_best_arm_of_a_cell_is_found_with_few_runs(first: float, second: float) -> None:
    holds = {hybrid_variant(2): first, hybrid_variant(1): second}
    asked: list[tuple[Variant, float]] = []

    def held(arm: Variant, level: float) -> bool:
        asked.append((arm, level))
        return level <= holds[arm]

    level, arm = highest_level(list(holds), held)
    assert level == max(first, second)
    assert holds[arm] == level or level == 0
    assert arm == hybrid_variant(2) or second > first
    assert len(asked) == len(set(asked)) <= len(RATE_LEVELS) + RATE_LEVELS.index(1.0) + 1
