"""`baton status`: the running deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.inspect.live_screen import is_terminal, repeat, watch_screen
from baton.cli.options import (
    Address,
    Interval,
    JsonFlag,
    Output,
    backend_of,
    parse_interval,
    resolve_format,
)
from baton.cli.output import (
    OutputFormat,
    Styled,
    attainment_style,
    duration_text,
    print_report,
    report_errors,
    share_text,
    text_lines,
)
from baton.console.views import OUT_OF_STEP, index_state, replica_state, replica_views
from baton.domain.names.words import count_text, few

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from rich.console import Console, RenderableType

JsonDict = dict[str, Any]
_SHOWN_LOSSES = 8
_SHOWN_ID = 8
"""Digits of Ray's id of a node."""


def status(
    context: typer.Context,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")
    ] = False,
    interval: Interval = "2s",
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show what runs: pools, replicas, health.

    With --watch and where stdout is no terminal, reports follow each other; as JSON, one a line.
    """
    output, interval_s = resolve_format(output, as_json=as_json), parse_interval(interval)
    with report_errors():
        commands = backend_of(context).commands()
        if not watch:
            _print(commands.status(address=address), output)
            return
        with commands.attach(address=address) as deployment:
            if output is OutputFormat.TEXT and is_terminal():
                watch_screen(deployment.status, _render, interval_s)
            else:
                repeat(deployment.status, lambda report: _print(report, output), interval_s)


def _print(report: Report, output: OutputFormat) -> None:
    print_report(text_report(report) if output is OutputFormat.TEXT else report, output)


def _render(screen: Console, report: Report, alarm: str) -> RenderableType:
    """Cut to the screen; an alarm is the last line."""
    from rich.text import Text

    lines = [Text.from_ansi(line) for line in text_lines(text_report(report))]
    max_lines = screen.height - bool(alarm)
    hidden = len(lines) - max_lines
    if hidden > 0:
        lines = [
            *lines[: max_lines - 1],
            Text(f"... {hidden + 1} more lines; 'baton top' fits the screen"),
        ]
    for line in lines:
        line.truncate(screen.width)
    text = Text("\n").join(lines)
    return text.append(f"\n{alarm}", style="red") if alarm else text


def text_report(report: Report) -> Report:
    """The report for a person: one table of replicas, one line for each ingress.

    Every ingress sees the whole fleet: the first that has reached a replica gives its row.
    """
    ingresses = cast("list[JsonDict]", report.get("ingresses", []))
    views = replica_views(ingresses)
    # Where the controller does not answer, what ingresses see is all there is.
    seen = [{"replica_id": name, "role": views[name][0].get("role")} for name in sorted(views)]
    members = cast("list[JsonDict]", report.get("members", seen))
    shown = {("up" if key == "up_s" else key): value for key, value in report.items()}
    if "up" in shown:
        shown["up"] = duration_text(cast("float", shown["up"]))
    for name in (
        *("wanted", "members", "pools", "classes", "demand", "autoscaler"),
        *("lost_nodes", "losses", "rejections"),
    ):
        shown.pop(name, None)
    if rollout := cast("JsonDict", report.get("rollout")):
        shown["rollout"] = _rollout_text(rollout)
    shown |= _service_rows(report)
    shown["replicas"] = [
        _replica_row(member, views.get(member["replica_id"], [])) for member in members
    ]
    shown |= incident_rows(report)
    if timings := [row for ingress in ingresses[:1] for row in ingress.get("timings", [])]:
        shown["predictions"] = [_timing_row(row) for row in timings]
    shown["ingresses"] = [
        *(_ingress_row(ingress) for ingress in ingresses),
        *(
            {**silent, "healthy": "no answer"}
            for silent in cast("list[JsonDict]", shown.pop("unresponsive_ingresses", []))
        ),
    ]
    if failed_agents := {
        name: reason for ingress in ingresses for name, reason in _failed_agents(ingress).items()
    }:
        shown["broken_agents"] = failed_agents
    if failures := [text for ingress in ingresses if (text := _policy_failure(ingress))]:
        shown["placement_failures"] = failures
    return shown


def _ingress_row(ingress: JsonDict) -> JsonDict:
    return {
        "ingress": ingress.get("ingress"),
        "node": ingress.get("node"),
        "pid": ingress.get("pid"),
        "healthy": ingress["healthy"],
        "generation": ingress.get("generation"),
        "in_flight": _counts_text(ingress["in_flight"]),
        "ended": _counts_text(ingress["ended"]),
        "not_joined": len(ingress["unjoined"]),
    }


def incident_rows(report: Report) -> Report:
    """Nodes and replicas that were lost, and requests that were rejected in the last hour."""
    rows: dict[str, object] = {}
    if nodes := cast("list[JsonDict]", report.get("lost_nodes")):
        rows["lost_nodes"] = [
            {
                "node": node["node"],
                "node_id": node["node_id"][:_SHOWN_ID],
                "when": f"{duration_text(node['age_s'])} ago",
                "ran": few(node["replicas"], separator=", ") or "nothing of the deployment",
                "reason": node["reason"],
            }
            for node in nodes[:_SHOWN_LOSSES]
        ]
    if losses := cast("list[JsonDict]", report.get("losses")):
        rows["losses"] = [
            {
                "replica_id": loss["replica_id"],
                "when": f"{duration_text(loss['age_s'])} ago",
                "reason": loss["reason"],
                "detail": loss["detail"],
            }
            for loss in losses[-_SHOWN_LOSSES:]
        ]
    if rejections := cast("list[JsonDict]", report.get("rejections")):
        rows["rejections"] = [
            {
                "cause": row["cause"],
                "status": row["status"],
                "in_last_hour": row["requests"],
                "last": f"{duration_text(row['last_age_s'])} ago",
                "reason": row["reason"],
            }
            for row in rejections
        ]
    return rows


def _rollout_text(rollout: JsonDict) -> str:
    generation = rollout.get("generation")
    title = rollout["what"] if generation is None else f"{rollout['what']}, generation {generation}"
    # An earlier build stored the text as `why`.
    text = rollout.get("reason") or rollout.get("why")
    reason = f": {text}" if text else ""
    return f"{title}, {rollout['state']} {duration_text(rollout['age_s'])} ago{reason}"


def _policy_failure(ingress: JsonDict) -> str:
    """Failures of a custom policy; empty without any."""
    policy = ingress.get("policy", {})
    if not policy.get("failures"):
        return ""
    times = count_text(policy["failures"], "time")
    return f"{policy['name']} failed {times}, the last: {policy['last_failure']}"


def _service_rows(report: Report) -> Report:
    """Results of requests, queues, and scaling of pools."""
    rows: dict[str, object] = {}
    if scaling := cast("JsonDict", report.get("autoscaler")):
        rows["autoscaler"] = _scaling_text(scaling)
        if overrides := scaling["overrides"]:
            rows["by_hand"] = [_override_text(override) for override in overrides]
        if failure := scaling["last_failure"]:
            failure_count = scaling["failed_calls"] + scaling["failed_turns"]
            rows["scaling_failures"] = f"{failure_count}, the last: {failure}"
    if demand := cast("JsonDict", report.get("demand")):
        rows["admission"] = _admission_text(demand)
    if pools := cast("list[JsonDict]", report.get("pools")):
        rows["pools"] = [_pool_row(pool) for pool in pools]
    if classes := cast("list[JsonDict]", report.get("classes")):
        rows["classes"] = [_styled_class_row(class_) for class_ in classes]
    return rows


def _scaling_text(scaling: JsonDict) -> str:
    text = str(scaling["policy"])
    if pause_reason := scaling["paused_reason"]:
        return f"{text}; paused, because {pause_reason}"
    if (last_action := scaling["last_action"]) is not None:
        return (
            f"{text}; last {', '.join(last_action['actions'])},"
            f" {duration_text(last_action['age_s'])} ago"
        )
    return text


def _override_text(override: JsonDict) -> str:
    remaining_s = override["remaining_s"]
    duration = "until removed" if remaining_s is None else f"for {duration_text(remaining_s)} more"
    return f"{override['pool']} at {override['replicas']} {duration}"


def _admission_text(demand: JsonDict) -> str:
    text = (
        f"{demand['requests_per_s']:g} requests/s, {demand['rejected_per_s']:g} rejected/s, "
        f"{demand['in_flight']} in flight, {demand['queued']} queued"
    )
    slack_s = demand["slack_s"]
    if slack_s is None:
        return text
    slack_label = "is late by" if slack_s < 0 else "has left"
    return f"{text}; the most urgent {slack_label} {duration_text(abs(slack_s))}"


def roles_text(pool: JsonDict) -> str:
    """A pool's replicas by role."""
    role_counts = {role: pool.get(role) for role in ("prefill", "decode", "mixed")}
    return ", ".join(f"{count} {role}" for role, count in role_counts.items() if count) or "-"


