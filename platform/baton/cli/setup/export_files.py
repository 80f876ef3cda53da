"""`baton dashboards export`, `baton rules export`: files for Grafana and Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import OutputFormat, print_report, report_errors
from baton.domain.errors import OperatorError

_Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder for the files; made where it is missing.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files that differ, too.")]
_MAX_NAMED = 5


class FilesDiffer(OperatorError):
    """Files are there already, and are not what would be written."""


def dashboards(
    context: typer.Context,
    folder: _Folder,
    *,
    force: Force = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Write the Grafana dashboards into a folder.

    With them goes what provisions Grafana, and the scrape configuration of Prometheus.
    """
    with report_errors():
        report = write_files(backend_of(context).dashboards(), folder, force=force)
    print_written(
        report, resolve_format(output, as_json=as_json), "import them in Grafana, or provision DIR"
    )


def rules(
    context: typer.Context,
    folder: _Folder,
    *,
    runbook_base: Annotated[
        str | None,
        typer.Option(
            "--runbook-base", metavar="URL", help="Base URL of the runbooks that alerts link to."
        ),
    ] = None,
    force: Force = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Write the rules for Prometheus into a folder.

    Recording rules and alerts; a rule file serves every configuration.
    """
    with report_errors():
        report = write_files(backend_of(context).rules(runbook_base), folder, force=force)
    print_written(
        report, resolve_format(output, as_json=as_json), "name them under rule_files in Prometheus"
    )


def write_files(files: Mapping[str, bytes], folder: Path, *, force: bool) -> Mapping[str, object]:
    """Put files into a folder, and say which were written and which were there already.

    Raises:
        FilesDiffer: some are there with other content, and `force` was not given; then nothing
            was written.
        OSError: a file or a folder cannot be written.
    """
    existing = {name: _read_if_exists(folder / name) for name in files}
    differing = [name for name, content in existing.items() if content not in {None, files[name]}]
    if differing and not force:
        names = ", ".join(differing[:_MAX_NAMED]) + (", ..." if differing[_MAX_NAMED:] else "")
        raise FilesDiffer(
            f"{folder}: {len(differing)} of {len(files)} files are there and differ: {names}",
            "write to another folder, or replace them with --force",
        )
    to_write = [name for name, content in existing.items() if content != files[name]]
    for name in to_write:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
    unchanged = [name for name in files if name not in to_write]
    return {
        "folder": str(folder),
        "written": to_write,
        "replaced": differing,
        "unchanged": unchanged,
    }


def _read_if_exists(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def print_written(report: Mapping[str, object], output: OutputFormat, next_step: str) -> None:
    """Print which files were written, and the next step."""
    if output is OutputFormat.JSON:
        print_report(report, output)
        return
    written, unchanged = report["written"], report["unchanged"]
    assert isinstance(written, list)
    assert isinstance(unchanged, list)
    for name in written:
        typer.echo(str(Path(str(report["folder"])) / name))
    unchanged_text = f", {len(unchanged)} were there already" if unchanged else ""
    typer.echo(f"{len(written)} files written{unchanged_text}; {next_step}", err=True)
