"""ServeGen's rates under every autoscaler, as a fluid: as they are, and with other lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from baton.perf.hardware.accelerators import Dtype
from baton.policy.scaling.observation import Demand
from baton.simulator.workloads import rate_series
from baton.simulator.workloads.rate_series import RateWindow
from benchmarks._fluid import FluidOptions, FluidRun, flow, inflows, rates_at
from benchmarks._fluid_pools import FluidCapacity, Inflow
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
OPTIONS = FluidOptions(step_s=2.0, interval_s=INTERVAL_S, slo=SERVER_SLO)
_FORESIGHT_S = 60.0
"""The oracle knows the mean demand of each minute to come, not each request."""
_LENGTH_STEP = 1.02
"""Between two lengths for which capacities are worked out."""
_DRAIN_S = {PREFILL: 2.0, DECODE: 15.0}
"""A stream of 155 tokens takes 8 s where there are as many as may be; longer ones take more."""


def read_windows(file: Path) -> tuple[RateWindow, ...]:
    """The series."""
    with file.open() as lines:
        return rate_series.read(lines, file.stem)[0]


class LengthMix(NamedTuple):
    """Mean rate and mean lengths of requests."""

    rate_per_s: float
    prompt_tokens: float
    output_tokens: float


_SHORT_SHORT = LengthMix(800.0, 140.0, 20.0)
_LONG_LONG = LengthMix(20.0, 6_000.0, 1_500.0)
LENGTH_MIXES = {
    "short_short": _SHORT_SHORT,
    "long_short": LengthMix(60.0, 6_000.0, 50.0),
    "short_long": LengthMix(15.0, 200.0, 1_500.0),
    "long_long": _LONG_LONG,
}
"""Prompts, then outputs: a label, a retrieval, a reasoning and an agent's load. Fleets have from 4
to 30 replicas."""
DRIFTING = "drifting"
_DAY_S = 86_400.0
_MIX_DAYS = 3


def length_mixes(windows: Sequence[RateWindow]) -> dict[str, tuple[RateWindow, ...]]:
    """The first days of a series, at the rates and lengths of each mix, and drifting between two.

    Rates and lengths vary about their means as the series' own do. Those that drift go from the
    shortest mix at midnight to the longest at noon, each by a factor that is the same every hour.
    """
    days = [window for window in windows if window.from_s < windows[0].from_s + _MIX_DAYS * _DAY_S]
    mean = _mean_mix(days)
    mixes = {
        name: tuple(_scaled(window, mean, mix) for window in days)
        for name, mix in LENGTH_MIXES.items()
    }
    mixes[DRIFTING] = tuple(_scaled(window, mean, _drifted(window.from_s)) for window in days)
    return mixes


def _mean_mix(windows: Sequence[RateWindow]) -> LengthMix:
    """Means of windows of equal length."""
    total = sum(window.rate_per_s for window in windows)
    prompts = sum(window.rate_per_s * window.mean_prompt_tokens for window in windows)
    outputs = sum(window.rate_per_s * window.mean_output_tokens for window in windows)
    return LengthMix(total / len(windows), prompts / total, outputs / total)


def _scaled(window: RateWindow, mean: LengthMix, mix: LengthMix) -> RateWindow:
    return RateWindow(
        window.from_s,
        window.rate_per_s * mix.rate_per_s / mean.rate_per_s,
        max(1.0, window.mean_prompt_tokens * mix.prompt_tokens / mean.prompt_tokens),
        max(1.0, window.mean_output_tokens * mix.output_tokens / mean.output_tokens),
    )


def _drifted(at_s: float) -> LengthMix:
    """Between the shortest mix, at midnight, and the longest, at noon."""
    from_noon = abs(at_s % _DAY_S / _DAY_S - 0.5) * 2
    return LengthMix(
        *(
            long * (short / long) ** from_noon
            for short, long in zip(_SHORT_SHORT, _LONG_LONG, strict=True)
        )
    )


def demand_of_window(window: RateWindow) -> Demand:
    """The mean demand of a window."""
    return Demand(
        requests_per_s=window.rate_per_s,
        prompt_tokens_per_s=window.rate_per_s * window.mean_prompt_tokens,
        output_tokens_per_s=window.rate_per_s * window.mean_output_tokens,
        mean_prompt_tokens=window.mean_prompt_tokens,
        mean_uncached_tokens=window.mean_prompt_tokens,
        mean_output_tokens=window.mean_output_tokens,
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


def replicas_for_peak(windows: Sequence[RateWindow]) -> dict[str, int]:
    """Of each pool, as many as the window needs that needs most of it."""
    needs = [
        needed_replicas(demand_of_window(window), capacity_for(window), SERVER_SLO)
        for window in windows
    ]
    return {pool: max(need[pool] for need in needs) for pool in (PREFILL, DECODE)}


def capacity_for(window: RateWindow) -> ReplicaCapacity:
    """Of a replica for requests of a window's lengths, to a few percent."""
    return _capacity(_rounded(window.mean_prompt_tokens), _rounded(window.mean_output_tokens))


