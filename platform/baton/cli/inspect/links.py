"""`baton links`: the pairs of replicas between which KV blocks may move."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import OutputFormat, duration_text, print_report, report_errors

_GIGA = 1e9


def links(
    context: typer.Context,
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show the links that KV blocks move over: speed, failures."""
    with report_errors():
        report = backend_of(context).commands().links(address=address)
    output = resolve_format(output, as_json=as_json)
    print_report(text_report(report) if output is OutputFormat.TEXT else report, output)


def text_report(report: Report) -> Report:
    """The report as a person wants it: how many pairs are in which state, and a row for each."""
    rows = cast("list[dict[str, Any]]", report["links"])
    states = Counter(str(row["state"]) for row in rows)
    state_counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    unanswered = report.get("unanswered")
    return {
        **({"unanswered": unanswered} if unanswered else {}),
        "pairs": f"{len(rows)} ({state_counts})"
        if rows
        else "none: nothing hands blocks over here",
        "links": [_row(row) for row in rows],
    }


def _row(row: dict[str, Any]) -> dict[str, object]:
    return {
        "source": row["source_id"],
        "target": row["target_id"],
        "state": row["state"],
        "transport": row["transport"] or "unknown",
        "GB/s": f"{row['bytes_per_s'] / _GIGA:.3g}",
        "setup": duration_text(row["setup_s"]),
        "p50": duration_text(row["p50_s"]),
        "p99": duration_text(row["p99_s"]),
        "pulls": row["pulls"],
        "failures": row["failures"],
        "failed handoffs": row["failed_handoffs"],
        "probed": _ago(row["probed_age_s"]),
        "reason": row["reason"] or "-",
    }


def _ago(age_s: float | None) -> str:
    return "never" if age_s is None else f"{duration_text(age_s)} ago"
