"""`baton apply`: have a running deployment go by another configuration."""

from __future__ import annotations

from typing import Annotated

import typer

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
    apply_lines,
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
        with ProgressLines() as progress:
            report = backend.commands().apply(loaded_config, options, progress=progress)
    print_report(report, resolve_format(output, as_json=as_json), apply_lines)
