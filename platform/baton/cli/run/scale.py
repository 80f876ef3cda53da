"""`baton scale`: an operator's override of a pool's replicas, for a time or until removed."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, JsonFlag, Output, backend_of, parse_seconds, resolve_format
from baton.cli.output import OutputFormat, duration_text, print_report, report_errors
from baton.domain.names.words import count_text


def scale(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Pool, as in the configuration.")],
    replicas: Annotated[
        int | None, typer.Argument(metavar="N", min=0, help="Number of replicas.")
    ] = None,
    *,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="Time that it holds, as 30m; else for good."
        ),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Take it back: the pool is scaled as configured again.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Set a pool's replicas, in place of the autoscaler."""
    if auto == (replicas is not None):
        raise typer.BadParameter("expected either a number of replicas or --auto", param_hint="N")
    if auto and duration is not None:
        raise typer.BadParameter("--auto takes effect at once and for good", param_hint="--for")
    for_s = None if duration is None else parse_seconds(duration, "--for")
    with report_errors():
        commands = backend_of(context).commands()
        if replicas is None:
            report = commands.scale_auto(pool, address=address)
        else:
            report = commands.scale(pool, replicas, for_s=for_s, address=address)
    if resolve_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        typer.echo(report_line(report))


def report_line(report: Report) -> str:
    """The next steps, in one line."""
    result = cast("dict[str, Any]", report)
    pool, previous, target = result["pool"], result["had"], result["target"]
    text = (
        f"{pool}: {previous} -> {count_text(target, 'replica')}"
        if previous != target
        else f"{pool}: {count_text(previous, 'replica')}"
    )
    change = target - previous
    if change > 0:
        text += f", {change} starting"
    elif change < 0:
        text += f", {-change} draining before they stop"
    if result["override"] is None:
        return f"{text}; from now on {result['autoscaler']}"
    remaining_s = result["override"]["remaining_s"]
    if remaining_s is None:
        return f"{text}; stays so until 'baton scale {pool} --auto'"
    return f"{text}; stays so for {duration_text(remaining_s)}"
