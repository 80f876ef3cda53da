"""The verbs' output: data to stdout, progress and errors to stderr, and the exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import select
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import NamedTuple, Self, cast

import typer

from baton.bench.formatting import format_seconds
from baton.domain.errors import (
    BatonError,
    ConfigInvalid,
    DeadlineExceeded,
    LinkFailed,
    NotRunning,
    TimedOut,
)
from baton.runtime.process.progress import StatusLine


class OutputFormat(StrEnum):
    """How data is printed."""

    TEXT = "text"
    JSON = "json"


class ExitCode(IntEnum):
    """The meaning of a verb's exit status."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_RUNNING = 3
    TIMEOUT = 4


class TextStyle(StrEnum):
    """The meaning of a colour; never the only sign of it."""

    GOOD = "green"
    WARNING = "yellow"
    BAD = "red"
    DIM = "dim"


class Styled(NamedTuple):
    """A cell of a table in a colour."""

    text: str
    style: TextStyle | None


_MIN_TOLERANCE = 0.01
_MAX_TOLERANCE = 0.1
_MINUTES_FROM_S = 120.0
"""From here on, durations are shown in minutes."""
_LONG_UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
_KILO = 1000.0
_CENT = 0.01
_STATUS_PERIOD_S = 4.0
"""Between a line in a pipe and the next status line; with one a second, none is over 5 s late."""
_ERASE_LINE = "\r\x1b[K"
_NEXT_STEPS = {
    ExitCode.FAILURE: "correct the errors above, then try again",
    ExitCode.USAGE: "correct these lines, then check with 'baton config validate'",
    ExitCode.NOT_RUNNING: "start one with 'baton up -c FILE', or name its address",
    ExitCode.TIMEOUT: "try again with a longer --timeout, or look at 'baton status'",
}


def exit_code(error: BatonError | OSError) -> ExitCode:
    """The exit status of an error."""
    match error:
        case ConfigInvalid():
            return ExitCode.USAGE
        case NotRunning() | LinkFailed() | ConnectionError():
            return ExitCode.NOT_RUNNING
        case TimedOut() | DeadlineExceeded() | TimeoutError():
            return ExitCode.TIMEOUT
        case _:
            return ExitCode.FAILURE


@contextmanager
def report_errors(*, after_failure: str | None = None) -> Iterator[None]:
    """Print an error as lines on stderr, the last with a next step, and exit with its status.

    `after_failure` is the next step of this verb where an error has no remedy of its own, and is
    none of the configuration.
    """
    try:
        yield
    except (BatonError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _is_reader_gone():
            raise  # Click ends it without a word: `baton logs | head` has what it wanted
        code = exit_code(error)
        reason: object = getattr(error, "reason", None)
        remedy: object = getattr(error, "remedy", None)
        for line in str(error if remedy is None else reason).splitlines():
            print_error(line)
        own_step = None if code is ExitCode.USAGE else after_failure
        typer.echo(f"next: {remedy or own_step or _NEXT_STEPS[code]}", err=True)
        raise typer.Exit(code) from error


def report_unexpected(error: Exception, *, debug: str) -> ExitCode:
    """Print an error that no verb expects as a line; its traceback goes to a file.

    `debug` is the command that shows the traceback.
    """
    print_error(one_line(f"{type(error).__name__}: {error}"))
    try:
        path = str(_keep_traceback(error))
    except OSError as failure:
        path = f"nowhere, for it cannot be written: {failure}"
    typer.echo(f"next: the traceback is in {path}; '{debug} ...' shows it", err=True)
    return ExitCode.FAILURE


def _keep_traceback(error: Exception) -> Path:
    """Write the traceback in place of the last one; only this user may read it."""
    from baton.serving.cluster.cluster_state import state_folder  # here: keeps --help fast

    path = state_folder() / "last-error.log"
    lines = "".join(traceback.format_exception(error))
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(lines)
    return path


def _is_reader_gone() -> bool:
    """Whether the broken pipe is that of the output."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(io.UnsupportedOperation):  # no file of the system's
            poll.register(stream.fileno(), 0)
    return bool(poll.poll(0))


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each warning on a line of stderr."""
    for line in warnings:
        typer.echo(styled("warning: ", TextStyle.WARNING, err=True) + line, err=True)


def print_error(line: str) -> None:
    """Print one line of an error."""
    typer.echo(styled("error: ", TextStyle.BAD, bold=True, err=True) + line, err=True)


def styled(text: str, style: TextStyle, *, bold: bool = False, err: bool = False) -> str:
    """Text in a colour, where it goes to a terminal that wants any (https://no-color.org)."""
    if not supports_color(err=err):
        return text
    if style is TextStyle.DIM:
        return typer.style(text, dim=True, bold=bold)
    return typer.style(text, fg=str(style), bold=bold)


def attainment_style(share: float | None, target: float | None) -> TextStyle | None:
    """The colour of an attainment: green at its target, yellow just below, red far below.

    Just below are twice as many misses as the target allows, within 1 and 10 points of it. None
    without a share or a target.
    """
    if share is None or target is None:
        return None
    if share >= target:
        return TextStyle.GOOD
    tolerance = min(_MAX_TOLERANCE, max(_MIN_TOLERANCE, 1.0 - target))
    return TextStyle.WARNING if share >= target - tolerance else TextStyle.BAD


def supports_color(*, err: bool = False) -> bool:
    """Whether that stream may have colours."""
    stream = sys.stderr if err else sys.stdout
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not is_plain and stream.isatty()


class ProgressLines:
    """Progress as lines on stderr, each with the seconds since the start.

    On a terminal a status line replaces the one before it; in a pipe, one is shown every few
    seconds. Use it as a context: its end erases a status line that still stands.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._start_s = now_s()
        self._printed_at_s = float("-inf")
        self._is_terminal = supports_color(err=True)
        self._has_status = False
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        """Print one line."""
        with self._lock:
            now_s = self._now_s()
            elapsed = f"[{now_s - self._start_s:6.1f}s] "
            if not isinstance(line, StatusLine):
                self._erase_status()
            elif self._is_terminal:
                self._draw_status(elapsed, line)
                return
            elif now_s - self._printed_at_s < _STATUS_PERIOD_S:
                return
            self._printed_at_s = now_s
            typer.echo(styled(elapsed, TextStyle.DIM, err=True) + line, err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._erase_status()

    def _draw_status(self, elapsed: str, line: str) -> None:
        width = shutil.get_terminal_size().columns - len(elapsed) - 1
        text = styled(elapsed, TextStyle.DIM, err=True) + one_line(line)[: max(0, width)]
        typer.echo(_ERASE_LINE + text, err=True, nl=False)
        self._has_status = True

    def _erase_status(self) -> None:
        if self._has_status:
            typer.echo(_ERASE_LINE, err=True, nl=False)
            self._has_status = False


def print_report(
    report: Mapping[str, object],
    output: OutputFormat,
    lines_of: Callable[[Mapping[str, object]], Iterable[str]] | None = None,
) -> None:
    """Print a report: one JSON object on one line, or `lines_of` it, by default `text_lines`.

    Lines of a report that lacks some answers are preceded by a warning.
    """
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(report, default=str))
        return
    if lines_of is not None and (unanswered := report.get("unanswered")):
        print_warnings([f"not all is shown: {reason}" for reason in cast("list[str]", unanswered)])
    for line in (lines_of or text_lines)(report):
        typer.echo(line)


def text_lines(report: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """A report as indented `key: value` lines; lists of reports become tables."""
    for key, value in report.items():
        match value:
            case Mapping() if value:
                yield f"{indent}{key}:"
                yield from text_lines(value, indent + "  ")
            case [Mapping(), *_] as rows:
                yield f"{indent}{key}:"
                yield from table_lines(
                    [row for row in rows if isinstance(row, Mapping)], indent + "  "
                )
            case _:
                yield f"{indent}{key}: {_text(value)}"


def table_lines(rows: Sequence[Mapping[str, object]], indent: str = "") -> Iterator[str]:
    """Rows as a table, a line each; its columns are all their keys, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [Styled(column, None) for column in columns],
        *([_cell(row.get(key)) for key in columns] for row in rows),
    ]
    widths = [max(len(row[column].text) for row in cells) for column in range(len(columns))]
    for row in cells:
        padded = (
            _in_style(cell) + " " * (width - len(cell.text))
            for cell, width in zip(row, widths, strict=True)
        )
        yield indent + "  ".join(padded).rstrip()


