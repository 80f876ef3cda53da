from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.simulator.engine.settings import SimSettings
from benchmarks._figures import (
    Spread,
    cpu_used,
    differences,
    percentiles,
    quantile,
    ratios,
    rounded,
    us_per_token,
)
from benchmarks._load import completion_body, poisson_arrivals
from benchmarks._systems import (
    API,
    ENGINE,
    HAPROXY,
    OTHER,
    engine_settings,
    group_of,
    scenario,
)
from benchmarks.overhead import arrival_rate_per_s

# ------------------------------------------------------------------ arithmetic


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_quantiles_rise_from_the_least_to_the_largest(values: list[float]) -> None:
    found = [quantile(values, q / 10) for q in range(11)]

    assert found[0] == min(values)
    assert found[-1] == max(values)
    assert all(a <= b + 1e-6 for a, b in pairwise(found))


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentiles([float(n) for n in range(101)]) == {
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_a_quantile_of_nothing_is_an_error(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(values, q)


def test_what_is_added_is_compared_repeat_by_repeat() -> None:
    assert differences([3.0, 5.0], [1.0, 2.0]) == [2.0, 3.0]
    assert ratios([3.0, 5.0], [1.0, 2.0]) == [3.0, 2.5]
    with pytest.raises(ValueError, match="longer"):
        differences([3.0], [1.0, 2.0])


def test_cpu_is_what_was_used_between_two_readings() -> None:
    assert cpu_used({"api": 1.0}, {"api": 3.5, "new": 0.5}) == {"api": 2.5, "new": 0.5}
    assert us_per_token(0.5, 1000) == 500.0
    with pytest.raises(ValueError, match="0 tokens"):
        us_per_token(1.0, 0)


def test_rounding_reaches_every_float() -> None:
    value = {"a": [1.23456789, (2.3456789,)], "b": "x", "c": 3}

    assert rounded(value, 2) == {"a": [1.23, [2.35]], "b": "x", "c": 3}


def test_a_spread_names_its_ends_and_its_middle() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(min=1.0, median=2.0, max=3.0)


# ------------------------------------------------------------------ load and processes


def test_the_same_seed_draws_the_same_load() -> None:
    def draw(seed: int) -> tuple[list[float], bytes]:
        rng = random.Random(seed)
        arrivals = poisson_arrivals(rng, rate_per_s=20.0, window_s=5.0)
        return arrivals, completion_body(rng, model="m", words=200, max_tokens=4)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_come_at_their_rate_and_within_the_window() -> None:
    arrivals = poisson_arrivals(random.Random(7), rate_per_s=50.0, window_s=100.0)

    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] < arrivals[-1] < 100.0
    # Five standard deviations of a Poisson count with mean 5,000.
    assert abs(len(arrivals) - 5000) < 5 * 5000**0.5


def test_no_two_prompts_begin_alike() -> None:
    rng = random.Random(1)
    bodies = [completion_body(rng, model="m", words=200, max_tokens=4) for _ in range(100)]

    prompts = [json.loads(body)["prompt"] for body in bodies]
    assert len({prompt[:10] for prompt in prompts}) == 100
    assert all(len(prompt.split()) == 201 for prompt in prompts)


def test_the_arrival_rate_is_littles_law_for_the_engine_alone() -> None:
    settings = SimSettings(decode_step_s=0.009, decode_request_s=0.0, step_overhead_s=0.001)

    assert arrival_rate_per_s(settings, streams=16) == pytest.approx(16 / 0.64)


@pytest.mark.parametrize(
    ("name", "title", "group"),
    [
        ("haproxy", "/somewhere/haproxy", HAPROXY),
        ("ray::ServeRepl", "ray::ServeReplica:baton:ingress", API),
        ("ray::ServeRepl", "ray::ServeReplica:baton:mixed", ENGINE),
        ("ray::ServeRepl", "ray::ServeReplica:baton:prefill.handle_request", ENGINE),
        ("ray::ServeRepl", "ray::ServeReplica:baton:controller", OTHER),
        ("ray::ServeCont", "ray::ServeController.listen_for_change", OTHER),
        ("raylet", "/somewhere/raylet", OTHER),
        ("python", "python", OTHER),
    ],
)
def test_every_process_has_its_group(name: str, title: str, group: str) -> None:
    assert group_of(name, [title]) == group


def test_the_scenarios_compare_the_same_engines() -> None:
    local, pd = scenario("overhead-local", sets=("server.port=1234",)), scenario("overhead-pd")

    assert engine_settings(local) == engine_settings(pd)
    assert set(local.pools) == {"mixed"}
    assert set(pd.pools) == {"prefill", "decode"}
    assert local.server.port == 1234
