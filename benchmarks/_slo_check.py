"""The fluid against the detailed simulator: the same half hour on a few replicas."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from baton.perf.hardware.accelerators import Dtype
from baton.policy.placement.port import Disaggregate
from baton.policy.scaling.observation import Demand
from baton.simulator.scenario import Run, simulate
from baton.simulator.workloads import rate_series
from baton.simulator.workloads.rate_series import RateWindow
from baton.simulator.workloads.trace import Trace
from benchmarks import _slo_azure as detailed
from benchmarks import _slo_servegen as fluid
from benchmarks._fluid import FluidRun, flow
from benchmarks._fluid_pools import Inflow
from benchmarks._slo_fleets import ARMS, PREFILL, ROLES, SERVER, bounds, fluid_pools, strength

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


def cut(folder: Path) -> list[RateWindow]:
    """The half hour, scaled down and shortened."""
    whole = [one for one in fluid.read(folder / fluid.M_LARGE) if CUT_S[0] <= one.from_s < CUT_S[1]]
    scale = RATE_PER_S / rate_series.mean_rate(whole)
    return [
        one._replace(from_s=number * WINDOW_S, rate_per_s=one.rate_per_s * scale)
        for number, one in enumerate(whole)
    ]


def trace_of(windows: list[RateWindow]) -> Trace:
    """Requests of it."""
    return rate_series.generated(windows, "m-large, half an hour", random.Random(0))  # noqa: S311


def inflow_of(trace: Trace, width_s: float) -> list[Inflow]:
    """The very same requests, step by step."""
    count = int(trace.requests[-1].at_s // width_s) + 1
    sums = [[0.0, 0.0, 0.0] for _ in range(count)]
    for one in trace.requests:
        step = sums[int(one.at_s // width_s)]
        step[0] += 1
        step[1] += one.prompt_tokens
        step[2] += one.output_tokens
    return [Inflow(*one) for one in sums]


def compare(folder: Path) -> dict[str, object]:
    """Attainment and GPU-hours by both: too few replicas, about enough, more, and scaled."""
    windows = cut(folder)
    trace = trace_of(windows)
    rows = [_row(trace, name, replicas) for name, replicas in _CASES]
    worst = max(abs(float(str(row["error_points"]))) for row in rows)
    return {"fluid_error_points": worst, "rows": rows}


_CASES: tuple[tuple[str, int], ...] = (("static_peak", 2), ("static_peak", 3), ("baton", 2))
"""Who scales, and with how many replicas that prefill it begins; two decode."""


def _row(trace: Trace, name: str, prefill: int) -> dict[str, object]:
    start = {pool: prefill if pool == PREFILL else 2 for pool in ROLES}
    known, counted = by_fluid(trace, name, start), by_requests(trace, name, start)
    good = sum(one.good for one in counted.outcomes) / len(counted.outcomes)
    return {
        "policy": name,
        "starts_with": prefill,
        "fluid_attainment": known.attainment,
        "detailed_attainment": good,
        "error_points": 100 * (known.attainment - good),
        "fluid_gpu_hours": known.story.gpu_hours,
        "detailed_gpu_hours": counted.story.gpu_hours,
    }


def by_fluid(trace: Trace, name: str, start: dict[str, int]) -> FluidRun:
    """The cheap way."""
    prompts, outputs = detailed.mean_lengths(trace)
    settings = detailed.engines("H100", Dtype.FP8, COLD_START_S)[PREFILL]
    one = strength(settings, SERVER, prompt_tokens=prompts, output_tokens=outputs)
    pools = fluid_pools(start, one, cold_start_s=COLD_START_S, drain_s=_DRAIN_S)
    scaler = ARMS[name].scaler(
        bounds(start, dict.fromkeys(ROLES, 12)),
        lambda _: Demand(),
        interval_s=INTERVAL_S,
        every_s=10.0,
    )
    options = replace(fluid.OPTIONS, step_s=_WIDTH_S, interval_s=INTERVAL_S)
    return flow(inflow_of(trace, _WIDTH_S), pools, scaler, options)


def by_requests(trace: Trace, name: str, start: dict[str, int]) -> Run:
    """The dear way; pools are walls, as a fluid takes them to be."""
    scene = detailed.scenario(
        detailed.engines("H100", Dtype.FP8, COLD_START_S),
        start,
        SERVER,
        split=Disaggregate.ALWAYS,
        autoscaler=lambda: ARMS[name].scaler(
            bounds(start, dict.fromkeys(ROLES, 12)),
            lambda _: Demand(),
            interval_s=INTERVAL_S,
            every_s=10.0,
        ),
    )
    return simulate(replace(scene, scaling_interval_s=INTERVAL_S), trace, until_s=trace.span_s)
