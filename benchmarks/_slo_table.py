"""Every autoscaler with every cold start on one load, and what they come to beside the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import fmean

from baton.simulator.fleet.scaling_log import ScalingReport
from benchmarks._slo_fleets import COLD_STARTS_S, VARIANTS, print_progress

ORACLE, BATON, PEAK = "oracle", "baton", "static_peak"
_PROCESSES = 2

Row = Mapping[str, float | str]
Measure = Callable[[str, float], Mapping[str, float]]
"""What one policy comes to with one cold start."""


def scaling_metrics(scaling: ScalingReport, attainment: float) -> dict[str, float]:
    """What one run comes to."""
    return {
        "attainment": attainment,
        "gpu_hours": scaling.gpu_hours,
        "actions_per_hour": scaling.actions_per_hour,
        "reversals_per_hour": scaling.reversals_per_hour,
        "held_ticks": float(scaling.paused_ticks),
        "ticks": float(scaling.ticks),
    }


def table(
    measure: Measure,
    *,
    names: Sequence[str] = tuple(VARIANTS),
    cold_starts_s: Sequence[float] = COLD_STARTS_S,
) -> list[Row]:
    """A row for each policy and cold start. A policy that never starts a replica is run once."""
    policies = [name for name in names if name in VARIANTS]
    jobs = [
        (name, cold_s)
        for cold_s in cold_starts_s
        for name in policies
        if name != PEAK or cold_s == cold_starts_s[0]
    ]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("fork")) as pool:
        metrics_by_job = {}
        for job, metrics in zip(jobs, pool.map(partial(_measure_job, measure), jobs), strict=True):
            metrics_by_job[job] = metrics
            print_progress(f"{job[0]}, cold start {job[1]:.0f} s: {_format_metrics(metrics)}")
    for cold_s in cold_starts_s if PEAK in policies else ():
        metrics_by_job.setdefault((PEAK, cold_s), metrics_by_job[PEAK, cold_starts_s[0]])
    return [_row(metrics_by_job, name, cold_s) for cold_s in cold_starts_s for name in policies]


def headline(rows: Sequence[Row], load: str) -> dict[str, float]:
    """Ours: means over the cold starts, and the worst of them; none where ours was not run."""
    baton_rows = [row for row in rows if row["policy"] == BATON]
    if not baton_rows:
        return {}
    attainments = [float(row["attainment"]) for row in baton_rows]
    ratios_to_oracle = [float(row["over_oracle"]) for row in baton_rows if "over_oracle" in row]
    ratios_to_peak = [
        float(row["over_peak_static"]) for row in baton_rows if "over_peak_static" in row
    ]
    reversals = [float(row["reversals_per_hour"]) for row in baton_rows]
    figures = {
        f"attainment_{load}": fmean(attainments),
        f"attainment_{load}_worst": min(attainments),
        f"reversals_per_hour_{load}": fmean(reversals),
        f"reversals_per_hour_{load}_worst": max(reversals),
    }
    if ratios_to_oracle:
        figures[f"gpu_hours_over_oracle_{load}"] = fmean(ratios_to_oracle)
        figures[f"gpu_hours_over_oracle_{load}_worst"] = max(ratios_to_oracle)
    if ratios_to_peak:
        figures[f"gpu_hours_over_peak_static_{load}"] = fmean(ratios_to_peak)
    return figures


def check_oracle(rows: Sequence[Row], load: str, *, min_attainment: float) -> None:
    """See that the oracle, which knows the demand, is no worse than this.

    Raises:
        SystemExit: it is, so that a comparison with it says nothing.
    """
    for row in rows:
        if row["policy"] == ORACLE and float(row["attainment"]) < min_attainment:
            raise SystemExit(
                f"{load}: the oracle attains {float(row['attainment']):.4f} with a cold start of"
                f" {float(row['cold_start_s']):.0f} s, expected at least {min_attainment}: what"
                " limits the fleet is not in the capacity that it plans with; correct"
                " baton.perf.capacity or benchmarks/_fluid_pools.py"
            )


def _measure_job(measure: Measure, job: tuple[str, float]) -> dict[str, float]:
    return dict(measure(*job))


def _row(
    metrics_by_job: Mapping[tuple[str, float], Mapping[str, float]], name: str, cold_s: float
) -> dict[str, float | str]:
    """One policy's figures, and its GPU-hours beside those of who knew, and of a fixed fleet."""
    figures = metrics_by_job[name, cold_s]
    row: dict[str, float | str] = {"policy": name, "cold_start_s": cold_s, **figures}
    for key, other in (("over_oracle", ORACLE), ("over_peak_static", PEAK)):
        if (other, cold_s) in metrics_by_job:
            row[key] = figures["gpu_hours"] / metrics_by_job[other, cold_s]["gpu_hours"]
    return row


def _format_metrics(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
