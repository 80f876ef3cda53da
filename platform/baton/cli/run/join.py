"""`baton join`: commands for another machine to become a node of a deployment's cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import JsonFlag, LocalAddress, Output, backend_of, resolve_format
from baton.cli.output import OutputFormat, print_report, report_errors


def _label(text: str) -> str:
    name, equals, value = text.partition("=")
    if not (name and equals and value) or "," in text:
        raise typer.BadParameter(f"got {text!r}, expected KEY=VALUE, as baton/node=prefill")
    return text


def join(
    context: typer.Context,
    *,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            parser=_label,
            help="Label of that node, as in placement.labels; repeatable.",
        ),
    ] = None,
    node_address: Annotated[
        str | None,
        typer.Option(
            "--node-address",
            metavar="ADDRESS",
            help="Address of that node for other nodes, if it has several.",
        ),
    ] = None,
    address: LocalAddress = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Print what another machine runs to join the deployment's cluster.

    It is a shell script that holds the cluster's token: pipe it, as in
    `baton join --label baton/node=decode | ssh NODE sh`.
    """
    with report_errors():
        report = (
            backend_of(context)
            .commands()
            .join_script(labels=label or [], node_address=node_address, address=address)
        )
    output = resolve_format(output, as_json=as_json)
    if output is OutputFormat.TEXT:
        typer.echo(report["script"])
    else:
        print_report(report, output)
