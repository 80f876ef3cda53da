"""Azure's traces as a fluid: the same table as request by request, in seconds."""

from __future__ import annotations

from pathlib import Path

from baton.policy.scaling.observation import Demand
from benchmarks import _slo_azure as detailed
from benchmarks._fluid import FluidOptions, FluidRun, flow
from benchmarks._slo_check import inflow_of
from benchmarks._slo_fleets import ARMS, BURSTS, ROLES, fluid_pools
from benchmarks._slo_table import figures_of

_STEP_S = 0.5
_DRAIN_S = dict.fromkeys(ROLES, 3.0)
"""A stream has 28 tokens."""


def run(file: Path, name: str, cold_start_s: float) -> FluidRun:
    """One policy on a trace, with one cold start, with the fleet of the detailed run."""
    trace, ahead, one = detailed.prepared(file)
    start, limits = detailed.sizes(name, ahead, one)
    pools = fluid_pools(start, one, cold_start_s=cold_start_s, drain_s=_DRAIN_S)

    def known(at_s: float) -> Demand:
        return detailed.foreseen(ahead, at_s)

    scaler = ARMS[name].scaler(
        limits, known, interval_s=detailed.INTERVAL_S, every_s=detailed.FORESIGHT_S
    )
    options = FluidOptions(step_s=_STEP_S, interval_s=detailed.INTERVAL_S, slo=BURSTS)
    return flow(inflow_of(trace, _STEP_S), pools, scaler, options)


def figures(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run comes to."""
    made = run(file, name, cold_start_s)
    return figures_of(made.story, made.attainment)
