"""`baton status`: what runs."""

from __future__ import annotations

from typing import Any, cast

import typer

from baton.cli.options import Address, Json, Output, seam_of, wanted_format
from baton.cli.output import OutputFormat, duration_text, print_report, reported_errors
from baton.cli.seam import Report

Told = dict[str, Any]


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

    Every ingress sees the whole fleet; what the first one sees that has reached a replica is
    shown, beside what Ray knows.
    """
    ingresses = cast("list[Told]", report.get("ingresses", []))
    members = cast("list[Told]", report.get("members", []))
    views = _views(ingresses)
    shown = dict(report)
    shown.pop("wanted", None)
    shown.pop("members", None)
    shown["replicas"] = [
        _replica(member, views.get(member["replica_id"], [])) for member in members
    ]
    if timings := [row for ingress in ingresses[:1] for row in ingress.get("timings", [])]:
        shown["predictions"] = [_timing(row) for row in timings]
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


def _views(ingresses: list[Told]) -> dict[str, list[Told]]:
    """Each replica as the ingresses see it that have reached it."""
    views: dict[str, list[Told]] = {}
    for ingress in ingresses:
        for row in ingress["replicas"]:
            views.setdefault(row["replica_id"], []).append(row)
    return views


def _replica(member: Told, views: list[Told]) -> dict[str, object]:
    row = {name: member[name] for name in ("replica_id", "role", "node", "pid")}
    if not views:
        return row | {"state": "not joined"}
    view = views[0]
    return (
        row
        | {
            "state": "draining" if view["draining"] else "ready",
            "engine": view["engine"],
            "running": view["running_requests"],
            "queued": view["queued_requests"],
            "kv_used": view["kv_used_fraction"],
            "pulls": view["pulls"],
            "moved_bytes": view["moved_bytes"],
        }
        | _cache(views)
        | _leases(views)
    )


def _cache(views: list[Told]) -> dict[str, object]:
    """What the first view's index holds of a replica, and the worst state that any has it in."""
    caches = [view["cache"] for view in views if "cache" in view]
    if not caches:
        return {}
    first = caches[0]
    in_host = f" + {first['host_blocks']} in host" if first["host_blocks"] else ""
    return {
        "cached_blocks": f"{first['gpu_blocks']}{in_host}",
        "sent_blocks": first["predicted_blocks"],
        "index": _index_text(caches),
    }


def _index_text(caches: list[Told]) -> str:
    age_s = caches[0]["age_s"]
    age = "never reported" if age_s is None else f"{duration_text(age_s)} old"
    if not all(cache["in_step"] for cache in caches):
        return f"out of step, {age}"
    if age_s is None:
        return age
    return f"stale, {age}" if any(cache["stale"] for cache in caches) else f"in step, {age}"


def _leases(views: list[Told]) -> dict[str, object]:
    """Each ingress knows of its own only."""
    counts = [view["leases"] for view in views if "leases" in view]
    return {"leases": sum(counts)} if counts else {}


def _timing(row: Told) -> dict[str, object]:
    bias = row["ttft_bias_fraction"]
    return {
        "pool": row["pool"],
        "requests": row["predictions"],
        "ttft_error": f"{row['ttft_error_fraction']:.0%}" if row["predictions"] else "-",
        "bias": _bias_text(bias) if row["predictions"] else "-",
        "step_error": f"{row['step_error_fraction']:.0%}" if row["reports"] else "-",
    }


def _bias_text(bias: float) -> str:
    """Which way predictions err on average."""
    return f"{abs(bias):.0%} too {'long' if bias > 0 else 'short'}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
