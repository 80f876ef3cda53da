"""Azure's traces as a fluid: the same table as request by request, in seconds."""

from __future__ import annotations

from pathlib import Path

from benchmarks import _slo_azure as detailed
from benchmarks._fluid import FluidOptions, FluidRun, flow
from benchmarks._slo_check import inflows_of_trace
from benchmarks._slo_fleets import ROLES, VARIANTS, fluid_pools
from benchmarks._slo_servegen import usable_capacity
from benchmarks._slo_table import scaling_metrics

_STEP_S = 0.5
_DRAIN_S = dict.fromkeys(ROLES, 3.0)
"""A stream has 28 tokens."""


def run(file: Path, name: str, cold_start_s: float) -> FluidRun:
    """One policy on a trace, with one cold start, with the fleet of the detailed run."""
    trace, demands, capacity = detailed.prepare(file)
    start, limits = detailed.initial_sizes(name, demands, capacity, cold_start_s)
    every_s = detailed.foresight_s(file)
    usable = usable_capacity(capacity.fluid)
    pools = fluid_pools(start, capacity, cold_start_s=cold_start_s, drain_s=_DRAIN_S)

    scaler = VARIANTS[name].make_autoscaler(
        limits,
        detailed.foresight(trace, every_s),
        interval_s=detailed.INTERVAL_S,
        every_s=every_s,
        capacity_at=lambda _: usable,
    )
    options = FluidOptions(
        step_s=_STEP_S, interval_s=detailed.INTERVAL_S, slo=detailed.planned_slo(file, name)
    )
    return flow(inflows_of_trace(trace, _STEP_S), pools, scaler, options)


def compute_metrics(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run comes to."""
    result = run(file, name, cold_start_s)
    return scaling_metrics(result.scaling, result.attainment)
