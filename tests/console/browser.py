"""Chromium through Playwright, from where `scripts/tools` has put them, and consoles for it."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from baton.console.app import console_app
from baton.console.feed import Feed

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".tools"
GET_TOOLS = "get them with 'scripts/tools chromium playwright'"
_WAIT_S = 20.0

Page = Any
"""Playwright's; it is no dependency, so its types are not known here."""


def missing_reason() -> str | None:
    """Why no browser can be driven here; None where one can."""
    if chromium_program() is None:
        return f"chromium is not here: {GET_TOOLS}"
    if not _has_playwright():
        return f"playwright is not here: {GET_TOOLS}"
    return None


def chromium_program() -> str | None:
    own = TOOLS / "bin" / "chromium"
    return str(own) if own.exists() else shutil.which("chromium")


def _has_playwright() -> bool:
    folder = str(TOOLS / "python")
    if importlib.util.find_spec("playwright") is None and folder not in sys.path:
        sys.path.append(folder)
    return importlib.util.find_spec("playwright") is not None


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a screen."""
    assert _has_playwright()
    module = importlib.import_module("playwright.sync_api")
    with module.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_program(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page of a context of its own, and everything it did that it should not have."""

    def __init__(self, browser: Any, base: str, **context: object) -> None:  # noqa: ANN401 - see Page
        self.base = base
        self.outside_requests: list[str] = []
        self.complaints: list[str] = []
        self._context = browser.new_context(**context)
        self._context.route("**/*", self._filter_request)
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(_WAIT_S * 1000)
        self.page.on("console", self._on_console_message)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, fragment: str = "") -> Page:
        self.page.goto(self.base + fragment)
        self.page.locator("#state.ok").wait_for()
        return self.page

    def close(self) -> None:
        self._context.close()

    def _filter_request(self, route: Any) -> None:  # noqa: ANN401 - see Page
        if route.request.url.startswith((self.base, "data:")):
            route.continue_()
            return
        self.outside_requests.append(route.request.url)
        route.abort()

    def _on_console_message(self, message: Any) -> None:  # noqa: ANN401 - see Page
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)


@contextmanager
def running_console(feed: Feed) -> Iterator[str]:
    """The console over a feed, at an address of this machine."""
    config = uvicorn.Config(
        console_app(feed), port=0, log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{_port(server, thread)}/"
    finally:
        server.should_exit = True
        thread.join(_WAIT_S)


def _port(server: uvicorn.Server, thread: threading.Thread) -> int:
    while thread.is_alive():
        with suppress(AttributeError, IndexError):
            if server.started:
                port: int = server.servers[0].sockets[0].getsockname()[1]
                return port
        thread.join(0.01)
    raise RuntimeError("the server did not start")
