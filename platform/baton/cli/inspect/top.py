"""`baton top`: a screen that shows how the deployment fares, about once a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.backend import Joined
from baton.cli.bars import speaks_blocks
from baton.cli.explain.trace import Order
from baton.cli.inspect.live_screen import console, is_terminal, watch_screen
from baton.cli.options import Address, Interval, Json, Output, interval_of, seam_of, wanted_format
from baton.cli.output import OutputFormat, print_report, reported_errors

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from rich.console import Console, RenderableType

_SLOWEST = 10
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
    as_json: Json = False,
) -> None:
    """Watch goodput, pools, links and the slowest requests live.

    Ctrl-C ends it.
    """
    interval_s = interval_of(interval)
    wanted = wanted_format(output, as_json=as_json)
    with reported_errors(), seam_of(context).commands().joined(address=address) as deployment:
        if once or wanted is OutputFormat.JSON or not is_terminal():
            _print_once(_asked(deployment), wanted)
        else:
            _watch(deployment, interval_s)


def _asked(deployment: Joined) -> dict[str, Any]:
    from baton.cli.inspect.top_report import top_report

    return top_report(
        deployment.status(),
        deployment.links(),
        deployment.requests(_SLOWEST, order=str(Order.SLOWEST)),
    )


def _print_once(report: dict[str, Any], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_report(report, output)
        return
    from baton.cli.inspect.top_screen import Frame, History, drawn

    screen = console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 160)
    frame = Frame(width=screen.width, height=None, blocks=speaks_blocks())
    screen.print(drawn(report, History(), frame))


def _watch(deployment: Joined, interval_s: float) -> None:
    from baton.cli.inspect.top_screen import Frame, History, drawn

    history, blocks = History(), speaks_blocks()
    shown: list[dict[str, Any]] = []

    def draw(screen: Console, report: dict[str, Any], alarm: str) -> RenderableType:
        if not shown or shown[-1] is not report:
            history.note(report, time.monotonic())
            shown[:] = [report]
        foot = f"every {interval_s:g} s; Ctrl-C ends it; 'baton trace' shows one request"
        frame = Frame(
            width=screen.width, height=screen.height, blocks=blocks, foot=foot, alarm=alarm
        )
        return drawn(report, history, frame)

    watch_screen(lambda: _asked(deployment), draw, interval_s)