def _rounded(tokens: float) -> float:
    """To a power of `_LENGTH_STEP`, so that capacities are few."""
    return _LENGTH_STEP ** round(math.log(tokens, _LENGTH_STEP))


@lru_cache(maxsize=10_000)
def _capacity(prompt_tokens: float, output_tokens: float) -> ReplicaCapacity:
    settings = engine_settings("H100", Dtype.FP8, max_batched_tokens=8192, cold_start_s=60.0)
    return replica_capacity(
        settings, SERVER_SLO, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


def usable_capacity(capacity: FluidCapacity) -> FluidCapacity:
    """The part of a replica's capacity that the fluid serves; the oracle plans with no more."""
    usable = OPTIONS.usable_fraction
    return capacity._replace(
        prefill_tokens_per_s=usable * capacity.prefill_tokens_per_s,
        decode_tokens_per_s=usable * capacity.decode_tokens_per_s,
        max_streams=usable * capacity.max_streams,
    )


class _Load(NamedTuple):
    """A series as all policies get it."""

    inflows_by_step: Sequence[Inflow]
    demands: Sequence[Demand]
    """Of each minute."""
    capacities: Sequence[ReplicaCapacity]
    """Of a replica, for the requests of each minute."""
    at_peak: Mapping[str, int]


@lru_cache(maxsize=1)
def _prepare(windows: tuple[RateWindow, ...]) -> _Load:
    inflows_by_step = inflows(windows, OPTIONS, random.Random(0))  # noqa: S311 - a load
    demands = foresight(inflows_by_step, OPTIONS.step_s)
    middles_s = [(minute + 0.5) * _FORESIGHT_S for minute in range(len(demands))]
    return _Load(
        inflows_by_step,
        demands,
        [capacity_for(window) for window in rates_at(windows, middles_s)],
        replicas_for_peak(windows),
    )


def run(windows: tuple[RateWindow, ...], name: str, cold_start_s: float) -> FluidRun:
    """One policy on a series, with one cold start."""
    load = _prepare(windows)
    first = load.capacities[0]
    initial = needed_replicas(load.demands[0], first, SERVER_SLO)
    start = load.at_peak if name == "static_peak" else initial
    limits = pool_bounds(start, {pool: 2 * count for pool, count in load.at_peak.items()})
    pools = fluid_pools(start, first, cold_start_s=cold_start_s, drain_s=_DRAIN_S)

    def minute(at_s: float) -> int:
        return min(len(load.demands) - 1, max(0, int(at_s // _FORESIGHT_S)))

    def capacity_at(at_s: float) -> FluidCapacity:
        return load.capacities[minute(at_s)].fluid

    scaler = VARIANTS[name].make_autoscaler(
        limits,
        lambda at_s: load.demands[minute(at_s)],
        interval_s=INTERVAL_S,
        every_s=_FORESIGHT_S,
        capacity_at=lambda at_s: usable_capacity(capacity_at(at_s)),
    )
    return flow(load.inflows_by_step, pools, scaler, OPTIONS, capacity_at=capacity_at)


def compute_metrics(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run on a file's series comes to."""
    return series_metrics(_windows_of(file), name, cold_start_s)


_windows_of = lru_cache(maxsize=1)(read_windows)


def series_metrics(
    windows: tuple[RateWindow, ...], name: str, cold_start_s: float
) -> dict[str, float]:
    """What one run comes to."""
    result = run(windows, name, cold_start_s)
    return scaling_metrics(result.scaling, result.attainment)
