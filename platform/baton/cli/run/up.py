"""`baton up`: start a deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from baton.cli.options import (
    AllowOpenCluster,
    AllowUntested,
    OptionalConfigFiles,
    Output,
    SetOptions,
    backend_of,
    config_overrides,
    load_files,
    parse_seconds,
)
from baton.cli.output import (
    OutputFormat,
    ProgressLines,
    TextStyle,
    print_report,
    report_errors,
    styled,
)
from baton.cli.run.init import DECODE, GPU, MODEL, PREFILL, TP, starter_text, write_new

AFTER_FAILED_START = "correct the errors above and start again; 'baton doctor' checks this machine"
_WRITE = typer.Option(
    "--write", metavar="FILE", help="Keep the configuration that was made up in a new file."
)


def up(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    model: Annotated[str | None, MODEL] = None,
    *,
    config: OptionalConfigFiles = None,
    gpu: Annotated[str | None, GPU] = None,
    prefill: Annotated[int, PREFILL] = 1,
    decode: Annotated[int, DECODE] = 1,
    tp: Annotated[int | None, TP] = None,
    write: Annotated[Path | None, _WRITE] = None,
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

    With a MODEL, it makes a configuration up and prints it.
    On a Ray cluster that runs already (--ray-address, cluster.address or RAY_ADDRESS) it deploys
    and returns: nothing has to hold it.
    """
    timeout_s = None if timeout is None else parse_seconds(timeout)
    if (model is None) == (not config):
        raise typer.BadParameter("give one of MODEL and --config FILE", param_hint="MODEL")
    if model is None and (gpu, prefill, decode, tp, write) != (None, 1, 1, None, None):
        raise typer.BadParameter(
            "--gpu, --prefill, --decode, --tp and --write make a configuration for MODEL;"
            " with --config, change the file or use --set",
            param_hint="MODEL",
        )
    backend = backend_of(context)
    with report_errors(after_failure=AFTER_FAILED_START), ExitStack() as stack:
        files = config or []
        if model is not None:
            text = starter_text(context, model, gpu=gpu, prefill=prefill, decode=decode, tp=tp)
            files = [stack.enter_context(_kept(text, write))]
        loaded_config = load_files(
            context,
            files,
            [
                *config_overrides(sets, allow_untested=allow_untested),
                *([] if ray_address is None else [f"cluster.address={json.dumps(ray_address)}"]),
                *(["cluster.allow_open=true"] if allow_open else []),
            ],
        )
        with ProgressLines() as progress:
            report = backend.commands().up(
                loaded_config, block=not detach, timeout_s=timeout_s, progress=progress
            )
    print_report(report, output)


@contextmanager
def _kept(text: str, write: Path | None) -> Iterator[Path]:
    """A file with a configuration that was made up; it is printed, and kept where it is asked."""
    for line in text.splitlines():
        typer.echo(styled(line, TextStyle.DIM, err=True), err=True)
    if write is not None:
        write_new(write, text)
        yield write
        return
    with TemporaryDirectory(prefix="baton-") as folder:
        path = Path(folder) / "baton.yaml"
        path.write_text(text, encoding="utf-8")
        yield path
