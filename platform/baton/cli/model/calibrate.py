"""`baton calibrate`: predicted against measured latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from baton.cli.model.models import read_model
from baton.cli.model.simulate import progress_bar
from baton.cli.options import JsonFlag, Output, resolve_format
from baton.cli.output import (
    OutputFormat,
    duration_text,
    print_report,
    print_warnings,
    report_errors,
)
from baton.cli.traces import TraceUnusable
from baton.domain.errors import TraceInvalid

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.bench.accuracy.accuracy import EvaluatedRow, Evaluation, SkippedRow
    from baton.bench.accuracy.measurements import MeasuredRow
    from baton.perf.fitting.calibration import Calibration, ErrorStats

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.bench.accuracy.logged_run import LoggedEngine
    from baton.bench.accuracy.measurements import LoggedRequest
    from baton.perf.model.memory import MemoryModel
    from baton.perf.step_timing import StepTiming

_MEASUREMENTS = typer.Argument(
    help="A CSV of measured latencies, or the log of a vLLM engine: requests.jsonl with meta.json"
    " beside it, or their folder."
)
_CALIBRATION = typer.Option(
    "--calibration",
    metavar="FILE",
    help="Rows to calibrate on first; for a CSV. May be repeated.",
)
_EXTRAPOLATE = typer.Option(
    "--extrapolate", hidden=True, help="Deprecated: rows beyond the calibration are predicted."
)
_GPU = typer.Option("--gpu", help="The accelerator, as H100 or a100_40gb; for a log.")
_SHAPE = typer.Option(
    "--model-config", metavar="FILE", help="The model's config.json; for a log that only names it."
)
_PROFILE = typer.Option(
    "--profile",
    metavar="PREFIX",
    help="Layer profiles to predict a log by: PREFIX_dense.csv, _attention and _per_sequence.",
)
_SKIP_BAD = typer.Option("--skip-bad", help="Leave out bad rows.")
_ROWS_SUFFIX = ".csv"
_REQUESTS = "requests.jsonl"
_META = "meta.json"
_SUFFIX = ".jsonl"
_SERVED_ENGINE = "vllm"
_TABLES = ("dense", "attention", "per_sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogArgs:
    """A log, and values that it lacks."""

    log: Path
    gpu: str
    model: str | None = None
    """Source of the model's shape; None for the name in the log."""
    profile: str | None = None
    """Path prefix of the device's three tables; None for the roofline."""
    ignore_invalid: bool = False


def _is_measurements(path: Path) -> bool:
    return path.suffix == _ROWS_SUFFIX or _is_log(path)