def bounds_text(pool: JsonDict) -> str:
    """Which bound limits a pool, and how many replicas the scaling policy asks for."""
    return f"{pool['limited_by']}, asked for {pool['asked']}"


def _pool_row(pool: JsonDict) -> dict[str, object]:
    row = {name: pool[name] for name in ("pool", "desired", "ready", "starting", "draining")}
    if "prefill" in pool:
        row["roles"] = roles_text(pool)
        row["busy"] = "-" if pool["busy"] is None else f"{pool['busy']:.0%}"
        row["cold_start"] = duration_text(pool["cold_start_s"])
    if "limited_by" in pool:
        row["bounds"] = bounds_text(pool)
    if "trouble" in pool:
        row["trouble"] = pool["trouble"]
    return row


def class_row(slo_class: JsonDict) -> dict[str, str]:
    """A class' objectives, attainment and goodput."""
    return {
        "class": str(slo_class["class"]),
        "ttft": duration_text(slo_class["ttft_s"]),
        "tpot": duration_text(slo_class["tpot_s"]),
        "target": share_text(slo_class["target"]),
        "now": share_text(slo_class["attainment"]),
        "window": share_text(slo_class["window_attainment"]),
        "goodput": f"{slo_class['goodput_per_s']:g} of {slo_class['requests_per_s']:g}/s",
    }


