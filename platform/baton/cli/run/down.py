"""`baton down`: drain and stop a deployment."""

from __future__ import annotations

import typer

from baton.cli.options import Address, Output, Timeout, backend_of, parse_seconds
from baton.cli.output import OutputFormat, ProgressLines, print_report, report_errors
from baton.runtime.process.progress import RepeatedProgress


def down(
    context: typer.Context,
    *,
    timeout: Timeout = "60s",
    address: Address = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Drain and stop the deployment; a cluster that ran before goes on."""
    timeout_s = parse_seconds(timeout)
    with report_errors():
        commands = backend_of(context).commands()
        with ProgressLines() as lines, RepeatedProgress(lines).repeating("draining and stopping"):
            report = commands.down(timeout_s=timeout_s, address=address)
    print_report(report, output)
