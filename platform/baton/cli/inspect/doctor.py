"""`baton doctor`: problems here, their effects, and their fixes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.endpoint import CaFile, KeyFile, parse_headers
from baton.cli.options import (
    Address,
    JsonFlag,
    Output,
    SetOptions,
    backend_of,
    load_files,
    resolve_format,
)
from baton.cli.output import (
    ExitCode,
    OutputFormat,
    ProgressLines,
    TextStyle,
    print_report,
    report_errors,
    styled,
)

JsonDict = dict[str, Any]
_STATUS_STYLES = {
    "PASS": TextStyle.GOOD,
    "WARN": TextStyle.WARNING,
    "FAIL": TextStyle.BAD,
    "SKIP": TextStyle.DIM,
}
_WIDTH = 100
_INDENT = " " * 13


def doctor(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Check whether this configuration can run here, too.",
        ),
    ] = None,
    sets: SetOptions = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="URL that clients use; else the deployment's own."
        ),
    ] = None,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say of every check why it matters.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Find what is wrong, why it matters, and the fix.

    Checks the running deployment, with a request for one token, this machine, and a named
    configuration, within a minute. Results of the deployment are printed first, within seconds.
    Exits with 1 when a check failed.
    """
    backend = backend_of(context)
    with report_errors():
        loaded_config = None
        if config:
            loaded_config = load_files(context, config, sets)
        elif sets:
            raise typer.BadParameter("there is nothing to set without -c", param_hint="--set")
        printer = ReportPrinter(resolve_format(output, as_json=as_json), verbose=verbose)
        report = backend.commands().doctor(
            loaded_config,
            address=address,
            progress=ProgressLines(),
            on_checks=printer.print_checks,
            url=url,
            headers=parse_headers(context, [], key_file),
            ca_file=ca_file,
        )
    printer.print_rest(report)
    if not report["ok"]:
        typer.echo(f"next: {_next_step(report)}", err=True)
        raise typer.Exit(ExitCode.FAILURE)


class ReportPrinter:
    """Prints checks as soon as they are there, as text; JSON is one object, at the end."""

    def __init__(self, output: OutputFormat, *, verbose: bool) -> None:
        self._output = output
        self._verbose = verbose
        self._printed = 0

    def print_checks(self, report: Report) -> None:
        """Print the checks that were not printed yet."""
        if self._output is OutputFormat.TEXT:
            checks = cast("list[JsonDict]", report["checks"])
            for line in checks_lines(checks[self._printed :], verbose=self._verbose):
                typer.echo(line)
            self._printed = len(checks)

    def print_rest(self, report: Report) -> None:
        """Print what is left, and how many checks had each result."""
        self.print_checks(report)
        print_report(
            report,
            self._output,
            lambda report: [_counts_text(cast("dict[str, int]", report["counts"]))],
        )


def checks_lines(checks: list[JsonDict], *, verbose: bool = False) -> Iterator[str]:
    """A line for each check; below those that are not well why it matters, and the fix.

    An empty line ends each area.
    """
    for area, group in groupby(checks, key=itemgetter("area")):
        yield area
        yield from _area_lines(list(group), verbose=verbose)
        yield ""


def _area_lines(checks: list[JsonDict], *, verbose: bool) -> Iterator[str]:
    width = max(len(check["name"]) for check in checks)
    for check, last in _merge_skipped(checks):
        status = str(check["status"])
        status_label = styled(f"{status:4}", _STATUS_STYLES[status])
        if last is not check:
            numbers = f"{check['number']}-{last['number']}"
            yield f"{numbers:>5}  {status_label}  {check['detail']}"
            continue
        first, *more = _wrap(check["detail"], _WIDTH - width) or [""]
        yield f"{check['number']:5}  {status_label}  {check['name']:{width}}  {first}"
        yield from (f"{_INDENT}{'':{width}}  {line}" for line in more)
        yield from _remedy_lines(check, verbose=verbose)


def _merge_skipped(checks: list[JsonDict]) -> Iterator[tuple[JsonDict, JsonDict]]:
    """Pairs of first and last check; checks in a row skipped for one reason are one pair."""
    for (status, _, _), group in groupby(checks, key=itemgetter("status", "area", "detail")):
        row = list(group)
        if status == "SKIP" and len(row) > 1:
            yield row[0], row[-1]
        else:
            yield from ((check, check) for check in row)


def _remedy_lines(check: JsonDict, *, verbose: bool) -> Iterator[str]:
    if check["why"] and (check["fix"] or verbose):
        yield from _labelled_lines("why: ", check["why"])
    if check["fix"]:
        yield from _labelled_lines("fix: ", check["fix"])


def _labelled_lines(label: str, text: str) -> Iterator[str]:
    first, *more = _wrap(text, _WIDTH - len(_INDENT + label))
    yield f"{_INDENT}{label}{first}"
    yield from (f"{_INDENT}{'':{len(label)}}{line}" for line in more)


def _wrap(text: str, width: int) -> list[str]:
    """Wrapped lines; a longer word, as a path or a command, is left whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _counts_text(counts: dict[str, int]) -> str:
    """How many checks had each result, the worst first."""
    words = {"fail": "failed", "warn": "with a warning", "pass": "passed", "skip": "skipped"}
    parts = [
        f"{counts[name]} {word}" for name, word in words.items() if counts[name] or name == "pass"
    ]
    return ", ".join(parts)


def _next_step(report: Report) -> str:
    """The failures by name, in their order: those of the deployment come first."""
    failed = [
        f"{check['number']} ({check['name']})"
        for check in cast("list[JsonDict]", report["checks"])
        if check["status"] == "FAIL"
    ]
    return f"fix {', '.join(failed)}, the first of them first, then run 'baton doctor' again"