def _styled_class_row(slo_class: JsonDict) -> dict[str, object]:
    row, target = class_row(slo_class), slo_class["target"]
    return row | {
        "now": Styled(row["now"], attainment_style(slo_class["attainment"], target)),
        "window": Styled(row["window"], attainment_style(slo_class["window_attainment"], target)),
    }


def _failed_agents(ingress: JsonDict) -> Mapping[str, str]:
    return ingress.get("broken_agents") or {}


def _replica_row(member: JsonDict, views: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    row = {name: member.get(name) for name in ("replica_id", "role", "node", "pid")}
    row["state"] = replica_state(views)
    if not views:
        return row
    view = views[0]
    if view.get("role", row["role"]) != row["role"]:
        row["role"] = f"{view['role']}, was {row['role']}"
    return (
        row
        | {
            "engine": view["engine"],
            "running": view["running_requests"],
            "queued": view["queued_requests"],
            "kv_used": view["kv_used_fraction"],
            "pulls": view["pulls"],
            "moved_bytes": view["moved_bytes"],
        }
        | _cache_cells(views)
        | _lease_cells(views)
    )


def _cache_cells(views: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The first view's index of a replica, and the worst state of all views."""
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


def _index_text(caches: list[JsonDict]) -> str:
    state, age_s = index_state(caches), caches[0]["age_s"]
    if age_s is not None:
        return f"{state}, {duration_text(age_s)} old"
    return f"{state}, never reported" if state == OUT_OF_STEP else "never reported"


def _lease_cells(views: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """A sum: each ingress knows only its own."""
    counts = [view["leases"] for view in views if "leases" in view]
    return {"leases": sum(counts)} if counts else {}


def _timing_row(row: JsonDict) -> dict[str, object]:
    bias = row["ttft_bias_fraction"]
    return {
        "pool": row["pool"],
        "requests": row["predictions"],
        "ttft_error": f"{row['ttft_error_fraction']:.0%}" if row["predictions"] else "-",
        "bias": _bias_text(bias) if row["predictions"] else "-",
        "step_error": f"{row['step_error_fraction']:.0%}" if row["reports"] else "-",
    }


def _bias_text(bias: float) -> str:
    return f"{abs(bias):.0%} too {'long' if bias > 0 else 'short'}"


def _counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
