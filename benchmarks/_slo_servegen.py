"""Two weeks of ServeGen's rates under every autoscaler, as a fluid."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from baton.perf.hardware.accelerators import Dtype
from baton.policy.scaling.observation import Demand
from baton.simulator.workloads import rate_series
from baton.simulator.workloads.rate_series import RateWindow
from benchmarks._fluid import FluidOptions, FluidRun, flow, inflows
from benchmarks._fluid_pools import Inflow
from benchmarks._slo_fleets import (
    DECODE,
    PREFILL,
    SERVER_SLO,
    VARIANTS,
    ReplicaCapacity,
    engine_settings,
    fluid_pools,
    needed_replicas,
    pool_bounds,
    replica_capacity,
)
from benchmarks._slo_table import scaling_metrics

M_LARGE = Path("traces/servegen/m-large_rate_600s.csv")
M_MID = Path("traces/servegen/m-mid_rate_600s.csv")
"""Nine times the requests, a third as long: it was not used while the policy was made."""
INTERVAL_S = 30.0
_ORACLE_INTERVAL_S = 30.0
"""It loses nothing by looking more rarely."""
OPTIONS = FluidOptions(step_s=2.0, interval_s=INTERVAL_S, slo=SERVER_SLO)
_FORESIGHT_S = 60.0
"""The oracle knows the mean demand of each minute to come, not each request."""
_DRAIN_S = {PREFILL: 2.0, DECODE: 15.0}
"""A stream of 155 tokens takes 8 s where there are as many as may be; longer ones take more."""


def read_windows(file: Path) -> Sequence[RateWindow]:
    """The series."""
    with file.open() as lines:
        return rate_series.read(lines, file.stem)[0]


def mean_lengths(windows: Sequence[RateWindow]) -> tuple[float, float]:
    """Prompt and output tokens of a request, on average."""
    rates = [window.rate_per_s for window in windows]
    prompts = sum(window.rate_per_s * window.mean_prompt_tokens for window in windows) / sum(rates)
    outputs = sum(window.rate_per_s * window.mean_output_tokens for window in windows) / sum(rates)
    return prompts, outputs


def peak_demand(windows: Sequence[RateWindow]) -> Demand:
    """The most prompt tokens and the most output tokens a second of any window, together."""
    return Demand(
        prompt_tokens_per_s=max(
            window.rate_per_s * window.mean_prompt_tokens for window in windows
        ),
        output_tokens_per_s=max(
            window.rate_per_s * window.mean_output_tokens for window in windows
        ),
    )


def foresight(inflows_by_step: Sequence[Inflow], step_s: float) -> list[Demand]:
    """The demand of each minute to come."""
    width = round(_FORESIGHT_S / step_s)
    demands = []
    for first in range(0, len(inflows_by_step), width):
        part = inflows_by_step[first : first + width]
        seconds = len(part) * step_s
        demands.append(demand_of(part, seconds))
    return demands


def demand_of(minute_inflows: Sequence[Inflow], seconds: float) -> Demand:
    """What arrives, per second."""
    requests = max(1e-9, sum(minute_inflow.requests for minute_inflow in minute_inflows))
    prompts = sum(minute_inflow.prompt_tokens for minute_inflow in minute_inflows)
    outputs = sum(minute_inflow.output_tokens for minute_inflow in minute_inflows)
    return Demand(
        requests_per_s=requests / seconds,
        prompt_tokens_per_s=prompts / seconds,
        output_tokens_per_s=outputs / seconds,
        mean_prompt_tokens=prompts / requests,
        mean_uncached_tokens=prompts / requests,
        mean_output_tokens=outputs / requests,
    )


@lru_cache(maxsize=1)
def _prepare(file: Path) -> tuple[list[Inflow], list[Demand], ReplicaCapacity, Demand]:
    windows = read_windows(file)
    inflows_by_step = inflows(windows, OPTIONS, random.Random(0))  # noqa: S311 - a load
    prompts, outputs = mean_lengths(windows)
    settings = engine_settings("H100", Dtype.FP8, max_batched_tokens=8192, cold_start_s=60.0)
    capacity = replica_capacity(settings, SERVER_SLO, prompt_tokens=prompts, output_tokens=outputs)
    return (
        inflows_by_step,
        foresight(inflows_by_step, OPTIONS.step_s),
        capacity,
        peak_demand(windows),
    )


def run(file: Path, name: str, cold_start_s: float) -> FluidRun:
    """One policy on a series, with one cold start."""
    inflows_by_step, demands, capacity, peak = _prepare(file)
    at_peak = needed_replicas(peak, capacity, SERVER_SLO)
    start = at_peak if name == "static_peak" else needed_replicas(demands[0], capacity, SERVER_SLO)
    limits = pool_bounds(start, {pool: 2 * count for pool, count in at_peak.items()})
    pools = fluid_pools(start, capacity, cold_start_s=cold_start_s, drain_s=_DRAIN_S)

    def demand_at(at_s: float) -> Demand:
        return demands[min(len(demands) - 1, max(0, int(at_s // _FORESIGHT_S)))]

    interval_s = _ORACLE_INTERVAL_S if name == "oracle" else INTERVAL_S
    scaler = VARIANTS[name].make_autoscaler(
        limits, demand_at, interval_s=interval_s, every_s=_FORESIGHT_S
    )
    return flow(inflows_by_step, pools, scaler, replace(OPTIONS, interval_s=interval_s))


def compute_metrics(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run comes to."""
    result = run(file, name, cold_start_s)
    return scaling_metrics(result.scaling, result.attainment)