def calibrate(  # noqa: PLR0913 - each is an option
    measurements: Annotated[Path, _MEASUREMENTS],
    *,
    calibration: Annotated[list[Path] | None, _CALIBRATION] = None,
    extrapolate: Annotated[bool, _EXTRAPOLATE] = False,
    gpu: Annotated[str | None, _GPU] = None,
    model_config: Annotated[str | None, _SHAPE] = None,
    profile: Annotated[str | None, _PROFILE] = None,
    ignore_invalid: Annotated[bool, _SKIP_BAD] = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Compare predicted with measured latencies.

    Those are rows of latencies, or a vLLM engine's log. The model can be calibrated on other rows
    first.
    """
    output = resolve_format(output, as_json=as_json)
    if extrapolate:
        print_warnings(["--extrapolate: deprecated, rows beyond the calibration are predicted"])
    if not _is_measurements(measurements):
        raise typer.BadParameter(
            f"got {str(measurements)!r}, expected a CSV of rows or a log; for a model, use"
            " 'baton size'",
            param_hint="MEASUREMENTS",
        )
    if measurements.suffix == _ROWS_SUFFIX:
        with report_errors(), progress_bar("predicting") as on_progress:
            evaluation = evaluate_rows(
                measurements,
                tuple(calibration or ()),
                ignore_invalid=ignore_invalid,
                on_progress=on_progress,
            )
        print_report(summarize(evaluation) if output is OutputFormat.TEXT else evaluation, output)
        return
    if gpu is None:
        raise typer.BadParameter("say which, as H100", param_hint="--gpu")
    args = _LogArgs(
        log=measurements,
        gpu=gpu,
        model=model_config,
        profile=profile,
        ignore_invalid=ignore_invalid,
    )
    with report_errors():
        comparison = _evaluate_log(args)
    print_report(
        _log_text_report(comparison) if output is OutputFormat.TEXT else comparison, output
    )


def fit(context: typer.Context) -> None:
    """Deprecated, use `baton size` for a model or `baton calibrate` for measurements."""
    is_comparison = any(_is_measurements(Path(word)) for word in context.args)
    verb = "calibrate" if is_comparison else "size"
    print_warnings([f"baton fit: deprecated, use baton {verb}"])
    words = [word.replace("--calibrate", "--calibration") for word in context.args]
    commands = context.find_root().command.commands  # type: ignore[attr-defined]  # of a group
    with commands[verb].make_context(verb, words, parent=context.parent) as inner:
        commands[verb].invoke(inner)


def evaluate_rows(
    path: Path,
    calibration_paths: Sequence[Path],
    *,
    ignore_invalid: bool,
    on_progress: Callable[[float], None],
) -> dict[str, object]:
    """Each row as measured and as predicted, the errors of all, and the skipped rows.

    Args:
        path: a CSV of rows.
        calibration_paths: CSV files of rows to calibrate on; none for the uncalibrated model.
        ignore_invalid: skip bad rows.
        on_progress: takes the share of rows that are done.

    Raises:
        TraceUnusable: a file cannot be read.
    """
    from baton.bench.accuracy.accuracy import Evaluation, calibrate_engines, evaluate_rows

    rows, skipped = _read(path, ignore_invalid=ignore_invalid)
    calibration_rows = [
        row
        for calibration_path in calibration_paths
        for row in _read(calibration_path, ignore_invalid=ignore_invalid)[0]
    ]
    calibrations = calibrate_engines(calibration_rows)
    evaluations = []
    for number, row in enumerate(rows, start=1):
        evaluations.append(evaluate_rows([row], calibrations=calibrations))
        on_progress(number / len(rows))
    evaluation = Evaluation(
        evaluated=tuple(row for part in evaluations for row in part.evaluated),
        skipped=tuple(row for part in evaluations for row in part.skipped),
    )
    return {
        "rows": str(path),
        "calibrated_on": ", ".join(map(str, calibration_paths)) or None,
        "skipped_lines": skipped,
        **_errors(evaluation),
        "judged": [_row(row) for row in evaluation.evaluated],
        "not_judged": _group_by_reason(evaluation.skipped),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCalibration:
    """A fit on the rows of some files, for engines of vLLM."""

    name: str
    """The files."""
    fit: Calibration

    def note(self) -> str:
        """For reports, instead of a note that nothing was measured."""
        return f"Engines are modelled with factors that are fitted on measured rows ({self.name})."


def load_calibration(paths: Sequence[Path]) -> LoadedCalibration | None:
    """The fit on the rows of some CSV files; None without files.

    Raises:
        TraceUnusable: a file cannot be read, or no row of vLLM can be used.
    """
    from baton.bench.accuracy.accuracy import (
        calibrate_engines,
        calibration_of,
        unfit_reason,
    )

    if not paths:
        return None
    rows = [row for path in paths for row in _read(path, ignore_invalid=False)[0]]
    name = ", ".join(path.name for path in paths)
    fit = calibration_of(_SERVED_ENGINE, calibrate_engines(rows))
    if fit is None:
        reasons = [reason for row in rows if (reason := unfit_reason(row))]
        engines = ", ".join(sorted({row.backend for row in rows})) or "no engine"
        why = reasons[0] if reasons else f"they are of {engines}"
        problem = f"{name}: of {len(rows)} rows none of vLLM can be used: {why}"
        raise TraceUnusable(problem, "name rows that vLLM was measured with")
    return LoadedCalibration(name=name, fit=fit)


def _group_by_reason(rows: Sequence[SkippedRow]) -> list[dict[str, object]]:
    """Skipped rows by reason; each group shows the error of its first row."""
    groups: dict[str, list[SkippedRow]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row)
    return [
        {
            "why": reason,
            "count": len(group),
            "first": group[0].row.name,
            "rows": [row.row.name for row in group],
        }
        for reason, group in groups.items()
    ]


def summarize(report: dict[str, object]) -> dict[str, object]:
    """The report without rows and without empty parts."""
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
    extrapolated = [row for row in evaluation.unsaturated if row.extrapolated]
    impossible = [
        {"row": row.row.name, "why": row.implausible_reason}
        for row in evaluation.unsaturated
        if row.implausible_reason is not None
    ]
    return {
        "in_the_means": ttft.rows,
        **_figures(ttft, tpot),
        "beyond_the_calibration": {
            "rows": len(extrapolated),
            "first": f"{extrapolated[0].row.name}: {', '.join(extrapolated[0].extrapolated)}",
            **_figures(*evaluation.errors(extrapolated)),
        }
        if extrapolated
        else None,
        "without_rows_that_cannot_be": _figures(*evaluation.errors(evaluation.plausible))
        if impossible
        else None,
        "rows_that_cannot_be": impossible,
        "others_of_the_same_sweeps": [
            row.row.name for row in evaluation.plausible_in_suspect_sweeps()
        ],
        "groups": groups,
        "kernels_of_others": list(evaluation.stand_ins()),
        f"not_in_the_means_for_ttft_of_{SATURATED_TTFT_S:g}_s_and_more": saturated,
    }


def _figures(ttft: ErrorStats, tpot: ErrorStats) -> dict[str, float]:
    """Errors as fractions of the measured values."""
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
        "beyond_the_calibration": list(evaluated.extrapolated),
    }


def _is_log(path: Path) -> bool:
    """Whether that is a log of requests, or a folder with one."""
    return path.suffix == _SUFFIX or (path / _REQUESTS).is_file()


def _evaluate_log(args: _LogArgs) -> dict[str, object]:
    """Latencies as measured and as predicted, and the signed errors of the means.

    Raises:
        TraceUnusable: a file cannot be read.
        BatonError: the model or the accelerator is not known, or the model does not fit.
    """
    from baton.bench.accuracy.logged_run import logged_latencies, replayed_latencies

    path = args.log / _REQUESTS if args.log.is_dir() else args.log
    log, skipped = _requests(path, ignore_invalid=args.ignore_invalid)
    engine = _engine(path.with_name(_META))
    memory = _memory(engine, args)
    timing = _timing(engine, memory, args.profile)
    measured = logged_latencies(log)
    predicted = replayed_latencies(log, engine, memory, timing)
    if not predicted.ttfts_s:
        reason = f"{path}: no request fits an engine of {memory.shape.name} as {_META} describes it"
        raise TraceUnusable(reason, f"look at max_model_len in {_META}")
    return {
        "log": str(path),
        "model": memory.shape.name,
        "accelerator": memory.accelerator.name,
        "devices": {
            "tp": engine.tp,
            "pp": engine.pp,
            "replicas": engine.replicas,
            **({"ep": True} if engine.whole_experts else {}),
        },
        "timing": "layer profile" if args.profile else "roofline",
        "requests": len(log),
        "skipped_lines": skipped,
        "failed": len(log) - len(predicted.ttfts_s),
        "not_modelled": list(engine.not_modelled),
        "measured": measured.summarize(),
        "predicted": predicted.summarize(),
        "ttft_mean_error": _error(measured.ttfts_s, predicted.ttfts_s),
        "tpot_mean_error": _error(measured.tpots_s, predicted.tpots_s),
    }


def _log_text_report(report: dict[str, object]) -> dict[str, object]:
    """The report for a person: a table of latencies, measured (M) and simulated (S)."""
    rows = [
        {"": label, **_log_row(report[key])}
        for label, key in (("measured (M)", "measured"), ("predicted (S)", "predicted"))
    ]
    errors = {
        f"{term} mean, predicted against measured": _percent(report[f"{term.lower()}_mean_error"])
        for term in ("TTFT", "TPOT")
    }
    header = {key: report[key] for key in ("log", "model", "accelerator", "devices", "timing")}
    counts = {k: report[k] for k in ("skipped_lines", "failed", "not_modelled") if report[k]}
    return {**header, "requests": report["requests"], **counts, "latencies": rows, **errors}


def _log_row(figures: object) -> dict[str, str]:
    assert isinstance(figures, dict), figures
    return {
        f"{term} {which}": duration_text(figures[f"{term.lower()}_s"][which])
        for term in ("TTFT", "TPOT")
        for which in ("mean", "p50", "p90", "p99")
    }


def _percent(error: object) -> str:
    return f"{error:+.1%}" if isinstance(error, float) else "-"


def _error(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """The signed error of the mean; None without values."""
    if not measured or not predicted or not sum(measured):
        return None
    return (sum(predicted) / len(predicted)) / (sum(measured) / len(measured)) - 1


def _requests(path: Path, *, ignore_invalid: bool) -> tuple[list[LoggedRequest], int]:
    from baton.bench.accuracy.measurements import read_request_log

    remedy = "correct the line, or leave out all that are bad with --skip-bad"
    try:
        with path.open(encoding="utf-8") as lines:
            return read_request_log(lines, str(path), ignore_invalid=ignore_invalid)
    except TraceInvalid as error:
        raise TraceUnusable(str(error), remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, f"name a {_REQUESTS}, or the folder it is in") from error


def _engine(path: Path) -> LoggedEngine:
    from baton.bench.accuracy.logged_run import read_engine

    try:
        return read_engine(path.read_text(encoding="utf-8"), str(path))
    except TraceInvalid as error:
        raise TraceUnusable(str(error), "correct what the file says of the engine") from error
    except (OSError, UnicodeDecodeError) as error:
        remedy = "put the engine's arguments beside the log: {'engine_kwargs': {'model': ...}}"
        raise _unreadable(path, error, remedy) from error


def _unreadable(path: Path, error: OSError | UnicodeDecodeError, remedy: str) -> TraceUnusable:
    reason = getattr(error, "strerror", None) or str(error)
    return TraceUnusable(f"{path}: cannot be read: {reason}", remedy)


def _memory(engine: LoggedEngine, args: _LogArgs) -> MemoryModel:
    from baton.perf.hardware.catalogue import find_accelerator
    from baton.perf.model.memory import MemoryModel

    stored = read_model(args.model or engine.model, weights=engine.weights, kv=engine.kv)
    return MemoryModel(
        shape=stored.shape,
        accelerator=find_accelerator(args.gpu),
        weights_dtype=stored.weights,
        kv_dtype=stored.kv,
        utilization=engine.utilization,
        max_batched_tokens=engine.max_batched_tokens,
        max_running_requests=engine.max_running_requests,
    )


def _timing(engine: LoggedEngine, memory: MemoryModel, profile: str | None) -> StepTiming:
    from baton.perf.steps.roofline import Roofline

    ranks = engine.ranks(memory.shape)
    if profile is not None:
        if ranks > 1:
            reason = f"--profile has no times of {ranks} engines that share experts"
            raise TraceUnusable(reason, "leave it out")
        return _profile(profile, memory.shape.layers)
    return Roofline(
        memory.shape,
        memory.accelerator,
        tp=engine.tp,
        pp=engine.pp,
        dp=ranks,
        ep=engine.tp * ranks if engine.whole_experts else 1,
        weights=memory.weights_dtype,
        kv=memory.kv_dtype,
    )


def _profile(prefix: str, layers: int) -> StepTiming:
    from baton.bench.accuracy.measurements import layer_profile

    tables = []
    for table in _TABLES:
        path = Path(f"{prefix}_{table}.csv")
        try:
            tables.append(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            remedy = f"give what the paths of {', '.join(_TABLES)}.csv have in common"
            raise _unreadable(path, error, remedy) from error
    try:
        dense, attention, per_sequence = tables
        return layer_profile(dense, attention, per_sequence, layers=layers)
    except (TraceInvalid, ValueError) as error:
        raise TraceUnusable(f"{prefix}: {error}", "correct the table") from error
