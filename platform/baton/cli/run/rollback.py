"""`baton rollback`: go back to an earlier configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Address, JsonFlag, Output, Timeout, backend_of, resolve_format
from baton.cli.output import OutputFormat, ProgressLines, print_report, report_errors
from baton.cli.run.rollout_options import (
    BakeOption,
    RollbackOption,
    WaitOption,
    apply_lines,
    rollout_options,
)


def rollback(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", metavar="N", min=0, help="A generation; else the last good one before."
        ),
    ] = None,
    timeout: Timeout = "10m",
    bake: BakeOption = "10s",
    wait: WaitOption = True,
    auto_rollback: RollbackOption = True,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Go back to an earlier configuration, as another generation."""
    options = rollout_options(
        timeout=timeout, bake=bake, wait=wait, rollback=auto_rollback, address=address
    )
    with report_errors():
        commands = backend_of(context).commands()
        with ProgressLines() as progress:
            report = commands.rollback(to, options, progress=progress)
    print_report(report, resolve_format(output, as_json=as_json), apply_lines)
