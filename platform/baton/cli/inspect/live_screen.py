"""Screens that refresh: ask again and again, draw what came, say when nothing does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from baton.cli.output import duration_text, print_error
from baton.domain.errors import BatonError, NotRunning, TimedOut

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")
_STALE_AFTER_INTERVALS = 3
"""Intervals without new data after which the screen shows that."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The last answer, and its time."""

    value: T
    at_s: float


class Poller(Generic[T]):
    """Asks in a thread, so that a screen goes on without an answer.

    Any error but a missing answer ends it; `latest` raises it again.
    """

    def __init__(self, fetch: Callable[[], T], interval_s: float) -> None:
        self._fetch = fetch
        self._interval_s = interval_s
        self._answer: Answer[T] | None = None
        self._error: BaseException | None = None
        self._unavailable_reason = ""
        self._updated = threading.Event()
        self._closed = threading.Event()
        # A daemon: an answer that does not come must not keep the terminal.
        threading.Thread(target=self._run, name="asker", daemon=True).start()

    def latest(self, wait_s: float) -> Answer[T] | None:
        """The last answer, after waiting for news for this time; None before any."""
        self._updated.wait(wait_s)
        self._updated.clear()
        if self._error is not None:
            raise self._error
        return self._answer

    @property
    def unavailable_reason(self) -> str:
        """Why the last question was not answered; empty when it was."""
        return self._unavailable_reason

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _run(self) -> None:
        has_answered = False
        while not self._closed.is_set():
            started_s = time.monotonic()
            try:
                self._answer = Answer(self._fetch(), time.monotonic())
                self._unavailable_reason, has_answered = "", True
            except (NotRunning, TimedOut) as error:
                self._unavailable_reason = error.reason
                if not has_answered or not error.retryable:
                    self._error = error
            except (BatonError, OSError) as error:
                self._error = error
            except BaseException as error:  # noqa: BLE001 - raised again by `latest`
                self._error = error
            self._updated.set()
            if self._error is not None:
                return
            self._closed.wait(max(0.0, self._interval_s - (time.monotonic() - started_s)))


def is_terminal() -> bool:
    """Whether the output goes to a terminal."""
    return sys.stdout.isatty()


def console() -> Console:
    """Where to draw; colours only where they are wanted."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def watch_screen(
    fetch: Callable[[], T],
    draw: Callable[[Console, T, str], RenderableType],
    interval_s: float,
) -> None:
    """Redraw the whole screen with each answer, until Ctrl-C.

    `draw` gets the screen, the last answer, and the present problem, if any.
    """
    from rich.live import Live

    screen, poller = console(), Poller(fetch, interval_s)
    try:
        answer = poller.latest(60.0)
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            while True:
                if answer is not None:
                    live.update(draw(screen, answer.value, _staleness(poller, answer, interval_s)))
                    live.refresh()
                answer = poller.latest(interval_s)
    except KeyboardInterrupt:
        return
    finally:
        poller.close()


def repeat(fetch: Callable[[], T], show: Callable[[T], None], interval_s: float) -> None:
    """Show answers again and again, until Ctrl-C; a missing answer is reported once.

    Raises:
        BatonError: there was no first answer, or there will be no more.
    """
    has_answered, printed_reason = False, ""
    try:
        while True:
            due_s = time.monotonic() + interval_s
            try:
                show(fetch())
                sys.stdout.flush()
                has_answered, printed_reason = True, ""
            except (NotRunning, TimedOut) as error:
                if not has_answered or not error.retryable:
                    raise
                if error.reason != printed_reason:
                    printed_reason = error.reason
                    print_error(f"{printed_reason}; trying again")
            time.sleep(max(0.0, due_s - time.monotonic()))
    except KeyboardInterrupt:
        return


def _staleness(poller: Poller[T], answer: Answer[T], interval_s: float) -> str:
    """Why the numbers are old; empty while they are not."""
    age_s = time.monotonic() - answer.at_s
    if poller.unavailable_reason:
        return f"{duration_text(age_s)} old: {poller.unavailable_reason}; trying again"
    if age_s > max(2.0, _STALE_AFTER_INTERVALS * interval_s):
        return f"{duration_text(age_s)} old: waiting for an answer"
    return ""
