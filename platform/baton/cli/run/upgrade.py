"""`baton upgrade`: roll another version of baton out."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, Timeout, backend_of, resolve_format
from baton.cli.output import OutputFormat, ProgressLines, print_report, report_errors
from baton.cli.run.rollout_options import (
    BakeOption,
    RollbackOption,
    WaitOption,
    rollout_lines,
    rollout_options,
)


def upgrade(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show only the processes to replace.")
    ] = False,
    timeout: Timeout = "10m",
    bake: BakeOption = "10s",
    wait: WaitOption = True,
    rollback: RollbackOption = True,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Replace every process by a process of this version of baton.

    The environment of this command becomes theirs: it must lie in the same place on every node.
    """
    options = rollout_options(
        timeout=timeout, bake=bake, wait=wait, rollback=rollback, address=address
    )
    with report_errors():
        from dataclasses import replace  # here: keeps --help fast

        commands = backend_of(context).commands()
        with ProgressLines() as progress:
            report = commands.upgrade(replace(options, dry_run=dry_run), progress=progress)
    print_report(report, resolve_format(output, as_json=as_json), report_lines)


def report_lines(report: Report) -> list[str]:
    """The replaced processes, then the results."""
    result = cast("dict[str, Any]", report)
    if result["code"] is None:
        return ["what runs is of this version already"]
    before, after = result["code"]
    if result["outcome"] == "dry run":
        names = ", ".join(result["replaced"])
        return [f"baton {before} -> {after} would replace {names}; nothing has changed"]
    if result["outcome"] == "ordered":
        return [f"baton {before} -> {after} is ordered and not watched; 'baton status' shows it"]
    return [*rollout_lines(result), f"baton {before} -> {after} in {result['took_s']:.1f} s"]
