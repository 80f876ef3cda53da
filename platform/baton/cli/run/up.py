"""`baton up`: start a deployment."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from baton.cli.options import (
    AllowOpenCluster,
    AllowUntested,
    ConfigFiles,
    Output,
    SetOptions,
    backend_of,
    config_overrides,
    load_files,
    parse_seconds,
)
from baton.cli.output import OutputFormat, ProgressLines, print_report, report_errors


def up(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: SetOptions = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is healthy instead of staying.")
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT",
            help="Address of a running Ray cluster to deploy to; else RAY_ADDRESS.",
        ),
    ] = None,
    allow_open: AllowOpenCluster = False,
    allow_untested: AllowUntested = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            help="Time limit, as 90s or 5m; by default as long as engines may take.",
        ),
    ] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Start a deployment, and hold it until Ctrl-C.

    On a Ray cluster that runs already (--ray-address, cluster.address or RAY_ADDRESS) it deploys
    and returns: nothing has to hold it.
    """
    timeout_s = None if timeout is None else parse_seconds(timeout)
    backend = backend_of(context)
    with report_errors():
        loaded_config = load_files(
            context,
            config,
            [
                *config_overrides(sets, allow_untested=allow_untested),
                *([] if ray_address is None else [f"cluster.address={json.dumps(ray_address)}"]),
                *(["cluster.allow_open=true"] if allow_open else []),
            ],
        )
        report = backend.commands().up(
            loaded_config, block=not detach, timeout_s=timeout_s, progress=ProgressLines()
        )
    print_report(report, output)
