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
    ARMS,
    DECODE,
    PREFILL,
    SERVER,
    Strength,
    bounds,
    engine,
    fluid_pools,
    needed,
    strength,
)
from benchmarks._slo_table import figures_of

M_LARGE = Path("traces/servegen/m-large_rate_600s.csv")
M_MID = Path("traces/servegen/m-mid_rate_600s.csv")
"""Nine times the requests, a third as long: nobody looked at it while the policy was made."""
INTERVAL_S = 30.0
_ORACLE_INTERVAL_S = 30.0
"""It loses nothing by looking more rarely."""
OPTIONS = FluidOptions(step_s=2.0, interval_s=INTERVAL_S, slo=SERVER)
_FORESIGHT_S = 60.0
"""The oracle knows the mean demand of each minute to come, not each request."""
_DRAIN_S = {PREFILL: 2.0, DECODE: 15.0}
"""A stream of 155 tokens takes 8 s where there are as many as may be; longer ones take more."""


def read(file: Path) -> Sequence[RateWindow]:
    """The series."""
    with file.open() as lines:
        return rate_series.read(lines, file.stem)[0]


def means(windows: Sequence[RateWindow]) -> tuple[float, float]:
    """Prompt and output tokens of a request, on average."""
    rates = [one.rate_per_s for one in windows]
    prompts = sum(one.rate_per_s * one.mean_prompt_tokens for one in windows) / sum(rates)
    outputs = sum(one.rate_per_s * one.mean_output_tokens for one in windows) / sum(rates)
    return prompts, outputs


def peak(windows: Sequence[RateWindow]) -> Demand:
    """The most prompt tokens and the most output tokens a second of any window, together."""
    return Demand(
        prompt_tokens_per_s=max(one.rate_per_s * one.mean_prompt_tokens for one in windows),
        output_tokens_per_s=max(one.rate_per_s * one.mean_output_tokens for one in windows),
    )


def foresight(arriving: Sequence[Inflow], step_s: float) -> list[Demand]:
    """The demand of each minute to come."""
    width = round(_FORESIGHT_S / step_s)
    found = []
    for first in range(0, len(arriving), width):
        part = arriving[first : first + width]
        seconds = len(part) * step_s
        found.append(demand_of(part, seconds))
    return found


def demand_of(part: Sequence[Inflow], seconds: float) -> Demand:
    """What arrives, per second."""
    requests = max(1e-9, sum(one.requests for one in part))
    prompts = sum(one.prompt_tokens for one in part)
    outputs = sum(one.output_tokens for one in part)
    return Demand(
        requests_per_s=requests / seconds,
        prompt_tokens_per_s=prompts / seconds,
        output_tokens_per_s=outputs / seconds,
        mean_prompt_tokens=prompts / requests,
        mean_uncached_tokens=prompts / requests,
        mean_output_tokens=outputs / requests,
    )


@lru_cache(maxsize=1)
def _prepared(file: Path) -> tuple[list[Inflow], list[Demand], Strength, Demand]:
    windows = read(file)
    arriving = inflows(windows, OPTIONS, random.Random(0))  # noqa: S311 - a load
    prompts, outputs = means(windows)
    settings = engine("H100", Dtype.FP8, budget=8192, cold_start_s=60.0)
    one = strength(settings, SERVER, prompt_tokens=prompts, output_tokens=outputs)
    return arriving, foresight(arriving, OPTIONS.step_s), one, peak(windows)


def run(file: Path, name: str, cold_start_s: float) -> FluidRun:
    """One policy on a series, with one cold start."""
    arriving, ahead, one, most = _prepared(file)
    at_peak = needed(most, one, SERVER)
    start = at_peak if name == "static_peak" else needed(ahead[0], one, SERVER)
    limits = bounds(start, {pool: 2 * count for pool, count in at_peak.items()})
    pools = fluid_pools(start, one, cold_start_s=cold_start_s, drain_s=_DRAIN_S)

    def known(at_s: float) -> Demand:
        return ahead[min(len(ahead) - 1, max(0, int(at_s // _FORESIGHT_S)))]

    interval_s = _ORACLE_INTERVAL_S if name == "oracle" else INTERVAL_S
    scaler = ARMS[name].scaler(limits, known, interval_s=interval_s, every_s=_FORESIGHT_S)
    return flow(arriving, pools, scaler, replace(OPTIONS, interval_s=interval_s))


def figures(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run comes to."""
    made = run(file, name, cold_start_s)
    return figures_of(made.story, made.attainment)
