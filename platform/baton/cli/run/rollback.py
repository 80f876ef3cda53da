"""`baton rollback`: go back to an earlier configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Address, Json, Output, Timeout, seam_of, wanted_format
from baton.cli.output import OutputFormat, ProgressLines, print_report, reported_errors
from baton.cli.run.apply import readable
from baton.cli.run.rollout_options import Bake, Rollback, Wait, rollout_options


def rollback(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", metavar="N", min=0, help="A generation; else the last other one that was good."
        ),
    ] = None,
    timeout: Timeout = "10m",
    bake: Bake = "10s",
    wait: Wait = True,
    take_back: Rollback = True,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Go back to an earlier configuration, as another generation."""
    options = rollout_options(
        timeout=timeout, bake=bake, wait=wait, rollback=take_back, address=address
    )
    with reported_errors():
        commands = seam_of(context).commands()
        report = commands.rollback(to, options, progress=ProgressLines())
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        for line in readable(report):
            typer.echo(line)
