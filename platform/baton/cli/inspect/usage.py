"""`baton usage`: the usage of each tenant, and its cost."""

from __future__ import annotations

from typing import Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import (
    OutputFormat,
    duration_text,
    money_text,
    print_report,
    report_errors,
)

JsonDict = dict[str, Any]


def usage(
    context: typer.Context,
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show tokens, device time and money of each tenant.

    The rows add up to all that was paid for.
    """
    with report_errors():
        report = backend_of(context).commands().usage(address=address)
    output = resolve_format(output, as_json=as_json)
    print_report(text_report(report) if output is OutputFormat.TEXT else report, output)


def text_report(report: Report) -> Report:
    """The report as a person wants it: one table of tenants."""
    rows = cast("list[JsonDict]", report["tenants"])
    shown = {name: value for name, value in report.items() if name != "tenants"}
    shown["since"] = f"{duration_text(cast('float', shown.pop('since_s')))} ago"
    shown["tenants"] = [{name: _cell(name, value) for name, value in row.items()} for row in rows]
    return shown


def _cell(name: str, value: object) -> object:
    if name == "cost":
        return money_text(cast("float | None", value))
    return f"{value:.1f}" if name == "device_s" else value
