"""`baton calibrate`: how far predicted latencies are off measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.model.calibrate_log import LogArgs, evaluate_log, is_log, log_text_report
from baton.cli.model.calibrate_rows import ROWS_SUFFIX, CalibrationArgs, evaluate_rows, summarize
from baton.cli.model.simulate import progress_bar
from baton.cli.options import JsonFlag, Output, resolve_format
from baton.cli.output import OutputFormat, print_report, report_errors

_MEASUREMENTS = typer.Argument(
    help="A CSV of measured latencies, or the log of a vLLM engine: requests.jsonl with meta.json"
    " beside it, or their folder."
)
_CALIBRATION = typer.Option(
    "--calibration", metavar="FILE", help="Rows to calibrate on first; for a CSV."
)
_EXTRAPOLATE = typer.Option(
    "--extrapolate", help="Predict beyond twice the range of the calibration, too; for a CSV."
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


def is_measurements(path: Path) -> bool:
    """Whether this is a CSV of rows or the log of an engine."""
    return path.suffix == ROWS_SUFFIX or is_log(path)


def calibrate(  # noqa: PLR0913 - each is an option
    measurements: Annotated[Path, _MEASUREMENTS],
    *,
    calibration: Annotated[Path | None, _CALIBRATION] = None,
    extrapolate: Annotated[bool, _EXTRAPOLATE] = False,
    gpu: Annotated[str | None, _GPU] = None,
    model_config: Annotated[str | None, _SHAPE] = None,
    profile: Annotated[str | None, _PROFILE] = None,
    ignore_invalid: Annotated[bool, _SKIP_BAD] = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Compare predicted latencies with measured ones.

    Those are rows of latencies, or a vLLM engine's log. The model can be calibrated on other rows
    first.
    """
    output = resolve_format(output, as_json=as_json)
    if not is_measurements(measurements):
        raise typer.BadParameter(
            f"got {str(measurements)!r}, expected a CSV of rows or a log; for a model, use"
            " 'baton size'",
            param_hint="MEASUREMENTS",
        )
    if measurements.suffix == ROWS_SUFFIX:
        with report_errors(), progress_bar("predicting") as on_progress:
            evaluation = evaluate_rows(
                measurements,
                CalibrationArgs(rows_path=calibration, extrapolate=extrapolate),
                ignore_invalid=ignore_invalid,
                on_progress=on_progress,
            )
        print_report(summarize(evaluation) if output is OutputFormat.TEXT else evaluation, output)
        return
    if gpu is None:
        raise typer.BadParameter("say which, as H100", param_hint="--gpu")
    args = LogArgs(
        log=measurements,
        gpu=gpu,
        model=model_config,
        profile=profile,
        ignore_invalid=ignore_invalid,
    )
    with report_errors():
        comparison = evaluate_log(args)
    print_report(log_text_report(comparison) if output is OutputFormat.TEXT else comparison, output)
