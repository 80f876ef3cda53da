"""Fits on measured rows of one GPU, predicts another's, and prints how far off that is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from baton.bench.accuracy.accuracy import (
    SATURATED_TTFT_S,
    EvaluatedRow,
    Evaluation,
    calibrate_engines,
    evaluate_rows,
    unfit_reason,
)
from baton.bench.accuracy.measurements import MeasuredRow, read_rows
from baton.bench.accuracy.recipes import recipe_of
from baton.perf.fitting.calibration import ErrorStats, MeasurementKind

FIT_ROWS = tuple(
    Path("perf/silicon") / name
    for name in ("h100_dense.csv", "h100_qwen3_32b.csv", "h100_experts.csv")
)
CHECK_ROWS = Path("perf/silicon/h200_dense_check.csv")


def compute_metrics(data_dir: Path) -> dict[str, float]:
    """The headline errors (S: simulated, against M: measured), and the tables printed.

    Raises:
        OSError: the data are not there.
    """
    fit_rows = [row for path in FIT_ROWS for row in read_csv(data_dir / path)]
    calibrations = calibrate_engines(fit_rows)
    for reason, count in Counter(
        reason for row in fit_rows if (reason := _unfit_kind(row))
    ).items():
        print(f"not fitted to: {count} rows of {len(fit_rows)}: {reason}")
    for engine, calibration in sorted(calibrations.items()):
        ttft, tpot = (
            calibration.error(kind)
            for kind in (MeasurementKind.FIRST_TOKEN, MeasurementKind.OUTPUT_TOKEN)
        )
        print(f"fitted to {len(fit_rows)} rows, {engine}: {format_errors(ttft, tpot)}")
    evaluation = evaluate_rows(read_csv(data_dir / CHECK_ROWS), calibrations=calibrations)
    print_evaluation(evaluation)
    metrics: dict[str, float] = {}
    for label, rows in subsets(evaluation).items():
        ttft, tpot = evaluation.errors(rows)
        metrics |= error_metrics(f"h200_{label}", "", ttft, tpot)
        plausible = [row for row in rows if row.implausible_reason is None]
        if len(plausible) < len(rows):
            metrics |= error_metrics(f"h200_{label}", "_plausible", *evaluation.errors(plausible))
            suspect = evaluation.plausible_in_suspect_sweeps()
            unsuspected = [row for row in plausible if row not in suspect]
            metrics |= error_metrics(f"h200_{label}", "_unspoiled", *evaluation.errors(unsuspected))
    return metrics


def error_metrics(prefix: str, suffix: str, ttft: ErrorStats, tpot: ErrorStats) -> dict[str, float]:
    """Named figures of two errors."""
    return {
        f"{prefix}rows{suffix}": ttft.rows,
        f"{prefix}tpot_mape{suffix}": tpot.mape,
        f"{prefix}tpot_bias{suffix}": tpot.bias,
        f"{prefix}ttft_mape{suffix}": ttft.mape,
        f"{prefix}ttft_bias{suffix}": ttft.bias,
    }


def _unfit_kind(row: MeasuredRow) -> str | None:
    reason = unfit_reason(row)
    return reason if reason is None or row.ttft_s < SATURATED_TTFT_S else "saturated"


def subsets(evaluation: Evaluation) -> dict[str, list[EvaluatedRow]]:
    """The rows that are not saturated: all, those whose benchmark is published, by engine.

    How the others were run has to be assumed in part (`baton.bench.accuracy`).
    """
    rows = list(evaluation.unsaturated)
    published = [row for row in rows if recipe_of(row.row).is_published]
    rows_by_subset = {"": rows, "published_": published}
    for engine in sorted({row.row.backend for row in rows}):
        rows_by_subset[f"{engine}_"] = [row for row in rows if row.row.backend == engine]
        if engine_rows := [row for row in published if row.row.backend == engine]:
            rows_by_subset[f"{engine}_published_"] = engine_rows
    return rows_by_subset


def print_evaluation(evaluation: Evaluation) -> None:
    """A table by engine, model and device, and what is not in it."""
    print(f"{'engine':22}{'model':36}{'device':14}{'rows':>5}   TTFT, TPOT: mean error, bias")
    for (engine, model, device), rows in evaluation.groups().items():
        ttft, tpot = evaluation.errors(rows)
        print(f"{engine:22}{model:36}{device:14}{len(rows):5}   {format_errors(ttft, tpot)}")
    saturated = [row.row.name for row in evaluation.evaluated if row.is_saturated]
    print(
        f"saturated (TTFT of {SATURATED_TTFT_S:g} s and more), not in the means: {len(saturated)}"
    )
    for name in saturated:
        print(f"  {name}")
    for row in evaluation.unsaturated:
        if row.implausible_reason is not None:
            print(f"cannot be, in the means but those called plausible: {row.row.name}")
            print(f"  {row.implausible_reason}")
    if suspect := evaluation.plausible_in_suspect_sweeps():
        ttft, tpot = evaluation.errors(suspect)
        print(f"others of the same sweeps, plausible by themselves: {len(suspect)} rows, ", end="")
        print(f"TTFT, TPOT {format_errors(ttft, tpot)}")
    for reason, count in Counter(row.reason for row in evaluation.skipped).items():
        print(f"not evaluated: {count} rows: {reason}")


def format_errors(ttft: ErrorStats, tpot: ErrorStats) -> str:
    """Mean error and bias of both."""
    return f"{ttft.mape:6.1%} {ttft.bias:+7.1%}   {tpot.mape:6.1%} {tpot.bias:+7.1%}"


def read_csv(path: Path) -> list[MeasuredRow]:
    """The rows of one file."""
    with path.open(encoding="utf-8") as lines:
        return read_rows(lines, path.name)[0]
