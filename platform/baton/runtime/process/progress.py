"""Progress of long operations: lines, and a repetition of the last one while no other comes.

Theory of operation: a start or a stop blocks for seconds in calls of Ray, which report nothing. So
a thread repeats the last line with its seconds. It repeats once a second; the display decides how
much of that it shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

Progress = Callable[[str], None]
REPEAT_PERIOD_S: Final = 1.0
_CHECK_PERIOD_S: Final = 0.25


class StatusLine(str):
    """A line that says the same as the one before it, with newer figures.

    A display may replace the one before it, or leave this one out.
    """

    __slots__ = ()


class RepeatedProgress:
    """Passes lines on, and repeats the last one inside `repeating`."""

    def __init__(self, show: Progress, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._now_s = now_s
        self._lock = threading.Lock()
        self._line = ""
        self._began_at_s = self._shown_at_s = now_s()

    def __call__(self, line: str) -> None:
        """Show a line, and repeat it from now on."""
        with self._lock:
            self._line = line
            self._began_at_s = self._shown_at_s = self._now_s()
            self._show(line)

    def repeat_if_due(self) -> None:
        """Show the last line with its seconds, if it is at least a second old."""
        with self._lock:
            now_s = self._now_s()
            if self._line and now_s - self._shown_at_s >= REPEAT_PERIOD_S:
                self._shown_at_s = now_s
                age_text = f"{now_s - self._began_at_s:.0f} s"
                has_figures = isinstance(self._line, StatusLine)
                note = f", {age_text} ago" if has_figures else f" ({age_text})"
                self._show(StatusLine(self._line + note))

    @contextmanager
    def repeating(self, line: str = "") -> Iterator[None]:
        """Repeat lines while the block runs: `line` first, and no line from before."""
        with self._lock:
            self._line = line
            self._began_at_s = self._shown_at_s = self._now_s()
        ended = threading.Event()
        thread = threading.Thread(
            target=self._repeat_until, args=(ended,), name="progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _repeat_until(self, ended: threading.Event) -> None:
        while not ended.wait(_CHECK_PERIOD_S):
            self.repeat_if_due()
