"""Pictures of a console for the docs: `python -m tests.console.screenshots URL FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.console.browser import Page, WatchedPage, chromium

SIZE = {"width": 1440, "height": 900}


def take_screenshots(url: str, folder: Path) -> list[str]:
    """Overview in both themes, one request, pools and pairs; returns what went wrong."""
    problems: list[str] = []
    with chromium() as browser:
        for theme in ("dark", "light"):
            session = WatchedPage(browser, url, viewport=SIZE, color_scheme=theme)
            page = session.open("#overview")
            page.locator("[data-test=goodput]").wait_for()
            page.wait_for_timeout(3000)
            _shoot(page, folder / f"console-{theme}.png")
            if theme == "dark":
                _shoot_sections(page, folder)
            problems += session.outside_requests + session.complaints
            session.close()
    return problems


def _shoot_sections(page: Page, folder: Path) -> None:
    page.keyboard.press("3")
    page.keyboard.press("s")
    page.locator("tbody [data-row]").nth(1).wait_for()
    _open_handed_off(page)
    page.locator(".detail [data-test=bar]").first.wait_for()
    page.mouse.move(5, 5)
    _shoot(page, folder / "console-request.png")
    page.keyboard.press("2")
    page.locator(".replica").first.wait_for()
    page.wait_for_timeout(1500)
    _shoot(page, folder / "console-fleet.png")
    page.keyboard.press("4")
    page.locator(".log .entry").first.wait_for()
    page.wait_for_timeout(1500)
    _shoot(page, folder / "console-scaling.png")


def _open_handed_off(page: Page) -> None:
    rows: Any = page.locator("tbody tr", has_text="→").locator("[data-row]")
    candidates = rows if rows.count() else page.locator("tbody [data-row]")
    candidates.first.click()


def _shoot(page: Page, path: Path) -> None:
    page.screenshot(path=str(path))
    sys.stderr.write(f"{path}\n")


if __name__ == "__main__":
    found = take_screenshots(sys.argv[1].rstrip("/") + "/", Path(sys.argv[2]))
    sys.exit(f"the page did what it should not: {found}" if found else 0)
