"""`baton fit ROWS`: how far the model is off rows that others have measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from baton.cli.traces import TraceUnusable
from baton.domain.errors import BadTrace

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.bench.accuracy.accuracy import Judged, Judgement, NotJudged
    from baton.bench.accuracy.measurements import MeasuredRow
    from baton.perf.fitting.calibration import Error

ROWS_SUFFIX = ".csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrating:
    """What the model is calibrated on before it predicts."""

    on: Path | None = None
    """A CSV of rows; None for the model as it comes."""
    extrapolate: bool = False
    """Predict rows that are more than twice beyond the range of those, too."""


def judged_rows(
    path: Path,
    calibrating: Calibrating,
    *,
    skip_bad: bool,
    on_progress: Callable[[float], None],
) -> dict[str, object]:
    """Each row as measured and as predicted, the errors of all, and what was left out and why.

    Raises:
        TraceUnusable: a file cannot be read; says which line, and what is wrong with it.
    """
    from baton.bench.accuracy.accuracy import Judgement, calibrated, judge

    rows, skipped = _read(path, skip_bad=skip_bad)
    known = {}
    if calibrating.on is not None:
        known = calibrated(_read(calibrating.on, skip_bad=skip_bad)[0])
    parts = []
    for number, row in enumerate(rows, start=1):
        parts.append(judge([row], calibrations=known, extrapolate=calibrating.extrapolate))
        on_progress(number / len(rows))
    judgement = Judgement(
        judged=tuple(one for part in parts for one in part.judged),
        not_judged=tuple(one for part in parts for one in part.not_judged),
    )
    return {
        "rows": str(path),
        "calibrated_on": str(calibrating.on) if calibrating.on else None,
        "skipped_lines": skipped,
        **_errors(judgement),
        "judged": [_row(one) for one in judgement.judged],
        "not_judged": _grouped(judgement.not_judged),
    }


def _grouped(rows: Sequence[NotJudged]) -> list[dict[str, object]]:
    """By why; what exactly is wrong is said of the first of each group."""
    groups: dict[str, list[NotJudged]] = {}
    for one in rows:
        groups.setdefault(one.why, []).append(one)
    return [
        {
            "why": why,
            "count": len(of),
            "first": of[0].at or of[0].row.name,
            "rows": [one.row.name for one in of],
        }
        for why, of in groups.items()
    ]


def in_short(report: dict[str, object]) -> dict[str, object]:
    """The same without what is said of each row, and without what is empty."""
    empty: tuple[object, ...] = (None, 0, [])
    short = {key: value for key, value in report.items() if key != "judged" and value not in empty}
    if "not_judged" in short:
        groups = cast("list[dict[str, object]]", short["not_judged"])
        short["not_judged"] = [
            {key: value for key, value in group.items() if key != "rows"} for group in groups
        ]
    return short


def _read(path: Path, *, skip_bad: bool) -> tuple[list[MeasuredRow], int]:
    from baton.bench.accuracy.measurements import read_rows

    remedy = "correct the line, or leave out all that are bad with --skip-bad"
    try:
        with path.open(encoding="utf-8-sig") as lines:  # as spreadsheets write CSV
            return read_rows(lines, path.name, skip_bad=skip_bad)
    except BadTrace as error:
        raise TraceUnusable(str(error), remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceUnusable(f"{path}: cannot be read: {error}", "name a CSV of rows") from error


def _errors(judgement: Judgement) -> dict[str, object]:
    from baton.bench.accuracy.accuracy import SATURATED_TTFT_S

    ttft, tpot = judgement.errors()
    groups = [
        {
            "engine": engine,
            "model": model,
            "devices": devices,
            "rows": len(rows),
            **_figures(*judgement.errors(rows)),
        }
        for (engine, model, devices), rows in judgement.groups().items()
    ]
    saturated = [one.row.name for one in judgement.judged if one.saturated]
    impossible = [
        {"row": one.row.name, "why": one.impossible}
        for one in judgement.counted
        if one.impossible is not None
    ]
    return {
        "in_the_means": ttft.rows,
        **_figures(ttft, tpot),
        "without_rows_that_cannot_be": _figures(*judgement.errors(judgement.plausible))
        if impossible
        else None,
        "rows_that_cannot_be": impossible,
        "others_of_the_same_sweeps": [one.row.name for one in judgement.beside_impossible()],
        "groups": groups,
        f"not_in_the_means_for_ttft_of_{SATURATED_TTFT_S:g}_s_and_more": saturated,
    }


def _figures(ttft: Error, tpot: Error) -> dict[str, float]:
    """Fractions of what was measured."""
    return {
        "ttft_mape": round(ttft.mape, 4),
        "ttft_bias": round(ttft.bias, 4),
        "tpot_mape": round(tpot.mape, 4),
        "tpot_bias": round(tpot.bias, 4),
    }


def _row(one: Judged) -> dict[str, object]:
    return {
        "row": one.row.name,
        "line": one.row.line,
        "measured_ttft_s": one.ttft.measured_s,
        "predicted_ttft_s": one.ttft.predicted_s,
        "measured_tpot_s": one.tpot.measured_s,
        "predicted_tpot_s": one.tpot.predicted_s,
        "saturated": one.saturated,
        "cannot_be": one.impossible,
        "simulated": one.simulated,
    }
