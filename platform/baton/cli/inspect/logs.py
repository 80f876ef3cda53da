"""`baton logs`: the log entries of the processes of the deployment here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import OutputFormat, ProgressLines, TextStyle, report_errors, styled

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from baton.serving.operator.log_files import LogLine

_NAME_WIDTH = 22
_NODE_WIDTH = 15
_LEVEL_STYLES = {
    "debug": TextStyle.DIM,
    "warning": TextStyle.WARNING,
    "error": TextStyle.BAD,
    "critical": TextStyle.BAD,
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
        typer.Option(
            "--replica", metavar="ID", help="Show logs of this replica, or of this pool's replicas."
        ),
    ] = None,
    ingress: Annotated[bool, typer.Option("--ingress", help="Show logs of the ingresses.")] = False,
    controller: Annotated[
        bool, typer.Option("--controller", help="Show logs of the controller.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines, too, until Ctrl-C.")
    ] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, help="Number of lines; 0 for all.")
    ] = 100,
    level: Annotated[Level, typer.Option("--level", help="Lowest level to show.")] = Level.DEBUG,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="NAME", help="Show only these events; repeatable."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="Show only lines about this request."),
    ] = None,
    include_others: Annotated[
        bool, typer.Option("--all", help="Show output of vLLM, Ray and others, too.")
    ] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show what the processes of the deployment have logged.

    Events of all of them in the order of their time, from the files on this machine; on a Ray
    cluster that ran before, from those of all its nodes. JSON is one object a line. It has no
    output of 'baton up' itself, and no entries below 'observability.logs.level'.
    """
    as_lines = resolve_format(output, as_json=as_json) is OutputFormat.JSON
    with report_errors():
        from baton.serving.operator.log_files import LogQuery  # here: keeps --help fast

        query = LogQuery(
            replica=replica,
            ingress=ingress,
            controller=controller,
            level=str(level),
            events=frozenset(event or ()),
            request_id=request,
            include_foreign=include_others,
            tail_lines=last or None,
        )
        lines = (
            backend_of(context)
            .commands()
            .logs(query, follow=follow, progress=ProgressLines(), address=address)
        )
        _print(lines, as_json=as_lines)


def _print(lines: Iterable[LogLine | None], *, as_json: bool) -> None:
    shown = 0
    try:
        for line in lines:
            if line is None:
                continue
            shown += 1
            for text in [json.dumps(line.to_dict(), default=str)] if as_json else line_texts(line):
                typer.echo(text)
    except KeyboardInterrupt:
        return
    if not shown:
        typer.echo("nothing that fits was logged", err=True)


def line_texts(line: LogLine) -> Iterator[str]:
    """One event as a line for a person, its traceback below it."""
    record: dict[str, Any] = line.to_dict()
    when = str(record.pop("at") or "")[11:23].ljust(12)
    source = str(record.pop("source")).ljust(_NAME_WIDTH)
    if (node := record.pop("node", None)) is not None:
        source = f"{str(node).ljust(_NODE_WIDTH)} {source}"
    if "text" in record:
        yield f"{when} {'':7} {source} {record['text']}"
        return
    level, event = str(record.pop("level")), str(record.pop("event"))
    exception = record.pop("exception", None)
    fields = " ".join(
        f"{name}={value}" for name, value in record.items() if value is not None and value != ""
    )
    level_label = f"{level.upper():7}"
    if (style := _LEVEL_STYLES.get(level)) is not None:
        level_label = styled(level_label, style)
    yield f"{when} {level_label} {source} {event} {fields}".rstrip()
    for text in str(exception or "").splitlines():
        yield f"{'':21}{text}"
