"""`baton scale`: an operator says how many replicas a pool has, for a while or until told."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, Json, Output, seam_of, seconds, wanted_format
from baton.cli.output import OutputFormat, duration_text, print_report, reported_errors


def scale(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="As in the configuration.")],
    replicas: Annotated[
        int | None, typer.Argument(metavar="N", min=0, help="Exactly so many replicas.")
    ] = None,
    *,
    duration: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="How long it holds, as 30m; else for good."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Take it back: the pool is scaled as configured again.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Set a pool's replicas, whatever the autoscaler wants."""
    if auto == (replicas is not None):
        raise typer.BadParameter("wanted either a number of replicas or --auto", param_hint="N")
    if auto and duration is not None:
        raise typer.BadParameter("--auto takes effect at once and for good", param_hint="--for")
    for_s = None if duration is None else seconds(duration, "--for")
    with reported_errors():
        commands = seam_of(context).commands()
        if replicas is None:
            report = commands.scale_auto(pool, address=address)
        else:
            report = commands.scale(pool, replicas, for_s=for_s, address=address)
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        typer.echo(readable(report))


def readable(report: Report) -> str:
    """What happens now, in one line."""
    told = cast("dict[str, Any]", report)
    pool, had, target = told["pool"], told["had"], told["target"]
    what = f"{pool}: {had} -> {target} replicas" if had != target else f"{pool}: {had} replicas"
    change = target - had
    if change > 0:
        what += f", {change} starting"
    elif change < 0:
        what += f", {-change} draining before they stop"
    if told["override"] is None:
        return f"{what}; from now on {told['autoscaler']}"
    remaining_s = told["override"]["remaining_s"]
    if remaining_s is None:
        return f"{what}; stays so until 'baton scale {pool} --auto'"
    return f"{what}; stays so for {duration_text(remaining_s)}"
