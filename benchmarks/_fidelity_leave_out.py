"""Predicts each model's rows on H100 with a calibration that has not seen the model.

Errors are of all rows, of those that can be, and of those that calibration would use: if the
frontend was more than half busy, a row does not tell the engine's speed.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from baton.bench.accuracy.accuracy import (
    EvaluatedRow,
    calibrate_engines,
    evaluate_rows,
    unfit_reason,
)
from benchmarks._fidelity_silicon import FIT_ROWS, error_metrics, format_errors, read_csv

_MAX_CLIENTS = 128
"""Rows of more clients take most of the time, and most are saturated."""


def compute_metrics(data_dir: Path) -> dict[str, float]:
    """The errors by model and engine (S: simulated, against M: measured), and a table printed.

    Raises:
        OSError: the data are not there.
    """
    rows = [row for path in FIT_ROWS for row in read_csv(data_dir / path)]
    metrics: dict[str, float] = {}
    for model in sorted({row.model for row in rows}):
        calibrations = calibrate_engines([row for row in rows if row.model != model])
        judged = [row for row in rows if row.model == model and row.concurrency <= _MAX_CLIENTS]
        evaluation = evaluate_rows(judged, calibrations=calibrations)
        by_engine: dict[str, list[EvaluatedRow]] = defaultdict(list)
        for evaluated in evaluation.unsaturated:
            by_engine[evaluated.row.backend].append(evaluated)
        for engine, engine_rows in sorted(by_engine.items()):
            ttft, tpot = evaluation.errors(engine_rows)
            name = model.rsplit("/", 1)[-1]
            prefix = f"h100_without_{name}_{engine}_"
            print(f"without {name}, {engine}, {ttft.rows} rows: {format_errors(ttft, tpot)}")
            metrics |= error_metrics(prefix, "", ttft, tpot)
            plausible = [each for each in engine_rows if each.implausible_reason is None]
            usable = [each for each in engine_rows if unfit_reason(each.row) is None]
            for label, part in (("plausible", plausible), ("usable", usable)):
                if len(part) < len(engine_rows):
                    ttft, tpot = evaluation.errors(part)
                    print(f"  of these {label}, {ttft.rows} rows: {format_errors(ttft, tpot)}")
                    metrics |= error_metrics(prefix, f"_{label}", ttft, tpot)
    return metrics
