"""Progress of long verbs: never silent for long, in a pipe as on a terminal."""

from __future__ import annotations

import io
import itertools
import sys

import pytest

from baton.cli.output import ProgressLines
from baton.runtime.process.progress import RepeatedProgress, StatusLine


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def run_silently(progress: RepeatedProgress, clock: Clock, seconds: float) -> list[float]:
    """Let time pass in steps of the thread's; returns the times of its steps."""
    times = []
    for _ in range(round(seconds / 0.25)):
        clock.now_s += 0.25
        progress.repeat_if_due()
        times.append(clock.now_s)
    return times


def test_a_blocking_call_leaves_a_pipe_without_output_for_5_s_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, printed_at_s = Clock(), list[float]()
    lines = ProgressLines(clock)
    progress = RepeatedProgress(lines, now_s=clock)
    progress("starting Ray")
    assert "starting Ray" in capsys.readouterr().err
    printed_at_s.append(clock.now_s)
    for _ in range(4 * 60):
        clock.now_s += 0.25
        progress.repeat_if_due()
        if capsys.readouterr().err:
            printed_at_s.append(clock.now_s)
    gaps_s = [after - before for before, after in itertools.pairwise(printed_at_s)]
    assert max(gaps_s) <= 5.0
    assert min(gaps_s) >= 4.0


def test_a_repeated_line_tells_for_how_long_it_has_been_so() -> None:
    clock, shown = Clock(), list[str]()
    progress = RepeatedProgress(shown.append, now_s=clock)
    progress("starting Ray")
    run_silently(progress, clock, 2.0)
    progress("starting Ray Serve")
    run_silently(progress, clock, 1.0)
    assert shown == [
        *("starting Ray", "starting Ray (1 s)", "starting Ray (2 s)"),
        *("starting Ray Serve", "starting Ray Serve (1 s)"),
    ]
    assert [isinstance(line, StatusLine) for line in shown] == [False, True, True, False, True]


def test_a_repeated_status_line_tells_how_old_its_figures_are() -> None:
    clock, shown = Clock(), list[str]()
    progress = RepeatedProgress(shown.append, now_s=clock)
    progress(StatusLine("decode loading weights (8 s)"))
    run_silently(progress, clock, 1.0)
    assert shown[1:] == ["decode loading weights (8 s), 1 s ago"]


def test_lines_are_repeated_while_the_block_runs_and_not_after() -> None:
    shown = list[str]()
    clock = Clock()
    progress = RepeatedProgress(shown.append, now_s=clock)
    progress("from before")
    with progress.repeating("draining"):
        clock.now_s += 1.0
        progress.repeat_if_due()
    assert "draining (1 s)" in shown
    assert "from before (1 s)" not in shown


def test_a_pipe_gets_every_message_but_few_status_lines_and_no_control_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with ProgressLines(clock) as lines:
        for second in range(9):
            clock.now_s = float(second)
            lines(StatusLine(f"ready: decode {second}/9"))
        lines("serving")
    err = capsys.readouterr().err
    assert [line.partition("] ")[2] for line in err.splitlines()] == [
        *("ready: decode 0/9", "ready: decode 4/9", "ready: decode 8/9"),
        "serving",
    ]
    assert "\x1b" not in err


def test_on_a_terminal_a_status_line_replaces_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressLines(Clock()) as lines:
        lines(StatusLine("one " * 20))
        lines(StatusLine("two"))
        lines("done")
        lines(StatusLine("three"))
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\r\x1b[K")
    assert "one " * 8 not in text


def test_without_colours_no_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressLines(Clock()) as lines:
        lines(StatusLine("one"))
        lines("done")
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 2
