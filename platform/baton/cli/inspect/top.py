"""`baton top`: a screen that shows how the deployment fares, about once a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.backend import AttachedDeployment
from baton.cli.bars import can_draw_blocks
from baton.cli.explain.trace import RequestOrder
from baton.cli.inspect.live_screen import console, is_terminal, watch_screen
from baton.cli.options import (
    Address,
    Interval,
    JsonFlag,
    Output,
    backend_of,
    parse_interval,
    resolve_format,
)
from baton.cli.output import OutputFormat, print_report, report_errors

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from rich.console import Console, RenderableType

_SLOWEST_COUNT = 10
_NARROWEST = 80


def top(
    context: typer.Context,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once, as where stdout is no terminal.")
    ] = False,
    interval: Interval = "1s",
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Watch goodput, pools, links and the slowest requests live.

    Ctrl-C ends it.
    """
    interval_s = parse_interval(interval)
    resolved_format = resolve_format(output, as_json=as_json)
    with report_errors(), backend_of(context).commands().attach(address=address) as deployment:
        if once or resolved_format is OutputFormat.JSON or not is_terminal():
            _print_once(_fetch_report(deployment), resolved_format)
        else:
            _watch(deployment, interval_s)


def _fetch_report(deployment: AttachedDeployment) -> dict[str, Any]:
    from baton.cli.inspect.top_report import top_report

    return top_report(
        deployment.status(),
        deployment.links(),
        deployment.requests(_SLOWEST_COUNT, order=str(RequestOrder.SLOWEST)),
    )


def _print_once(report: dict[str, Any], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_report(report, output)
        return
    from baton.cli.inspect.top_screen import Frame, History, render

    screen = console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 160)
    frame = Frame(width=screen.width, height=None, blocks=can_draw_blocks())
    screen.print(render(report, History(), frame))


def _watch(deployment: AttachedDeployment, interval_s: float) -> None:
    from baton.cli.inspect.top_screen import Frame, History, render

    history, blocks = History(), can_draw_blocks()
    last_drawn: list[dict[str, Any]] = []

    def draw(screen: Console, report: dict[str, Any], alarm: str) -> RenderableType:
        if not last_drawn or last_drawn[-1] is not report:
            history.add(report, time.monotonic())
            last_drawn[:] = [report]
        footer = f"every {interval_s:g} s; Ctrl-C ends it; 'baton trace' shows one request"
        frame = Frame(
            width=screen.width, height=screen.height, blocks=blocks, footer=footer, alarm=alarm
        )
        return render(report, history, frame)

    watch_screen(lambda: _fetch_report(deployment), draw, interval_s)
