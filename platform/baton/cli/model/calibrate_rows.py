"""`baton calibrate ROWS.csv`: how far the model is off rows that others have measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from baton.cli.traces import TraceUnusable
from baton.domain.errors import TraceInvalid

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.bench.accuracy.accuracy import EvaluatedRow, Evaluation, SkippedRow
    from baton.bench.accuracy.measurements import MeasuredRow
    from baton.perf.fitting.calibration import ErrorStats

ROWS_SUFFIX = ".csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationArgs:
    """The data that the model is calibrated on before it predicts."""

    rows_path: Path | None = None
    """A CSV of rows; None for the model as it comes."""
    extrapolate: bool = False
    """Predict rows that are more than twice beyond the range of those, too."""


def evaluate_rows(
    path: Path,
    calibration: CalibrationArgs,
    *,
    ignore_invalid: bool,
    on_progress: Callable[[float], None],
) -> dict[str, object]:
    """Each row as measured and as predicted, the errors of all, and the skipped rows.

    Raises:
        TraceUnusable: a file cannot be read; says which line, and why.
    """
    from baton.bench.accuracy.accuracy import Evaluation, calibrate_engines, evaluate_rows

    rows, skipped = _read(path, ignore_invalid=ignore_invalid)
    calibrations = {}
    if calibration.rows_path is not None:
        calibrations = calibrate_engines(
            _read(calibration.rows_path, ignore_invalid=ignore_invalid)[0]
        )
    evaluations = []
    for number, row in enumerate(rows, start=1):
        evaluations.append(
            evaluate_rows([row], calibrations=calibrations, extrapolate=calibration.extrapolate)
        )
        on_progress(number / len(rows))
    evaluation = Evaluation(
        evaluated=tuple(row for part in evaluations for row in part.evaluated),
        skipped=tuple(row for part in evaluations for row in part.skipped),
    )
    return {
        "rows": str(path),
        "calibrated_on": str(calibration.rows_path) if calibration.rows_path else None,
        "skipped_lines": skipped,
        **_errors(evaluation),
        "judged": [_row(row) for row in evaluation.evaluated],
        "not_judged": _group_by_reason(evaluation.skipped),
    }


def _group_by_reason(rows: Sequence[SkippedRow]) -> list[dict[str, object]]:
    """By reason; the first of each group has its exact error."""
    groups: dict[str, list[SkippedRow]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row)
    return [
        {
            "why": why,
            "count": len(group),
            "first": group[0].detail or group[0].row.name,
            "rows": [row.row.name for row in group],
        }
        for why, group in groups.items()
    ]


def summarize(report: dict[str, object]) -> dict[str, object]:
    """The same without what is said of each row, and without what is empty."""
    empty: tuple[object, ...] = (None, 0, [])
    summary = {
        key: value for key, value in report.items() if key != "judged" and value not in empty
    }
    if "not_judged" in summary:
        groups = cast("list[dict[str, object]]", summary["not_judged"])
        summary["not_judged"] = [
            {key: value for key, value in group.items() if key != "rows"} for group in groups
        ]
    return summary


def _read(path: Path, *, ignore_invalid: bool) -> tuple[list[MeasuredRow], int]:
    from baton.bench.accuracy.measurements import read_rows

    remedy = "correct the line, or leave out all that are bad with --skip-bad"
    try:
        with path.open(encoding="utf-8-sig") as lines:  # as spreadsheets write CSV
            return read_rows(lines, path.name, ignore_invalid=ignore_invalid)
    except TraceInvalid as error:
        raise TraceUnusable(str(error), remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceUnusable(f"{path}: cannot be read: {error}", "name a CSV of rows") from error


def _errors(evaluation: Evaluation) -> dict[str, object]:
    from baton.bench.accuracy.accuracy import SATURATED_TTFT_S

    ttft, tpot = evaluation.errors()
    groups = [
        {
            "engine": engine,
            "model": model,
            "devices": devices,
            "rows": len(rows),
            **_figures(*evaluation.errors(rows)),
        }
        for (engine, model, devices), rows in evaluation.groups().items()
    ]
    saturated = [row.row.name for row in evaluation.evaluated if row.is_saturated]
    impossible = [
        {"row": row.row.name, "why": row.implausible_reason}
        for row in evaluation.unsaturated
        if row.implausible_reason is not None
    ]
    return {
        "in_the_means": ttft.rows,
        **_figures(ttft, tpot),
        "without_rows_that_cannot_be": _figures(*evaluation.errors(evaluation.plausible))
        if impossible
        else None,
        "rows_that_cannot_be": impossible,
        "others_of_the_same_sweeps": [
            row.row.name for row in evaluation.plausible_in_suspect_sweeps()
        ],
        "groups": groups,
        f"not_in_the_means_for_ttft_of_{SATURATED_TTFT_S:g}_s_and_more": saturated,
    }


def _figures(ttft: ErrorStats, tpot: ErrorStats) -> dict[str, float]:
    """Fractions of the measured values."""
    return {
        "ttft_mape": round(ttft.mape, 4),
        "ttft_bias": round(ttft.bias, 4),
        "tpot_mape": round(tpot.mape, 4),
        "tpot_bias": round(tpot.bias, 4),
    }


def _row(evaluated: EvaluatedRow) -> dict[str, object]:
    return {
        "row": evaluated.row.name,
        "line": evaluated.row.line,
        "measured_ttft_s": evaluated.ttft.measured_s,
        "predicted_ttft_s": evaluated.ttft.predicted_s,
        "measured_tpot_s": evaluated.tpot.measured_s,
        "predicted_tpot_s": evaluated.tpot.predicted_s,
        "saturated": evaluated.is_saturated,
        "cannot_be": evaluated.implausible_reason,
        "simulated": evaluated.is_simulated,
    }
