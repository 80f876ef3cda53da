"""`baton apply`: have a running deployment go by another configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import (
    Address,
    ConfigFiles,
    JsonFlag,
    Output,
    SetOptions,
    Timeout,
    backend_of,
    load_files,
    resolve_format,
)
from baton.cli.output import OutputFormat, ProgressLines, print_report, report_errors
from baton.cli.run.rollout_options import (
    BakeOption,
    RollbackOption,
    WaitOption,
    rollout_lines,
    rollout_options,
)


def apply(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: SetOptions = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show only the differences and their effects.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Ask every ingress whether it accepts it; change nothing."),
    ] = False,
    allow_restart: Annotated[
        bool,
        typer.Option(
            "--allow-restart",
            help="Drain, end and start the deployment again where a change takes that.",
        ),
    ] = False,
    wait: WaitOption = True,
    rollback: RollbackOption = True,
    bake: BakeOption = "10s",
    timeout: Timeout = "10m",
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Apply a configuration: all of it, or nothing."""
    backend = backend_of(context)
    options = rollout_options(
        timeout=timeout, bake=bake, wait=wait, rollback=rollback, address=address
    )
    with report_errors():
        from dataclasses import replace  # here: keeps --help fast

        options = replace(options, diff=diff, dry_run=dry_run, allow_restart=allow_restart)
        loaded_config = load_files(context, config, sets)
        report = backend.commands().apply(loaded_config, options, progress=ProgressLines())
    if resolve_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        for line in report_lines(report):
            typer.echo(line)


def report_lines(report: Report) -> list[str]:
    """Each change under what it takes, then what came of it."""
    result = cast("dict[str, Any]", report)
    lines: list[str] = []
    changes = _without_duplicates(result["changes"])
    for reload in dict.fromkeys(change["reload"] for change in changes):
        lines.append(f"{reload}:")
        lines += [f"  {change['change']}" for change in changes if change["reload"] == reload]
    if histograms := result.get("histograms"):
        lines.append("histograms with other edges, which begin new series (label edges):")
        lines += [f"  {changed}" for changed in histograms]
    for pool, (previous_replicas, replicas) in result.get("resized", {}).items():
        lines.append(f"{pool}: {previous_replicas} -> {replicas} replicas")
    return [*lines, *rollout_lines(result), _outcome(result)]


def _without_duplicates(changes: list[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Changes without those of a model's engine that show again in the pools that they reach."""
    of_pools = {_engine_key(change, "pools") for change in changes} - {None}
    return [change for change in changes if _engine_key(change, "models") not in of_pools]


def _engine_key(change: Mapping[str, str], section: str) -> str | None:
    """`block_size: 16 -> 32` of `models.tiny.engine.block_size: 16 -> 32`; None for other keys."""
    root, _, path = change["change"].partition(".")
    _, is_engine, key = path.partition(".engine.")
    return key if root == section and is_engine else None


def _outcome(result: Mapping[str, Any]) -> str:
    generation = result["generation"]
    if not result["changes"]:
        return f"nothing differs from generation {generation}"
    match result["outcome"]:
        case "shown":
            return f"nothing has changed, generation {generation} holds"
        case "dry run":
            return f"everybody could take it; nothing has changed, generation {generation} holds"
        case "ordered":
            return f"generation {generation} holds; nobody watches its replicas: 'baton status'"
        case "restarted":
            return f"started again at {result['endpoint']}"
        case _:
            return f"applied as generation {generation} in {result['took_s']:.2f} s"
