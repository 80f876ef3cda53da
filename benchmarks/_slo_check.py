"""The fluid against the detailed simulator: the same half hour on a few replicas."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from baton.perf.hardware.accelerators import Dtype
from baton.policy.placement.port import Disaggregate
from baton.policy.scaling.observation import Demand
from baton.simulator.scenario import SimulationResult, simulate
from baton.simulator.workloads import rate_series
from baton.simulator.workloads.rate_series import RateWindow
from baton.simulator.workloads.trace import Trace
from benchmarks import _slo_azure as detailed
from benchmarks import _slo_servegen as fluid
from benchmarks._fluid import FluidRun, flow
from benchmarks._fluid_pools import Inflow
from benchmarks._slo_fleets import (
    PREFILL,
    ROLES,
    SERVER_SLO,
    VARIANTS,
    fluid_pools,
    pool_bounds,
    replica_capacity,
)

CUT_S = (78_000.0, 79_800.0)
"""Of the series: the rate falls by a fifth and then rises by half."""
WINDOW_S = 150.0
"""How long each of its three windows takes here: all of it would take many minutes in detail."""
RATE_PER_S = 40.0
"""On average: as much as about two replicas that prefill can do."""
COLD_START_S = 60.0
INTERVAL_S = 5.0
_WIDTH_S = 1.0
_DRAIN_S = dict.fromkeys(ROLES, 10.0)


def cut_windows(folder: Path) -> list[RateWindow]:
    """The half hour, scaled down and shortened."""
    windows = [
        window
        for window in fluid.read_windows(folder / fluid.M_LARGE)
        if CUT_S[0] <= window.from_s < CUT_S[1]
    ]
    scale = RATE_PER_S / rate_series.mean_rate_per_s(windows)
    return [
        window._replace(from_s=number * WINDOW_S, rate_per_s=window.rate_per_s * scale)
        for number, window in enumerate(windows)
    ]


def generate_trace(windows: list[RateWindow]) -> Trace:
    """Requests of it."""
    return rate_series.generate(windows, "m-large, half an hour", random.Random(0))  # noqa: S311


def inflows_of_trace(trace: Trace, width_s: float) -> list[Inflow]:
    """The very same requests, step by step."""
    count = int(trace.requests[-1].at_s // width_s) + 1
    sums = [[0.0, 0.0, 0.0] for _ in range(count)]
    for request in trace.requests:
        step = sums[int(request.at_s // width_s)]
        step[0] += 1
        step[1] += request.prompt_tokens
        step[2] += request.output_tokens
    return [Inflow(*total) for total in sums]


def compare(folder: Path) -> dict[str, object]:
    """Attainment and GPU-hours by both: too few replicas, about enough, more, and scaled."""
    windows = cut_windows(folder)
    trace = generate_trace(windows)
    rows = [_compare_case(trace, name, replicas) for name, replicas in _CASES]
    worst = max(abs(float(str(row["error_points"]))) for row in rows)
    return {"fluid_error_points": worst, "rows": rows}


_CASES: tuple[tuple[str, int], ...] = (("static_peak", 2), ("static_peak", 3), ("baton", 2))
"""The autoscaler, and its initial prefill replicas; two decode."""


def _compare_case(trace: Trace, name: str, prefill: int) -> dict[str, object]:
    start = {pool: prefill if pool == PREFILL else 2 for pool in ROLES}
    fluid_result, detailed_result = (
        run_fluid_model(trace, name, start),
        run_detailed(trace, name, start),
    )
    detailed_attainment = sum(outcome.slo_met for outcome in detailed_result.outcomes) / len(
        detailed_result.outcomes
    )
    return {
        "policy": name,
        "starts_with": prefill,
        "fluid_attainment": fluid_result.attainment,
        "detailed_attainment": detailed_attainment,
        "error_points": 100 * (fluid_result.attainment - detailed_attainment),
        "fluid_gpu_hours": fluid_result.scaling.gpu_hours,
        "detailed_gpu_hours": detailed_result.scaling.gpu_hours,
    }


def run_fluid_model(trace: Trace, name: str, start: dict[str, int]) -> FluidRun:
    """The cheap way."""
    prompts, outputs = detailed.mean_lengths(trace)
    settings = detailed.engine_settings_by_pool("H100", Dtype.FP8, COLD_START_S)[PREFILL]
    capacity = replica_capacity(settings, SERVER_SLO, prompt_tokens=prompts, output_tokens=outputs)
    pools = fluid_pools(start, capacity, cold_start_s=COLD_START_S, drain_s=_DRAIN_S)
    scaler = VARIANTS[name].make_autoscaler(
        pool_bounds(start, dict.fromkeys(ROLES, 12)),
        lambda _: Demand(),
        interval_s=INTERVAL_S,
        every_s=10.0,
    )
    options = replace(fluid.OPTIONS, step_s=_WIDTH_S, interval_s=INTERVAL_S)
    return flow(inflows_of_trace(trace, _WIDTH_S), pools, scaler, options)


def run_detailed(trace: Trace, name: str, start: dict[str, int]) -> SimulationResult:
    """The dear way; pools are walls, as a fluid takes them to be."""
    scenario = detailed.scenario(
        detailed.engine_settings_by_pool("H100", Dtype.FP8, COLD_START_S),
        start,
        SERVER_SLO,
        disaggregate=Disaggregate.ALWAYS,
        autoscaler=lambda: VARIANTS[name].make_autoscaler(
            pool_bounds(start, dict.fromkeys(ROLES, 12)),
            lambda _: Demand(),
            interval_s=INTERVAL_S,
            every_s=10.0,
        ),
    )
    return simulate(replace(scenario, scaling_interval_s=INTERVAL_S), trace, until_s=trace.span_s)
