"""`baton history`: the configurations that were applied, and their results."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import OutputFormat, print_report, report_errors, text_lines


def history(
    context: typer.Context,
    *,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the keys that each generation has changed.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show past configurations, their changes, authors and results."""
    with report_errors():
        report = backend_of(context).commands().history(address=address)
    print_report(
        report, resolve_format(output, as_json=as_json), lambda _: text_lines_of(report, diff=diff)
    )


def text_lines_of(report: Report, *, diff: bool = False) -> Iterator[str]:
    """One table, newest last; with `diff` the changes of each generation below it."""
    yield from text_lines(text_report(report))
    if not diff:
        return
    for row in cast("list[dict[str, Any]]", report["generations"]):
        if row.get("changes") is not None:
            yield f"generation {row['generation']}, {row['operation']}:"
            yield from (f"  {change}" for change in row["changes"] or ["nothing"])


def text_report(report: Report) -> Report:
    """The report as a person wants it."""
    rows = cast("list[dict[str, Any]]", report["generations"])
    return {**report, "generations": [_row(row, report["generation"]) for row in rows]}


def _changes_text(changes: list[str] | None) -> str:
    """The first change, and how many more there are; `-` where they are not known."""
    if changes is None:
        return "-"
    if not changes:
        return "nothing"
    return changes[0] + (f" and {len(changes) - 1} more" if len(changes) > 1 else "")


def _row(row: dict[str, Any], current: object) -> dict[str, object]:
    at_s = row["at_s"]
    when = "-" if at_s is None else datetime.fromtimestamp(at_s).astimezone()
    return {
        "generation": f"{row['generation']}{' *' if row['generation'] == current else ''}",
        "when": when if isinstance(when, str) else when.strftime("%Y-%m-%d %H:%M:%S"),
        "operation": row["operation"],
        "author": row.get("author") or "-",
        "status": str(row["status"]),
        "changes": _changes_text(row.get("changes")),
        "reason": row["reason"] or "-",
    }
