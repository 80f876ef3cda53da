"""`baton apply`: have a running deployment go by another configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import (
    Address,
    ConfigFiles,
    Json,
    Output,
    Sets,
    Timeout,
    seam_of,
    wanted_format,
)
from baton.cli.output import OutputFormat, ProgressLines, print_report, reported_errors
from baton.cli.run.rollout_options import Bake, Rollback, Wait, rollout_lines, rollout_options


def apply(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: Sets = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Only show what differs, and what it would take.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Also ask every ingress whether it could; change nothing."),
    ] = False,
    allow_restart: Annotated[
        bool,
        typer.Option(
            "--allow-restart",
            help="Drain, end and start the deployment again where a change takes that.",
        ),
    ] = False,
    wait: Wait = True,
    rollback: Rollback = True,
    bake: Bake = "10s",
    timeout: Timeout = "10m",
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Apply a configuration to what runs: all of it, or nothing."""
    seam = seam_of(context)
    options = rollout_options(
        timeout=timeout, bake=bake, wait=wait, rollback=rollback, address=address
    )
    with reported_errors():
        from dataclasses import replace  # here: keeps --help fast

        from baton.config import load_config

        options = replace(options, diff=diff, dry_run=dry_run, allow_restart=allow_restart)
        loaded = load_config(config, env=seam.environ, sets=sets or ())
        report = seam.commands().apply(loaded, options, progress=ProgressLines())
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        for line in readable(report):
            typer.echo(line)


def readable(report: Report) -> list[str]:
    """Each change under what it takes, then what came of it."""
    told = cast("dict[str, Any]", report)
    lines: list[str] = []
    changes = _told_once(told["changes"])
    for reload in dict.fromkeys(change["reload"] for change in changes):
        lines.append(f"{reload}:")
        lines += [f"  {change['change']}" for change in changes if change["reload"] == reload]
    if histograms := told.get("histograms"):
        lines.append("histograms with other edges, which begin new series (label edges):")
        lines += [f"  {changed}" for changed in histograms]
    for pool, (had, count) in told.get("resized", {}).items():
        lines.append(f"{pool}: {had} -> {count} replicas")
    return [*lines, *rollout_lines(told), _outcome(told)]


def _told_once(changes: list[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Changes without those of a model's engine that show again in the pools that they reach."""
    of_pools = {_engine_key(change, "pools") for change in changes} - {None}
    return [one for one in changes if _engine_key(one, "models") not in of_pools]


def _engine_key(change: Mapping[str, str], section: str) -> str | None:
    """`block_size: 16 -> 32` of `models.tiny.engine.block_size: 16 -> 32`; None for other keys."""
    first, _, rest = change["change"].partition(".")
    _, is_engine, key = rest.partition(".engine.")
    return key if first == section and is_engine else None


def _outcome(told: Mapping[str, Any]) -> str:
    generation = told["generation"]
    if not told["changes"]:
        return f"nothing differs from generation {generation}"
    match told["outcome"]:
        case "shown":
            return f"nothing has changed, generation {generation} holds"
        case "dry run":
            return f"everybody could take it; nothing has changed, generation {generation} holds"
        case "ordered":
            return f"generation {generation} holds; nobody watches its replicas: 'baton status'"
        case "restarted":
            return f"started again at {told['endpoint']}"
        case _:
            return f"applied as generation {generation} in {told['took_s']:.2f} s"
