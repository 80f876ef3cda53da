"""`baton explain scale`: recent decisions of the autoscaler, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import (
    OutputFormat,
    duration_text,
    print_report,
    report_errors,
    table_lines,
)
from baton.console.views import tick_runs

JsonDict = dict[str, Any]


def scale(
    context: typer.Context,
    *,
    ticks: Annotated[
        int,
        typer.Option(
            "--ticks", "-n", min=1, max=1000, help="Number of decisions, the newest first."
        ),
    ] = 20,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show the decisions of the autoscaler, and their inputs.

    Per pool what it has and is to have, why, and from which numbers.
    """
    with report_errors():
        report = backend_of(context).commands().explain_scale(ticks, address=address)
    print_report(report, resolve_format(output, as_json=as_json), report_lines)


def report_lines(report: Report) -> Iterator[str]:
    """The report as lines for a person; ticks in a row with the same decision are one line."""
    yield f"autoscaler: {report['autoscaler']}"
    ticks = cast("list[JsonDict]", report["ticks"])
    if not ticks:
        yield "no tick yet"
    for run in reversed(tick_runs(ticks)):
        yield ""
        yield from _run_lines(run)


def _run_lines(run: JsonDict) -> Iterator[str]:
    """Lines of a run, with the numbers of its newest tick."""
    when = f"{duration_text(run['age_s'])} ago"
    if run["ticks"] > 1:
        when = f"{duration_text(run['first_age_s'])} to {when}, {run['ticks']} ticks"
    yield f"{when}, policy {run['policy']}: {_outcome(run)}"
    if pools := run["pools"]:
        yield from table_lines([_pool_row(pool) for pool in pools], "  ")
    for pool in pools:
        if pool["detail"]:
            yield f"  {pool['pool']}: {pool['detail']}"
        if inputs := _inputs_text(pool["inputs"]):
            yield f"    {inputs}"


def _outcome(tick: JsonDict) -> str:
    if tick["paused_reason"]:
        return f"paused, because {tick['paused_reason']}"
    if tick["actions"]:
        return ", ".join(tick["actions"])
    return "would act, but this is a dry run" if _would_act(tick) else "no change"


def _would_act(tick: JsonDict) -> bool:
    return tick["dry_run"] and any(p["have"] != p["desired"] or p["flips"] for p in tick["pools"])


def _pool_row(pool: JsonDict) -> dict[str, object]:
    unclipped = "" if pool["asked"] == pool["desired"] else f"{pool['asked']} asked"
    clipped = f"{unclipped}, clipped by {pool['clipped_by']}" if pool["clipped_by"] else unclipped
    flips = ", ".join(f"{count} as {role}" for role, count in pool["flips"].items() if count)
    return {
        "pool": pool["pool"],
        "have": pool["have"],
        "desired": pool["desired"],
        "reason": pool["reason"],
        "bounds": clipped.removeprefix(", ") or "-",
        "flips": flips or "-",
    }


def _inputs_text(inputs: dict[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in inputs.items()
    )
