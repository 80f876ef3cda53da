"""`baton status`: what runs."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Output, seam_of
from baton.cli.output import OutputFormat, print_report, reported_errors


def status(
    context: typer.Context,
    *,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST:PORT", help="Of the Ray cluster, if not on this machine."
        ),
    ] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show what runs: pools, replicas, health."""
    with reported_errors():
        report = seam_of(context).commands().status(address=address)
    print_report(report, output)
