"""Every autoscaler with every cold start on one load, and what they come to beside the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import fmean

from baton.simulator.fleet.scaling_log import Story
from benchmarks._slo_fleets import ARMS, COLD_STARTS_S, say

ORACLE, OURS, PEAK = "oracle", "baton", "static_peak"
_PROCESSES = 2

Row = Mapping[str, float | str]
Measure = Callable[[str, float], Mapping[str, float]]
"""What one policy comes to with one cold start."""


def figures_of(story: Story, attainment: float) -> dict[str, float]:
    """What one run comes to."""
    return {
        "attainment": attainment,
        "gpu_hours": story.gpu_hours,
        "actions_per_hour": story.actions_per_hour,
        "reversals_per_hour": story.reversals_per_hour,
        "held_ticks": float(story.held),
        "ticks": float(story.ticks),
    }


def table(
    measure: Measure,
    *,
    names: Sequence[str] = tuple(ARMS),
    cold_starts_s: Sequence[float] = COLD_STARTS_S,
) -> list[Row]:
    """A row for each policy and cold start. Who never starts anything is run once."""
    wanted = [name for name in names if name in ARMS]
    jobs = [
        (name, cold_s)
        for cold_s in cold_starts_s
        for name in wanted
        if name != PEAK or cold_s == cold_starts_s[0]
    ]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("fork")) as pool:
        found = {}
        for job, made in zip(jobs, pool.map(partial(_measured, measure), jobs), strict=True):
            found[job] = made
            say(f"{job[0]}, cold start {job[1]:.0f} s: {_in_a_line(made)}")
    for cold_s in cold_starts_s if PEAK in wanted else ():
        found.setdefault((PEAK, cold_s), found[PEAK, cold_starts_s[0]])
    return [_row(found, name, cold_s) for cold_s in cold_starts_s for name in wanted]


def headline(rows: Sequence[Row], load: str) -> dict[str, float]:
    """Ours: means over the cold starts, and the worst of them."""
    ours = [row for row in rows if row["policy"] == OURS]
    attained = [float(row["attainment"]) for row in ours]
    over = [float(row["over_oracle"]) for row in ours if "over_oracle" in row]
    peak = [float(row["over_peak_static"]) for row in ours if "over_peak_static" in row]
    undone = [float(row["reversals_per_hour"]) for row in ours]
    return {
        f"attainment_{load}": fmean(attained),
        f"attainment_{load}_worst": min(attained),
        f"gpu_hours_over_oracle_{load}": fmean(over),
        f"gpu_hours_over_oracle_{load}_worst": max(over),
        f"gpu_hours_over_peak_static_{load}": fmean(peak),
        f"reversals_per_hour_{load}": fmean(undone),
        f"reversals_per_hour_{load}_worst": max(undone),
    }


def _measured(measure: Measure, job: tuple[str, float]) -> dict[str, float]:
    return dict(measure(*job))


def _row(
    found: Mapping[tuple[str, float], Mapping[str, float]], name: str, cold_s: float
) -> dict[str, float | str]:
    """One policy's figures, and its GPU-hours beside those of who knew, and of a fixed fleet."""
    figures = found[name, cold_s]
    row: dict[str, float | str] = {"policy": name, "cold_start_s": cold_s, **figures}
    for key, other in (("over_oracle", ORACLE), ("over_peak_static", PEAK)):
        if (other, cold_s) in found:
            row[key] = figures["gpu_hours"] / found[other, cold_s]["gpu_hours"]
    return row


def _in_a_line(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
