"""`baton demo`: a deployment on this machine and a few requests through it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import AllowUntested, SetOptions, backend_of, config_overrides, load_files
from baton.cli.output import OutputFormat, ProgressLines, print_report, report_errors
from baton.cli.run.up import AFTER_FAILED_START
from baton.runtime.shipped_files import shipped_folder

_QUICKSTART = Path("configs", "quickstart.yaml")


def demo(
    context: typer.Context,
    *,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help=f"Configuration instead of {_QUICKSTART}."
        ),
    ] = None,
    sets: SetOptions = None,
    allow_untested: AllowUntested = False,
    once: Annotated[
        bool, typer.Option("--once", help="End after the requests instead of staying up.")
    ] = False,
) -> None:
    """Start a deployment and stream a few requests through it.

    The last line of stdout is one JSON object with the figures.
    """
    backend = backend_of(context)
    with report_errors(after_failure=AFTER_FAILED_START):
        loaded_config = load_files(
            context,
            config or [_quickstart()],
            config_overrides(sets, allow_untested=allow_untested),
        )
        with ProgressLines() as progress:
            report = backend.commands().demo(loaded_config, once=once, progress=progress)
    print_report(report, OutputFormat.JSON)


def _quickstart() -> Path:
    """The quickstart of this folder, or else of this package."""
    if _QUICKSTART.exists():
        return _QUICKSTART
    return shipped_folder("configs") / _QUICKSTART.name
