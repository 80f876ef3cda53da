"""`baton history`: the configurations that were applied, and their results."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import OutputFormat, print_report, report_errors


def history(
    context: typer.Context,
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show past configurations and their results."""
    with report_errors():
        report = backend_of(context).commands().history(address=address)
    output = resolve_format(output, as_json=as_json)
    print_report(text_report(report) if output is OutputFormat.TEXT else report, output)


def text_report(report: Report) -> Report:
    """The report as a person wants it: one table, newest last."""
    rows = cast("list[dict[str, Any]]", report["generations"])
    return {**report, "generations": [_row(row, report["generation"]) for row in rows]}


def _row(row: dict[str, Any], current: object) -> dict[str, object]:
    at_s = row["at_s"]
    when = "-" if at_s is None else datetime.fromtimestamp(at_s).astimezone()
    return {
        "generation": f"{row['generation']}{' *' if row['generation'] == current else ''}",
        "when": when if isinstance(when, str) else when.strftime("%Y-%m-%d %H:%M:%S"),
        "operation": row["operation"],
        "status": str(row["status"]),
        "reason": row["reason"] or "-",
    }
