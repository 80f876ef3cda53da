from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode, Route, RouteReason
from baton.domain.request import Phase
from baton.engine.sim import SimSettings
from benchmarks._routing_policies import VARIANTS
from benchmarks._routing_report import compare, summarize
from benchmarks._routing_runs import (
    RunSetting,
    UnfinishedError,
    compute_metrics,
    run,
    saturated_rate,
)
from benchmarks._routing_workloads import Scenario, Workload, read_scenario
from benchmarks.routing import run_all

KEYS = {
    *("baton", "dynamo", "dynamo_credit4", "sglang", "llmd", "mooncake"),
    *("random", "round_robin", "least_loaded", "power_of_two"),
}
FIGURES = {
    *("cached_fraction", "ttft_p50_s", "ttft_mean_s", "ttft_p90_s", "e2e_p50_s"),
    "requests_per_s",
}
SMALL = Workload(
    replicas={Role.MIXED: 2},
    requests=24,
    warm_up_requests=4,
    groups=3,
    prompt_tokens=320,
    shared_tokens=240,
    output_tokens=4,
    clients=4,
)
ENGINE = SimSettings(max_len_tokens=1024, kv_blocks=256)


# ---------------------------------------------------------------------- the scenario
def test_the_scenario_is_the_published_one() -> None:
    scenario = read_scenario()
    grouped = scenario.workloads["grouped"]
    assert (grouped.groups, grouped.prompt_tokens, grouped.shared_tokens) == (32, 3990, 3000)
    assert (grouped.output_tokens, grouped.clients, grouped.replicas) == (64, 16, {"mixed": 4})
    assert grouped.ideal_fraction == pytest.approx(0.715, abs=0.001)
    engine = scenario.engine_of(grouped)
    assert (engine.kv_blocks, engine.block_size_tokens) == (4096, 16)
    prefill_s = engine.step_s(prefill_tokens=3990, decode_requests=0)
    wanted_ms = 4.209989e-7 * 3990**2 + 1.518344e-2 * 3990 + 16.50142
    assert prefill_s == pytest.approx(wanted_ms / 1e3, rel=1e-6)
    decode_s = engine.step_s(prefill_tokens=0, decode_requests=4, kv_used_fraction=0.25)
    assert decode_s == pytest.approx((-25.74 / 16 + 54.01 / 4 + 5.74) / 1e3)


def test_the_cache_holds_as_many_requests_under_both_grouped_loads() -> None:
    scenario = read_scenario()
    held = []
    for name in ("grouped", "heavy"):
        workload = scenario.workloads[name]
        engine = scenario.engine_of(workload)
        held.append(engine.kv_blocks * engine.block_size_tokens / workload.prompt_tokens)
    assert held[1] == pytest.approx(held[0], rel=0.01)


def test_a_misspelt_key_of_a_scenario_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("engine: {prefil_step_s: 1}\nworkloads: {}\n")
    with pytest.raises(TypeError, match="prefil_step_s"):
        read_scenario(file)


@pytest.mark.parametrize("ways", [{"clients": None}, {"rate_per_s": 1.0}])
def test_requests_arrive_in_one_way(ways: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match="expected one"):
        replace(SMALL, **ways)  # type: ignore[arg-type]  # parametrized


def test_requests_depend_on_the_seed_alone_and_share_what_their_groups_share() -> None:
    drawn = SMALL.draw_requests(7)
    assert drawn == SMALL.draw_requests(7)
    assert drawn != SMALL.draw_requests(8)
    stems = {request.prompt_token_ids[:240] for request in drawn}
    assert len(stems) == 3
    assert len({request.prompt_token_ids[:256] for request in drawn}) == 24
    assert {len(request.prompt_token_ids) for request in drawn} == {320}


# ---------------------------------------------------------------------- the runs
def test_the_policies_that_are_compared_are_these() -> None:
    assert VARIANTS.keys() == KEYS


def test_every_policy_has_the_index_that_it_ships_with() -> None:
    indexes = {name: str(arm.index_mode) for name, arm in VARIANTS.items()}
    assert {name for name, index in indexes.items() if index == "hybrid"} == {"baton"}
    assert {name for name, index in indexes.items() if index == "predicted"} == {"sglang", "llmd"}


@pytest.mark.parametrize("name", sorted(KEYS))
def test_every_policy_serves_every_request(name: str) -> None:
    found = run(
        RunSetting(workload=SMALL, engine=ENGINE, seed=1), VARIANTS[name], SMALL.draw_requests(1)
    )
    assert found.keys() >= FIGURES
    assert 0 < found["cached_fraction"] <= SMALL.ideal_fraction + 0.01
    assert 0 < found["ttft_p50_s"] <= found["ttft_p90_s"] < found["e2e_p50_s"]


