"""`baton status`: what runs."""

from __future__ import annotations

from typing import Any, cast

import typer

from baton.cli.options import Address, Json, Output, seam_of, wanted_format
from baton.cli.output import OutputFormat, print_report, reported_errors
from baton.cli.seam import Report


def status(
    context: typer.Context,
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Show what runs: pools, replicas, health."""
    with reported_errors():
        report = seam_of(context).commands().status(address=address)
    output = wanted_format(output, as_json=as_json)
    print_report(readable(report) if output is OutputFormat.TEXT else report, output)


def readable(report: Report) -> Report:
    """The report as a person wants it: one table of replicas, one line for each ingress.

    Every ingress sees the whole fleet; the first one's view is shown, beside what Ray knows.
    """
    ingresses = cast("list[dict[str, Any]]", report.get("ingresses", []))
    members = cast("list[dict[str, Any]]", report.get("members", []))
    views = {row["replica_id"]: row for row in (ingresses[0]["replicas"] if ingresses else [])}
    shown = dict(report)
    shown.pop("wanted", None)
    shown.pop("members", None)
    shown["replicas"] = [_replica(member, views.get(member["replica_id"])) for member in members]
    shown["ingresses"] = [
        {
            "healthy": ingress["healthy"],
            "in_flight": _counts(ingress["in_flight"]),
            "ended": _counts(ingress["ended"]),
            "not_joined": len(ingress["unjoined"]),
        }
        for ingress in ingresses
    ]
    return shown


def _replica(member: dict[str, Any], view: dict[str, Any] | None) -> dict[str, object]:
    row = {name: member[name] for name in ("replica_id", "role", "node", "pid")}
    if view is None:
        return row | {"state": "not joined"}
    return row | {
        "state": "draining" if view["draining"] else "ready",
        "engine": view["engine"],
        "running": view["running_requests"],
        "queued": view["queued_requests"],
        "kv_used": view["kv_used_fraction"],
        "pulls": view["pulls"],
        "moved_bytes": view["moved_bytes"],
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
