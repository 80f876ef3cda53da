"""Fits on measured rows of one GPU, predicts another's, and prints how far off that is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from baton.bench.accuracy.accuracy import (
    SATURATED_TTFT_S,
    Judged,
    Judgement,
    calibrated,
    judge,
    unfit,
)
from baton.bench.accuracy.measurements import MeasuredRow, read_rows
from baton.bench.accuracy.recipes import recipe_of
from baton.perf.fitting.calibration import Error, Kind

FIT = Path("perf/silicon/h100_dense.csv")
CHECK = Path("perf/silicon/h200_dense_check.csv")


def figures(data_dir: Path) -> dict[str, float]:
    """The headline errors (S: simulated, against M: measured), and the tables printed.

    Raises:
        OSError: the data are not there.
    """
    fitted = _rows(data_dir / FIT)
    calibrations = calibrated(fitted)
    for why, count in Counter(why for row in fitted if (why := _kind(row))).items():
        print(f"not fitted to: {count} rows of {len(fitted)}: {why}")
    for engine, calibration in sorted(calibrations.items()):
        ttft, tpot = (calibration.error(kind) for kind in (Kind.FIRST_TOKEN, Kind.OUTPUT_TOKEN))
        print(f"fitted to {FIT.name}, {engine}: {_text(ttft, tpot)}")
    judgement = judge(_rows(data_dir / CHECK), calibrations=calibrations, extrapolate=True)
    print_judgement(judgement)
    found: dict[str, float] = {}
    for label, rows in subsets(judgement).items():
        ttft, tpot = judgement.errors(rows)
        found |= _errors(f"h200_{label}", "", ttft, tpot)
        possible = [one for one in rows if one.impossible is None]
        if len(possible) < len(rows):
            found |= _errors(f"h200_{label}", "_plausible", *judgement.errors(possible))
            beside = judgement.beside_impossible()
            unspoiled = [one for one in possible if one not in beside]
            found |= _errors(f"h200_{label}", "_unspoiled", *judgement.errors(unspoiled))
    return found


def _errors(prefix: str, suffix: str, ttft: Error, tpot: Error) -> dict[str, float]:
    return {
        f"{prefix}rows{suffix}": ttft.rows,
        f"{prefix}tpot_mape{suffix}": tpot.mape,
        f"{prefix}tpot_bias{suffix}": tpot.bias,
        f"{prefix}ttft_mape{suffix}": ttft.mape,
        f"{prefix}ttft_bias{suffix}": ttft.bias,
    }


def _kind(row: MeasuredRow) -> str | None:
    why = unfit(row)
    return why if why is None or row.ttft_s < SATURATED_TTFT_S else "saturated"


def subsets(judgement: Judgement) -> dict[str, list[Judged]]:
    """The rows that are not saturated: all, those whose benchmark is published, by engine.

    How the others were run has to be assumed in part (`baton.bench.accuracy.recipes`).
    """
    rows = list(judgement.counted)
    published = [one for one in rows if recipe_of(one.row).published]
    chosen = {"": rows, "published_": published}
    for engine in sorted({one.row.backend for one in rows}):
        chosen[f"{engine}_"] = [one for one in rows if one.row.backend == engine]
        if of := [one for one in published if one.row.backend == engine]:
            chosen[f"{engine}_published_"] = of
    return chosen


def print_judgement(judgement: Judgement) -> None:
    """A table by engine, model and device, and what is not in it."""
    print(f"{'engine':22}{'model':36}{'device':14}{'rows':>5}   TTFT, TPOT: mean error, bias")
    for (engine, model, device), rows in judgement.groups().items():
        ttft, tpot = judgement.errors(rows)
        print(f"{engine:22}{model:36}{device:14}{len(rows):5}   {_text(ttft, tpot)}")
    saturated = [one.row.name for one in judgement.judged if one.saturated]
    print(
        f"saturated (TTFT of {SATURATED_TTFT_S:g} s and more), not in the means: {len(saturated)}"
    )
    for name in saturated:
        print(f"  {name}")
    for one in judgement.counted:
        if one.impossible is not None:
            print(f"cannot be, in the means but those called plausible: {one.row.name}")
            print(f"  {one.impossible}")
    if beside := judgement.beside_impossible():
        ttft, tpot = judgement.errors(beside)
        print(f"others of the same sweeps, plausible by themselves: {len(beside)} rows, ", end="")
        print(f"TTFT, TPOT {_text(ttft, tpot)}")
    for why, count in Counter(one.why for one in judgement.not_judged).items():
        print(f"not judged: {count} rows: {why}")


def _text(ttft: Error, tpot: Error) -> str:
    return f"{ttft.mape:6.1%} {ttft.bias:+7.1%}   {tpot.mape:6.1%} {tpot.bias:+7.1%}"


def _rows(path: Path) -> list[MeasuredRow]:
    with path.open(encoding="utf-8") as lines:
        return read_rows(lines, path.name)[0]
