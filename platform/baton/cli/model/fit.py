"""`baton fit`, deprecated: `baton size` for a model, `baton calibrate` for measurements."""

from __future__ import annotations

from pathlib import Path

import typer

from baton.cli.model.calibrate import is_measurements
from baton.cli.output import print_warnings


def fit(context: typer.Context) -> None:
    """Deprecated, use `baton size` for a model or `baton calibrate` for measurements."""
    is_comparison = any(is_measurements(Path(word)) for word in context.args)
    verb = "calibrate" if is_comparison else "size"
    print_warnings([f"baton fit: deprecated, use baton {verb}"])
    words = [word.replace("--calibrate", "--calibration") for word in context.args]
    commands = context.find_root().command.commands  # type: ignore[attr-defined]  # of a group
    with commands[verb].make_context(verb, words, parent=context.parent) as inner:
        commands[verb].invoke(inner)