def test_the_same_seed_gives_the_same_figures() -> None:
    setting = RunSetting(workload=SMALL, engine=ENGINE, seed=1)
    once, again = (run(setting, VARIANTS["baton"], SMALL.draw_requests(1)) for _ in range(2))
    assert once == again


def test_an_open_loop_is_sent_at_a_fraction_of_the_closed_loops_rate() -> None:
    heavy = replace(SMALL, clients=None, saturating_clients=8, load_fraction=0.5)
    scenario = Scenario(engine=ENGINE, workloads={"heavy": heavy})
    setting = RunSetting(workload=heavy, engine=ENGINE, seed=3)
    most = saturated_rate(setting, VARIANTS["dynamo"], heavy.draw_requests(3))
    runs = run_all(scenario, {"random": VARIANTS["random"]}, [3], loads=["heavy"])
    assert runs["heavy"]["random"][0]["offered_per_s"] == pytest.approx(most / 2)


def test_a_run_in_which_a_request_does_not_finish_is_no_result() -> None:
    long = replace(SMALL, prompt_tokens=2000)
    with pytest.raises(UnfinishedError, match="ended"):
        run(
            RunSetting(workload=long, engine=ENGINE, seed=1),
            VARIANTS["random"],
            long.draw_requests(1),
        )


# ---------------------------------------------------------------------- the figures
def record(number: int, *, arrived_at_s: float, ttft_s: float, decoder: str) -> RequestRecord:
    route = Route(
        mode=HandoffMode.LOCAL,
        prefill_replica_id=None,
        decode_replica_id=decoder,
        reason=RouteReason.MIXED_POOL,
    )
    return RequestRecord(
        request_id=f"r{number}",
        outcome=Phase.FINISHED,
        reason="length",
        routes=(route,),
        decisions=(),
        prompt_tokens=100,
        cached_tokens=10 * number,
        output_tokens=4,
        resumes=0,
        arrived_at_s=arrived_at_s,
        first_token_at_s=arrived_at_s + ttft_s,
        last_token_at_s=None,
        ended_at_s=arrived_at_s + ttft_s + 1.0,
        prefill_done_at_s=None,
        handed_off_blocks=0,
    )


def test_figures_are_those_of_the_records_and_warm_up_counts_for_the_cache_only() -> None:
    workload = replace(SMALL, requests=5, warm_up_requests=1)
    records = [
        record(0, arrived_at_s=0.0, ttft_s=99.0, decoder="a"),
        *(
            record(n, arrived_at_s=n, ttft_s=n / 10, decoder="b" if n % 2 else "a")
            for n in (4, 2, 3, 1)
        ),
    ]
    found = compute_metrics(workload, records)
    assert found == pytest.approx(
        {
            "cached_fraction": (0 + 10 + 20 + 30 + 40) / 500,
            "ttft_p50_s": 0.25,
            "ttft_mean_s": 0.25,
            "ttft_p90_s": 0.37,
            "e2e_p50_s": 1.25,
            "requests_per_s": 2 / 3,  # from 1 to 4 s, two ended
            "max_over_min": 3 / 2,
        }
    )


def test_a_replica_that_got_nothing_starved() -> None:
    workload = replace(SMALL, requests=1, warm_up_requests=0)
    records = [record(n, arrived_at_s=n, ttft_s=0.1, decoder="a") for n in range(2)]
    assert compute_metrics(workload, records)["max_over_min"] == float("inf")


def test_the_first_load_is_quoted_by_policy_and_the_others_under_their_names() -> None:
    repeats = [{"ttft_p50_s": value} for value in (3.0, 1.0, 2.0)]
    found = summarize({"grouped": {"baton": repeats}, "heavy": {"baton": repeats}})
    wanted = {"ttft_p50_s": 2.0, "min": {"ttft_p50_s": 1.0}, "max": {"ttft_p50_s": 3.0}}
    assert found == {"baton": wanted, "heavy": {"baton": wanted}}


def test_policies_are_compared_repeat_by_repeat() -> None:
    names = FIGURES - {"cached_fraction"}
    ours = [dict.fromkeys(names, value) for value in (3.0, 1.0, 1.0)]
    theirs = [dict.fromkeys(names, value) for value in (4.0, 2.0, 4.0)]
    found = compare({"grouped": {"baton": ours, "dynamo": theirs}, "heavy": {"baton": ours}})
    assert found == {"baton_over_dynamo": {"grouped": dict.fromkeys(names, 0.5)}}