def _cell(value: object) -> Styled:
    return value if isinstance(value, Styled) else Styled(one_line(_text(value)), None)


def _in_style(cell: Styled) -> str:
    return cell.text if cell.style is None else styled(cell.text, cell.style)


def one_line(text: str) -> str:
    """Text without line breaks and other cursor controls."""
    if text.isprintable():
        return text
    return " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )


def duration_text(duration_s: float | None) -> str:
    """Seconds as people write them: `231 ms`, `1.24 s`, `30 min`, `2 h 5 min`; `-` for None."""
    if duration_s is None or not math.isfinite(duration_s) or abs(duration_s) < _MINUTES_FROM_S:
        return format_seconds(duration_s)
    remaining_s = round(abs(duration_s))
    counts = []
    for unit, unit_s in _LONG_UNITS.items():
        count, remaining_s = divmod(remaining_s, unit_s)
        counts.append((count, unit))
    first_unit = next(index for index, (count, _) in enumerate(counts) if count)
    # Two units tell enough: a reader of "3 d 4 h" does not need minutes.
    text = " ".join(
        f"{count} {unit}" for count, unit in counts[first_unit : first_unit + 2] if count
    )
    return f"-{text}" if duration_s < 0 else text


def money_text(dollars: float | None) -> str:
    """`$0.09`, `$12.00`, `< $0.01`; `-` where nothing has a price."""
    if dollars is None:
        return "-"
    return "< $0.01" if 0 < dollars < _CENT else f"${dollars:,.2f}"


def share_text(share: float | None) -> str:
    """`99.20%`; `-` for None."""
    return "-" if share is None else f"{share:.2%}"


def bytes_text(size_bytes: float) -> str:
    """`1.5 GB`, `12 MB`, `0 B`: three digits, in powers of 1000."""
    # Rounded before a unit is chosen: 999,600 B are 1 MB, not 1e+03 kB.
    rounded = float(f"{size_bytes:.3g}")
    for unit in ("B", "kB", "MB", "GB"):
        if rounded < _KILO:
            return f"{rounded:.3g} {unit}"
        rounded /= _KILO
    return f"{rounded:.0f} TB" if rounded >= _KILO else f"{rounded:.3g} TB"


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case str():
            return value
        case [*items]:
            return ", ".join(_text(item) for item in items) or "-"
        case _:
            return json.dumps(value, default=str)
