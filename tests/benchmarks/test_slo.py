"""The scaling benchmark: its tables and headlines, and that its fleets are what they say."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence

import pytest

from baton.policy.scaling.observation import Demand
from baton.simulator.fleet.scaling_log import Direction, ScalingChange, ScalingReport
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.rate_series import RateWindow
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks import _slo_azure, _slo_check, _slo_mix, _slo_overload, _slo_servegen, slo
from benchmarks._slo_fleets import SERVER_SLO, ReplicaCapacity, needed_replicas, pool_bounds
from benchmarks._slo_table import check_oracle, headline, scaling_metrics, table

STRENGTH = ReplicaCapacity(
    prefill_tokens_per_s=10_000.0,
    decode_tokens_per_s=5_000.0,
    streams=200.0,
    min_step_s=0.01,
    mean_prompt_tokens=1000.0,
)


def measured(name: str, cold_start_s: float) -> Mapping[str, float]:
    hours = {"oracle": 10.0, "static_peak": 40.0, "baton": 11.0 + cold_start_s / 30}
    return {"attainment": 0.99 - cold_start_s / 1e4, "gpu_hours": hours[name]} | {
        "reversals_per_hour": cold_start_s / 30
    }


def test_ours_is_set_beside_the_oracle_and_a_fleet_for_the_peak() -> None:
    rows = table(measured, names=("oracle", "static_peak", "baton"), cold_starts_s=(30.0, 60.0))
    assert [(row["policy"], row["cold_start_s"]) for row in rows] == [
        ("oracle", 30.0),
        ("static_peak", 30.0),
        ("baton", 30.0),
        ("oracle", 60.0),
        ("static_peak", 60.0),
        ("baton", 60.0),
    ]
    assert [row["over_oracle"] for row in rows] == pytest.approx([1, 4, 1.2, 1, 4, 1.3])
    assert rows[4]["attainment"] == rows[1]["attainment"]  # a fixed fleet starts nothing
    told = headline(rows, "load")
    assert told["gpu_hours_over_oracle_load"] == pytest.approx(1.25)
    assert told["gpu_hours_over_oracle_load_worst"] == pytest.approx(1.3)
    assert told["gpu_hours_over_peak_static_load"] == pytest.approx(0.3125)
    assert told["attainment_load"] == pytest.approx(0.9855)
    assert told["attainment_load_worst"] == pytest.approx(0.984)
    assert told["reversals_per_hour_load"] == pytest.approx(1.5)


def test_missing_runs_are_named_and_nothing_else_is_lost() -> None:
    parts: dict[str, dict[str, object]] = {
        "m_large": {"attainment_m_large": 0.98, "reversals_per_hour_m_large": 0.5, "rows": []},
        "azure_code": {"reversals_per_hour_azure_code": 1.5, "took_s": 9.0},
        "m_mid": {"reversals_per_hour_m_mid": 2.5},
    }
    told = slo.headline_metrics(parts)
    assert list(told)[: len(slo.HEADLINES)] == list(slo.HEADLINES)
    assert told["attainment_m_large"] == 0.98
    assert told["reversals_per_hour"] == 1.5, "of the loads it was made for; others say their own"
    assert told["reversals_per_hour_m_mid"] == 2.5
    assert told["moving_mix_gain"] is None
    assert "rows" not in told
    assert "took_s" not in told


def test_figures_of_a_run_come_from_its_scaling_log() -> None:
    changes = tuple(ScalingChange(float(at), "a", Direction.UP, 1) for at in range(4))
    story = ScalingReport(
        span_s=1800.0, ticks=9, paused_ticks=1, changes=changes, gpu_seconds=7200.0
    )
    figures = scaling_metrics(story, 0.9)
    assert figures["gpu_hours"] == 2.0
    assert figures["actions_per_hour"] == 8.0
    assert figures["reversals_per_hour"] == 0.0


def test_more_is_needed_of_a_pool_for_more_of_its_demand_only() -> None:
    few = needed_replicas(
        Demand(prompt_tokens_per_s=30_000, output_tokens_per_s=9_000), STRENGTH, SERVER_SLO
    )
    more = needed_replicas(
        Demand(prompt_tokens_per_s=90_000, output_tokens_per_s=9_000), STRENGTH, SERVER_SLO
    )
    assert few["prefill"] >= 4
    assert more["prefill"] >= few["prefill"] + 5
    assert more["decode"] == few["decode"] >= 2
    limits = pool_bounds(few, more)
    assert (limits["prefill"].initial, limits["prefill"].max) == (few["prefill"], more["prefill"])


def test_demand_in_bins_is_per_second_and_nothing_is_lost() -> None:
    requests = (TraceRequest(0.5, 100, 10), TraceRequest(9.0, 300, 30), TraceRequest(31.0, 50, 5))
    found = _slo_azure.demand_bins(Trace(name="t", requests=requests), 10.0)
    assert [demand.prompt_tokens_per_s for demand in found] == [40.0, 0.0, 0.0, 5.0]
    assert found[0].mean_uncached_tokens == 200.0
    assert _slo_azure.peak_demand(found).output_tokens_per_s == 4.0
    assert _slo_azure.mean_lengths(Trace(name="t", requests=requests)) == (150.0, 15.0)


def test_the_peak_of_a_series_is_what_its_most_demanding_windows_need() -> None:
    prompts, outputs = RateWindow(0.0, 90.0, 2000.0, 10.0), RateWindow(600.0, 30.0, 200.0, 1500.0)
    peak = _slo_servegen.replicas_for_peak([prompts, outputs])
    assert peak["prefill"] == _slo_servegen.replicas_for_peak([prompts])["prefill"] >= 5
    assert peak["decode"] == _slo_servegen.replicas_for_peak([outputs])["decode"] >= 5


def day(rate_per_s: float = 10.0) -> list[RateWindow]:
    return [
        RateWindow(600.0 * number, rate_per_s * (1 + number % 2), 100.0 + number % 3, 50.0)
        for number in range(144)
    ]


def test_mixes_have_their_mean_rates_and_lengths_and_vary_as_the_series_does() -> None:
    mixes = _slo_servegen.length_mixes(day())
    assert len(mixes) == 5
    for name, mix in _slo_servegen.LENGTH_MIXES.items():
        windows = mixes[name]
        requests = sum(window.rate_per_s for window in windows)
        prompts = sum(window.rate_per_s * window.mean_prompt_tokens for window in windows)
        assert requests / len(windows) == pytest.approx(mix.rate_per_s)
        assert prompts / requests == pytest.approx(mix.prompt_tokens)
        assert windows[1].rate_per_s == pytest.approx(2 * windows[0].rate_per_s)


def test_the_drifting_mix_goes_from_short_to_long_and_back_each_day() -> None:
    drifting = _slo_servegen.length_mixes(day())["drifting"]
    midnight, six, noon = drifting[0], drifting[36], drifting[72]
    assert noon.mean_output_tokens == pytest.approx(75 * midnight.mean_output_tokens, rel=0.05)
    assert six.mean_output_tokens == pytest.approx(75**0.5 * midnight.mean_output_tokens, rel=0.05)


@pytest.mark.parametrize("name", ["short_short", "long_long"])
def test_the_oracle_of_a_mix_serves_it(name: str) -> None:
    windows = _slo_servegen.length_mixes(day())[name][:18]
    assert _slo_servegen.series_metrics(windows, "oracle", 30.0)["attainment"] >= 0.99


def test_the_oracle_of_a_large_fleet_plans_with_the_usable_part_of_its_capacity() -> None:
    windows = tuple(RateWindow(600.0 * number, 4000.0, 300.0, 50.0) for number in range(6))
    assert _slo_servegen.series_metrics(windows, "oracle", 30.0)["attainment"] >= 0.99


def test_the_oracle_knows_a_burst_that_a_longer_mean_hides() -> None:
    requests = tuple(TraceRequest(4.0, 1000, 10) for _ in range(100))
    trace = Trace(name="burst", requests=(*requests, TraceRequest(19.0, 1000, 10)), block_tokens=64)
    known = _slo_azure.foresight(trace, _slo_azure.foresight_s(_slo_azure.CODE_TRACE))
    assert known(4.0).requests_per_s == 50.0
    assert known(1.9).requests_per_s == known(6.0).requests_per_s == 0.0
    assert known(1e9).requests_per_s == 0.5


def test_an_oracle_that_attains_too_little_stops_the_benchmark() -> None:
    rows = table(measured, names=("oracle", "baton"), cold_starts_s=(30.0,))
    check_oracle(rows, "load", min_attainment=0.98)
    with pytest.raises(
        SystemExit, match=r"load: the oracle attains 0\.98.*expected at least 0\.99"
    ):
        check_oracle(rows, "load", min_attainment=0.99)


def test_a_policy_that_was_not_run_has_no_headline() -> None:
    assert headline(table(measured, names=("oracle",), cold_starts_s=(30.0,)), "load") == {}
    told = headline(table(measured, names=("oracle", "baton"), cold_starts_s=(30.0,)), "load")
    assert "gpu_hours_over_oracle_load" in told
    assert "gpu_hours_over_peak_static_load" not in told


def test_the_fluid_is_checked_with_the_very_same_requests() -> None:
    requests = (TraceRequest(0.5, 100, 10), TraceRequest(0.9, 300, 30), TraceRequest(2.0, 50, 5))
    steps = _slo_check.inflows_of_trace(Trace(name="t", requests=requests), 1.0)
    assert steps == [(2.0, 400.0, 40.0), (0.0, 0.0, 0.0), (1.0, 50.0, 5.0)]


def test_every_static_split_is_tried_on_the_same_number_of_replicas() -> None:
    names = [arm.name for arm in _slo_mix.STATIC]
    assert names == ["static 1P5D", "static 2P4D", "static 3P3D", "static 4P2D", "static 5P1D"]
    assert _slo_mix.BATON.name == "baton 3P3D"
    assert not any(arm.flips_roles for arm in (*_slo_mix.STATIC, *_slo_mix.HYBRID))


def test_every_phase_wants_another_split_and_none_outweighs_the_others() -> None:
    best = {}
    for kind in _slo_mix.LENGTH_MODELS:
        carried = _slo_mix.rates_by_split(kind)
        best[kind] = max(carried, key=carried.__getitem__)
        assert _slo_mix.phase_rate(kind) * _slo_mix.phase_duration_s(kind) == pytest.approx(
            _slo_mix.REQUESTS
        )
    assert best == {"code": 5, "conversation": 4, "reasoning": 2}


def test_requests_count_for_the_phase_in_which_they_came() -> None:
    begins_s = [0.0, _slo_mix.phase_duration_s("code")]
    begins_s.append(begins_s[1] + _slo_mix.phase_duration_s("conversation"))
    outcomes = [_came(at_s) for at_s in (*begins_s, begins_s[2] - 0.001)]
    found = _slo_mix.outcomes_by_phase(outcomes)
    assert [len(part) for part in found.values()] == [1, 2, 1]


def test_runs_of_an_arm_are_counted_together() -> None:
    runs = [
        _slo_mix.PhaseCounts(
            variant=_slo_mix.BATON,
            load=1.0,
            arrived=dict.fromkeys(_slo_mix.LENGTH_MODELS, 100),
            slo_met=dict.fromkeys(_slo_mix.LENGTH_MODELS, good),
            flips=(),
        )
        for good in (90, 100)
    ]
    told = _slo_mix.pool_runs(runs)
    span_s = sum(_slo_mix.phase_duration_s(kind, 1.0) for kind in _slo_mix.LENGTH_MODELS)
    assert told["attainment"] == pytest.approx(0.95)
    assert (told["attainment_least"], told["attainment_most"]) == (0.9, 1.0)
    assert told["goodput_per_s"] == pytest.approx(570 / 2 / span_s)


def _through(loads: Sequence[float]) -> list[tuple[float, float]]:
    """As many in a phase in each second after the first ones."""
    first = int(_slo_overload.WARM_UP_S + _slo_overload._RAMP_UP_S)
    return [
        (first + second, first + second + 1.0)
        for second, load in enumerate(loads)
        for _ in range(round(load))
    ]


def test_a_load_that_comes_and_goes_has_a_rhythm_and_one_by_chance_has_none() -> None:
    seconds = range(22)
    waves = [[100 + 80 * math.sin(second) for second in seconds] for _ in range(3)]
    assert _slo_overload.oscillation_regularity([_through(wave) for wave in waves]) > 0.6
    rng = random.Random(1)
    chance = [[rng.gauss(100, 30) for _ in seconds] for _ in range(5)]
    assert _slo_overload.oscillation_regularity([_through(noise) for noise in chance]) < 0.25


def test_that_requests_stay_for_a_while_is_no_rhythm() -> None:
    rng = random.Random(2)
    runs = []
    for _ in range(5):
        loads = [100.0]
        while len(loads) < 22:
            loads.append(100 + 0.7 * (loads[-1] - 100) + rng.gauss(0, 10))
        runs.append(_through(loads))
    assert _slo_overload.oscillation_regularity(runs) < 0.25


def test_gain_is_measured_against_the_best_static_arm() -> None:
    rows = [{"arm": arm.name, "good": float(arm.prefill)} for arm in _slo_mix.STATIC]
    rows.append({"arm": _slo_mix.BATON.name, "good": 6.0})
    rows.append({"arm": _slo_mix.HYBRID[0].name, "good": 100.0})
    assert _slo_mix.gain_over_static(rows, "good") == pytest.approx(1.2)


def _came(at_s: float) -> Outcome:
    return Outcome(
        arrived_at_s=at_s,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        ttft_s=0.1,
        tpot_s=0.0,
        e2e_s=0.1,
        ok=True,
    )


@pytest.mark.parametrize("rate_per_s", [25.0, 35.0])
def test_a_plateau_at_the_end_of_the_rates_stops_the_benchmark(rate_per_s: float) -> None:
    with pytest.raises(ValueError, match="the best rate is"):
        _slo_overload.check_plateau(rate_per_s, (25.0, 30.0, 35.0))
    _slo_overload.check_plateau(30.0, (25.0, 30.0, 35.0))


def test_committed_plateaus_lie_between_the_rates_that_were_tried() -> None:
    figures = json.loads(slo.RESULTS.read_text())["parts"]["overload"]
    _slo_overload.check_plateau(figures["overload_plateau_rate_per_s"], _slo_overload.RATES_PER_S)
    _slo_overload.check_plateau(
        figures["overload_decode_bound_plateau_rate_per_s"],
        _slo_overload.DECODE_BOUND_RATES_PER_S,
    )
