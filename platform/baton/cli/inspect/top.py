"""`baton top`: a screen that shows how the deployment fares, about once a second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from baton.cli.backend import AttachedDeployment
from baton.cli.bars import can_draw_blocks
from baton.cli.explain.trace import RequestOrder
from baton.cli.inspect.live_screen import console, is_terminal, watch_screen
from baton.cli.options import (
    Address,
    Interval,
    JsonFlag,
    Output,
    backend_of,
    parse_interval,
    resolve_format,
)
from baton.cli.output import OutputFormat, duration_text, print_report, report_errors
from baton.console.views import replica_views, service_view
from baton.domain.names.words import count_text

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from rich.console import Console, RenderableType

_SLOWEST_COUNT = 10
_HOUR_S = 3600.0
_JsonDict = dict[str, Any]
_SLOWEST_KEYS = (
    "request_id",
    "age_s",
    "outcome",
    "slo_class",
    "missed",
    "verdict",
    "first_token_s",
    "ended_s",
    "tpot_s",
    "prompt_tokens",
    "output_tokens",
    "prefill_replica",
    "decode_replica",
)


def top(
    context: typer.Context,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once, as where stdout is no terminal.")
    ] = False,
    interval: Interval = "1s",
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Watch goodput, pools, links and the slowest requests live.

    Ctrl-C ends it.
    """
    interval_s = parse_interval(interval)
    resolved_format = resolve_format(output, as_json=as_json)
    with report_errors(), backend_of(context).commands().attach(address=address) as deployment:
        if once or resolved_format is OutputFormat.JSON or not is_terminal():
            _print_once(_fetch_report(deployment), resolved_format)
        else:
            _watch(deployment, interval_s)


def _fetch_report(deployment: AttachedDeployment) -> dict[str, Any]:

    return top_report(
        deployment.status(),
        deployment.links(),
        deployment.requests(_SLOWEST_COUNT, order=str(RequestOrder.SLOWEST)),
    )


def _print_once(report: dict[str, Any], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_report(report, output)
        return
    from baton.cli.inspect.top_screen import Frame, History, render

    screen = console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 160)
    frame = Frame(width=screen.width, height=None, blocks=can_draw_blocks())
    screen.print(render(report, History(), frame))


def _watch(deployment: AttachedDeployment, interval_s: float) -> None:
    from baton.cli.inspect.top_screen import Frame, History, render

    history, blocks = History(), can_draw_blocks()
    last_drawn: list[dict[str, Any]] = []

    def draw(screen: Console, report: dict[str, Any], alarm: str) -> RenderableType:
        if not last_drawn or last_drawn[-1] is not report:
            history.add(report, time.monotonic())
            last_drawn[:] = [report]
        footer = f"every {interval_s:g} s; Ctrl-C ends it; 'baton trace' shows one request"
        frame = Frame(
            width=screen.width, height=screen.height, blocks=blocks, footer=footer, alarm=alarm
        )
        return render(report, history, frame)

    watch_screen(lambda: _fetch_report(deployment), draw, interval_s)


def top_report(
    status: Mapping[str, object], links: Mapping[str, object], requests: Mapping[str, object]
) -> dict[str, object]:
    """Everything of one refresh; `None` for unknown parts."""
    status_report = cast("_JsonDict", status)
    ingresses: list[_JsonDict] = status_report.get("ingresses", [])
    return {
        "endpoint": status_report.get("endpoint"),
        "model": status_report.get("model"),
        "up_s": status_report.get("up_s"),
        "generation": status_report.get("generation"),
        "ingresses": len(ingresses),
        "service": _service(status_report),
        "classes": status_report.get("classes") or [],
        "pools": _pools(status_report, ingresses),
        "links": _links(cast("list[_JsonDict]", links["links"])),
        "slowest": [
            {key: request.get(key) for key in _SLOWEST_KEYS}
            for request in cast("list[_JsonDict]", requests["requests"])
        ],
        "troubles": list(_warnings(status_report, ingresses)),
    }


