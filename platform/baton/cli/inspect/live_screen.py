"""Screens that refresh: ask again and again, draw what came, say when nothing does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from baton.cli.output import complain, duration_text
from baton.domain.errors import BatonError, NotRunning, TimedOut

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")
_OLD_AFTER = 3
"""Intervals without anything new, from which on that is said."""


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """What was told last, and when it came."""

    value: T
    at_s: float


class Asker(Generic[T]):
    """Asks in a thread of its own, so that a screen goes on while nobody answers.

    What is raised but says that nobody answered just now ends it, and is raised again by `latest`.
    """

    def __init__(self, ask: Callable[[], T], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._seen: Seen[T] | None = None
        self._failed: BaseException | None = None
        self._trouble = ""
        self._news = threading.Event()
        self._over = threading.Event()
        # A daemon: an answer that does not come must not keep the terminal.
        threading.Thread(target=self._run, name="asker", daemon=True).start()

    def latest(self, wait_s: float) -> Seen[T] | None:
        """What was told last, after waiting for news for so long; None before anything was."""
        self._news.wait(wait_s)
        self._news.clear()
        if self._failed is not None:
            raise self._failed
        return self._seen

    @property
    def trouble(self) -> str:
        """Why the last question was not answered; empty when it was."""
        return self._trouble

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _run(self) -> None:
        answered = False
        while not self._over.is_set():
            began_s = time.monotonic()
            try:
                self._seen = Seen(self._ask(), time.monotonic())
                self._trouble, answered = "", True
            except (NotRunning, TimedOut) as error:
                self._trouble = error.why
                if not answered or not error.retryable:
                    self._failed = error
            except (BatonError, OSError) as error:
                self._failed = error
            except BaseException as error:  # noqa: BLE001 - raised again by `latest`
                self._failed = error
            self._news.set()
            if self._failed is not None:
                return
            self._over.wait(max(0.0, self._interval_s - (time.monotonic() - began_s)))


def is_terminal() -> bool:
    """Whether somebody looks at what is printed."""
    return sys.stdout.isatty()


def console() -> Console:
    """Where to draw; colours only where they are wanted."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def watch_screen(
    ask: Callable[[], T],
    draw: Callable[[Console, T, str], RenderableType],
    interval_s: float,
) -> None:
    """Redraw the whole screen with what is told, until Ctrl-C.

    `draw` is given where it is drawn, what was told last, and what is wrong now, if anything.
    """
    from rich.live import Live

    screen, asker = console(), Asker(ask, interval_s)
    try:
        seen = asker.latest(60.0)
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            while True:
                if seen is not None:
                    live.update(draw(screen, seen.value, _alarm(asker, seen, interval_s)))
                    live.refresh()
                seen = asker.latest(interval_s)
    except KeyboardInterrupt:
        return
    finally:
        asker.close()


def repeat(ask: Callable[[], T], show: Callable[[T], None], interval_s: float) -> None:
    """Show what is told again and again, until Ctrl-C; who does not answer just now is said once.

    Raises:
        BatonError: there was no first answer, or there will be none any more.
    """
    answered, said = False, ""
    try:
        while True:
            due_s = time.monotonic() + interval_s
            try:
                show(ask())
                sys.stdout.flush()
                answered, said = True, ""
            except (NotRunning, TimedOut) as error:
                if not answered or not error.retryable:
                    raise
                if error.why != said:
                    said = error.why
                    complain(f"{said}; trying again")
            time.sleep(max(0.0, due_s - time.monotonic()))
    except KeyboardInterrupt:
        return


def _alarm(asker: Asker[T], seen: Seen[T], interval_s: float) -> str:
    """Why the numbers are old; empty while they are not."""
    age_s = time.monotonic() - seen.at_s
    if asker.trouble:
        return f"{duration_text(age_s)} old: {asker.trouble}; trying again"
    if age_s > max(2.0, _OLD_AFTER * interval_s):
        return f"{duration_text(age_s)} old: waiting for an answer"
    return ""
