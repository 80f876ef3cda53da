"""`baton doctor`: what is wrong here, why it matters, and what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import Address, Json, Output, Sets, seam_of, wanted_format
from baton.cli.output import (
    ExitCode,
    OutputFormat,
    Paint,
    ProgressLines,
    painted,
    print_report,
    reported_errors,
)

Told = dict[str, Any]
_PAINTS = {"PASS": Paint.GOOD, "WARN": Paint.DOUBT, "FAIL": Paint.BAD, "SKIP": Paint.PALE}
_WIDTH = 100
_INDENT = " " * 13


def doctor(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Also check whether this would run here."
        ),
    ] = None,
    sets: Sets = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say of every check why it matters.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Find what is wrong, why it matters, and the fix.

    Looks at this machine, at a configuration if one is named, and at what runs. Exits with 1 when a
    check failed.
    """
    seam = seam_of(context)
    with reported_errors():
        loaded = None
        if config:
            from baton.config import load_config  # here: keeps --help fast

            loaded = load_config(config, env=seam.environ, sets=sets or ())
        elif sets:
            raise typer.BadParameter("there is nothing to set without -c", param_hint="--set")
        report = seam.commands().doctor(loaded, address=address, progress=ProgressLines())
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
    else:
        for line in readable(report, verbose=verbose):
            typer.echo(line)
    if not report["ok"]:
        typer.echo(f"next: {_next(report)}", err=True)
        raise typer.Exit(ExitCode.FAILURE)


def readable(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """A line for each check; below those that are not well why it matters, and the fix."""
    checks = cast("list[Told]", report["checks"])
    width = max((len(check["name"]) for check in checks), default=0)
    area = ""
    for check, last in _alike_once(checks):
        if check["area"] != area:
            if area:
                yield ""
            area = check["area"]
            yield area
        verdict = str(check["verdict"])
        head = painted(f"{verdict:4}", _PAINTS[verdict])
        if last is not check:
            numbers = f"{check['number']}-{last['number']}"
            yield f"{numbers:>5}  {head}  {check['found']}"
            continue
        first, *more = _folded(check["found"], _WIDTH - width) or [""]
        yield f"{check['number']:5}  {head}  {check['name']:{width}}  {first}"
        yield from (f"{_INDENT}{'':{width}}  {line}" for line in more)
        yield from _below(check, verbose=verbose)
    yield ""
    yield _counts(cast("dict[str, int]", report["counts"]))


def _alike_once(checks: list[Told]) -> Iterator[tuple[Told, Told]]:
    """Each check with itself; those in a row that were skipped for one reason as first and last."""
    for (verdict, _, _), alike in groupby(checks, key=itemgetter("verdict", "area", "found")):
        row = list(alike)
        if verdict == "SKIP" and len(row) > 1:
            yield row[0], row[-1]
        else:
            yield from ((check, check) for check in row)


def _below(check: Told, *, verbose: bool) -> Iterator[str]:
    if check["why"] and (check["fix"] or verbose):
        yield from _wrapped("why: ", check["why"])
    if check["fix"]:
        yield from _wrapped("fix: ", check["fix"])


def _wrapped(label: str, text: str) -> Iterator[str]:
    first, *more = _folded(text, _WIDTH - len(_INDENT + label))
    yield f"{_INDENT}{label}{first}"
    yield from (f"{_INDENT}{'':{len(label)}}{line}" for line in more)


def _folded(text: str, width: int) -> list[str]:
    """Lines that are no longer, but for words that are: a path or a command is left whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _counts(counts: dict[str, int]) -> str:
    said = [f"{counts['pass']} passed"]
    words = {"warn": "with a warning", "fail": "failed", "skip": "skipped"}
    said += [f"{counts[name]} {word}" for name, word in words.items() if counts[name]]
    return ", ".join(said)


def _next(report: Report) -> str:
    failed = [check for check in cast("list[Told]", report["checks"]) if check["verdict"] == "FAIL"]
    numbers = ", ".join(str(check["number"]) for check in failed)
    return f"fix {numbers}, the first of them first, then run 'baton doctor' again"
