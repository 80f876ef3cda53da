"""`baton logs`: what the processes of the deployment here have logged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from baton.cli.backend import LogLine
from baton.cli.options import Address, Json, Output, seam_of, wanted_format
from baton.cli.output import OutputFormat, Paint, ProgressLines, painted, reported_errors

_NAME_WIDTH = 22
_NODE_WIDTH = 15
_PAINTS = {
    "debug": Paint.PALE,
    "warning": Paint.DOUBT,
    "error": Paint.BAD,
    "critical": Paint.BAD,
}


class Level(StrEnum):
    """The least important events that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def logs(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    *,
    replica: Annotated[
        str | None,
        typer.Option("--replica", metavar="ID", help="Of one replica, or of a pool's replicas."),
    ] = None,
    ingress: Annotated[bool, typer.Option("--ingress", help="Of the ingresses.")] = False,
    controller: Annotated[bool, typer.Option("--controller", help="Of the controller.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, help="How many lines; 0 for all.")
    ] = 100,
    level: Annotated[Level, typer.Option("--level", help="From this level on.")] = Level.DEBUG,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="NAME", help="Only these events; repeatable."),
    ] = None,
    request: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="Only about this request.")
    ] = None,
    others: Annotated[
        bool, typer.Option("--all", help="Also what vLLM, Ray and others print.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Show what the processes of the deployment have logged.

    Events of all of them in the order of their time, from the files on this machine; on a Ray
    cluster that ran before, from those of all its nodes. JSON is one object a line. Not seen:
    what 'baton up' itself prints, and what 'observability.logs.level' keeps from being written.
    """
    as_lines = wanted_format(output, as_json=as_json) is OutputFormat.JSON
    with reported_errors():
        from baton.serving.operator.log_files import LogOrder  # here: keeps --help fast

        order = LogOrder(
            replica=replica,
            ingress=ingress,
            controller=controller,
            level=str(level),
            events=frozenset(event or ()),
            request_id=request,
            others=others,
            last=last or None,
        )
        lines = (
            seam_of(context)
            .commands()
            .logs(order, follow=follow, progress=ProgressLines(), address=address)
        )
        _print(lines, as_json=as_lines)


def _print(lines: Iterable[LogLine | None], *, as_json: bool) -> None:
    shown = 0
    try:
        for line in lines:
            if line is None:
                continue
            shown += 1
            for text in [json.dumps(line.report(), default=str)] if as_json else readable(line):
                typer.echo(text)
    except KeyboardInterrupt:
        return
    if not shown:
        typer.echo("nothing that fits was logged", err=True)


def readable(line: LogLine) -> Iterator[str]:
    """One event as a line for a person, its traceback below it."""
    told: dict[str, Any] = line.report()
    when = str(told.pop("at") or "")[11:23].ljust(12)
    source = str(told.pop("source")).ljust(_NAME_WIDTH)
    if (node := told.pop("node", None)) is not None:
        source = f"{str(node).ljust(_NODE_WIDTH)} {source}"
    if "text" in told:
        yield f"{when} {'':7} {source} {told['text']}"
        return
    level, event = str(told.pop("level")), str(told.pop("event"))
    exception = told.pop("exception", None)
    fields = " ".join(
        f"{name}={value}" for name, value in told.items() if value is not None and value != ""
    )
    head = f"{level.upper():7}"
    if (paint := _PAINTS.get(level)) is not None:
        head = painted(head, paint)
    yield f"{when} {head} {source} {event} {fields}".rstrip()
    for text in str(exception or "").splitlines():
        yield f"{'':21}{text}"