def _service(status: _JsonDict) -> dict[str, object]:
    demand = status.get("demand") or {}
    return service_view(status) | {
        "offered_per_s": demand.get("requests_per_s"),
        "rejected_per_s": demand.get("rejected_per_s"),
        "prompt_tokens_per_s": demand.get("prompt_tokens_per_s"),
        "output_tokens_per_s": demand.get("output_tokens_per_s"),
        "in_flight": demand.get("in_flight"),
        "queued": demand.get("queued"),
        "slack_s": demand.get("slack_s"),
    }


def _pools(status: _JsonDict, ingresses: list[_JsonDict]) -> list[_JsonDict]:
    views = [views[0] for views in replica_views(ingresses).values()]
    return [pool | _load(pool["pool"], views) for pool in status.get("pools") or []]


def _load(pool: str, views: Iterable[Mapping[str, Any]]) -> _JsonDict:
    pool_views = [view for view in views if view["pool"] == pool]
    kv_used_fractions = [view["kv_used_fraction"] for view in pool_views]
    return {
        "running_requests": sum(view["running_requests"] for view in pool_views),
        "queued_requests": sum(view["queued_requests"] for view in pool_views),
        "kv_used_fraction": round(sum(kv_used_fractions) / len(kv_used_fractions), 4)
        if kv_used_fractions
        else None,
    }


def _links(rows: list[_JsonDict]) -> dict[str, object]:
    return {
        "pairs": len(rows),
        "states": dict(Counter(str(row["state"]) for row in rows)),
        "pulls": sum(row["pulls"] for row in rows),
        "moved_bytes": sum(row["moved_bytes"] for row in rows),
        "failures": sum(row["failures"] for row in rows),
        "worst": sorted(rows, key=_link_severity)[:8],
    }


def _link_severity(row: _JsonDict) -> tuple[bool, bool, int, float]:
    """Broken links first, then those with failures, then slow links."""
    p99_s = row["p99_s"] if row["p99_s"] is not None else 0.0
    return (row["state"] != "quarantined", row["state"] == "ok", -row["failures"], -p99_s)


def _warnings(status: _JsonDict, ingresses: list[_JsonDict]) -> Iterable[str]:
    scaling = status.get("autoscaler") or {}
    if pause_reason := scaling.get("paused_reason"):
        yield f"the autoscaler holds still: {pause_reason}"
    for pool in status.get("pools") or []:
        if pool.get("limited_by") == "max":
            yield f"pool {pool['pool']} is at its maximum, {pool['asked']} replicas are asked for"
        if trouble := pool.get("trouble"):
            yield f"pool {pool['pool']}: {trouble}"
    yield from _incidents(status)
    if silent := status.get("unresponsive_ingresses"):
        yield f"no answer from ingress {', '.join(str(row['ingress']) for row in silent)}"
    unhealthy = sum(not ingress["healthy"] for ingress in ingresses)
    if unhealthy:
        yield f"{unhealthy} of {count_text(len(ingresses), 'ingress', 'ingresses')} cannot serve"
    unreachable = {name for ingress in ingresses for name in ingress["unjoined"]}
    if unreachable:
        yield f"not joined everywhere: {', '.join(sorted(unreachable))}"
    if failures := sum(ingress.get("policy", {}).get("failures", 0) for ingress in ingresses):
        yield f"the placement policy failed {count_text(failures, 'time')}, see 'baton status'"


def _incidents(status: _JsonDict) -> Iterable[str]:
    """Replicas lost and requests rejected in the last hour."""
    losses = [loss for loss in status.get("losses") or [] if loss["age_s"] < _HOUR_S]
    if losses:
        last = losses[-1]
        yield (
            f"{count_text(len(losses), 'replica')} lost in the last hour, the last"
            f" {duration_text(last['age_s'])} ago: {last['replica_id']}, {last['detail']}"
        )
    if rejections := status.get("rejections"):
        counts = ", ".join(f"{row['requests']} {row['cause']}" for row in rejections)
        last_age_s = min(row["last_age_s"] for row in rejections)
        yield f"rejected in the last hour: {counts}, the last {duration_text(last_age_s)} ago"
