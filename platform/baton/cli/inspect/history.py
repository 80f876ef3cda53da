"""`baton history`: the configurations that were applied, and what became of each."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, Json, Output, seam_of, wanted_format
from baton.cli.output import OutputFormat, print_report, reported_errors


def history(
    context: typer.Context,
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Show past configurations, and what became of each."""
    with reported_errors():
        report = seam_of(context).commands().history(address=address)
    output = wanted_format(output, as_json=as_json)
    print_report(readable(report) if output is OutputFormat.TEXT else report, output)


def readable(report: Report) -> Report:
    """The report as a person wants it: one table, newest last."""
    rows = cast("list[dict[str, Any]]", report["generations"])
    return {**report, "generations": [_row(row, report["generation"]) for row in rows]}


def _row(row: dict[str, Any], current: object) -> dict[str, object]:
    at_s = row["at_s"]
    when = "-" if at_s is None else datetime.fromtimestamp(at_s).astimezone()
    return {
        "generation": f"{row['generation']}{' *' if row['generation'] == current else ''}",
        "when": when if isinstance(when, str) else when.strftime("%Y-%m-%d %H:%M:%S"),
        "by": row["by"],
        "fate": str(row["fate"]),
        "why": row["why"] or "-",
    }
