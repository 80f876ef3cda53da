"""`baton upgrade`: roll another version of baton out."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, Json, Output, Timeout, seam_of, wanted_format
from baton.cli.output import OutputFormat, ProgressLines, print_report, reported_errors
from baton.cli.run.rollout_options import Bake, Rollback, Wait, rollout_lines, rollout_options


def upgrade(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be replaced.")
    ] = False,
    timeout: Timeout = "10m",
    bake: Bake = "10s",
    wait: Wait = True,
    rollback: Rollback = True,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Replace every process by one that runs this version of baton.

    The environment of this command becomes theirs: it must lie in the same place on every node.
    """
    options = rollout_options(
        timeout=timeout, bake=bake, wait=wait, rollback=rollback, address=address
    )
    with reported_errors():
        from dataclasses import replace  # here: keeps --help fast

        commands = seam_of(context).commands()
        report = commands.upgrade(replace(options, dry_run=dry_run), progress=ProgressLines())
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        for line in readable(report):
            typer.echo(line)


def readable(report: Report) -> list[str]:
    """What was replaced, then what came of it."""
    told = cast("dict[str, Any]", report)
    if told["code"] is None:
        return ["what runs is of this version already"]
    before, after = told["code"]
    if told["outcome"] == "dry run":
        names = ", ".join(told["replaced"])
        return [f"baton {before} -> {after} would replace {names}; nothing has changed"]
    if told["outcome"] == "ordered":
        return [f"baton {before} -> {after} is ordered; nobody watches it, 'baton status' shows it"]
    return [*rollout_lines(told), f"baton {before} -> {after} in {told['took_s']:.1f} s"]
