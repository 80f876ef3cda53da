"""A study on a terminal."""

from __future__ import annotations

from typing import TextIO

from baton.bench.report.study import Study
from baton.bench.report.tables import format_objectives, tables_of

_WIDTH_CHARS = 200
"""For output that is no terminal: no line is broken."""


def print_study(study: Study, file: TextIO, *, color: bool | None = None) -> None:
    """Print it as tables; coloured when `file` is a terminal unless said."""
    from rich.console import Console  # here: keeps --help fast
    from rich.table import Table
    from rich.text import Text

    console = Console(
        file=file,
        width=None if file.isatty() else _WIDTH_CHARS,
        no_color=None if color is None else not color,
        highlight=False,
        emoji=False,
        markup=False,
    )
    console.print(Text(study.title, style="bold"))
    facts = {"figures": f"({study.evidence.mark}) {study.evidence}"} | dict(study.facts)
    for name, value in (facts | {"objectives": format_objectives(study)}).items():
        console.print(Text(f"{name}: ", style="dim") + Text(value))
    for other in tables_of(study):
        table = Table(box=None, pad_edge=False, header_style="dim")
        for number, column in enumerate(other.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in other.rows:
            table.add_row(*row)
        console.print()
        console.print(Text(f"{other.title} ({study.evidence.mark})", style="bold"))
        console.print(table)
    console.print()
    for note in study.notes:
        console.print(Text(f"note: {note}", style="dim"))
