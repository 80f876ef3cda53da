"""Pictures of the console: `python -m tests.console.screenshots [--all|--reports FOLDER]`.

Those for the docs show `LiveFeed`, a simulated fleet. With `--all`, every section is drawn in both
themes and at three widths. With `--reports`, so are the pages that `baton plan`, `simulate` and
`replay` write.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tests.cli.invoked import run_baton
from tests.console.browser import (
    ROOT,
    Page,
    WatchedPage,
    chromium,
    missing_reason,
    running_console,
)
from tests.console.chat_api import CHAT_WAIT_S, FakeApi, chat_target_of, running_api
from tests.console.live_feed import LiveFeed
from tests.fakes.completion_server import (
    SSE_DONE,
    CompletionServer,
    ReceivedRequest,
    token,
    usage,
)

IMAGES = ROOT / "docs" / "images"
WIDTHS = (1440, 1280, 800)
SECTIONS = ("overview", "fleet", "requests", "scaling", "config")
_TRACE_LINE = (
    '{{"timestamp": {at}, "input_length": 200, "output_length": 12, "hash_ids": [{at}]}}\n'
)
_SIMULATED_REPORTS: Mapping[str, tuple[str, ...]] = {
    "plan": (
        *("plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--gpus", "4", "--workload", "conv"),
        *("--ttft", "1s", "--tpot", "15ms", "--quick"),
    ),
    "simulate": (
        *("simulate", "-c", "configs/sim.yaml", "--workload", "conv", "--rate", "2"),
        *("--duration", "60s", "--scale", "2", "--compare", "colocated"),
    ),
}
"""The words of each verb whose page needs no server."""


@dataclass(frozen=True, kw_only=True)
class Studio:
    """What pictures are taken with."""

    browser: Any
    base: str
    api: FakeApi
    feed: LiveFeed
    problems: list[str] = field(default_factory=list)

    @contextmanager
    def opened(self, *, width: int, theme: str, height: int = 900) -> Iterator[Page]:
        """A page; what it should not have done is a problem."""
        size = {"width": width, "height": height}
        session = WatchedPage(self.browser, self.base, viewport=size, color_scheme=theme)
        try:
            yield session.open("#overview")
        finally:
            self.problems.extend(session.outside_requests + session.complaints)
            session.close()

    def chat(self, page: Page) -> None:
        """One answer, which ran as the newest request that was handed off in time."""
        record = next(
            record
            for record in self.feed.records()
            if len(record.legs) > 1 and record.slo_result.is_good
        )
        self.api.request_id = record.request_id
        page.evaluate("() => { location.hash = 'playground'; }")
        page.locator("#chat-message").fill("Why are prefill and decode on separate engines?")
        page.keyboard.press("Enter")
        answer = page.locator("[data-test=figures]", has_text="decode on")
        answer.wait_for(timeout=CHAT_WAIT_S * 1000)


def main(arguments: Sequence[str]) -> int:
    """Write the pictures; 1 where a page did what it should not, or no browser is here."""
    if (reason := missing_reason()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    if arguments[:1] == ["--reports"]:
        return _shoot_reports(Path(arguments[1]))
    with running_api() as api, chromium() as browser:
        api.pause_s = 0.29  # as the records of `LiveFeed` have it
        feed = LiveFeed(target=chat_target_of(api))
        with running_console(feed) as base:
            studio = Studio(browser=browser, base=base, api=api, feed=feed)
            if arguments[:1] == ["--all"]:
                folder = Path(arguments[1])
                folder.mkdir(parents=True, exist_ok=True)
                _shoot_all(studio, folder)
            else:
                _shoot_docs(studio)
    for problem in studio.problems:
        sys.stderr.write(f"{problem}\n")
    return int(bool(studio.problems))


def _shoot_docs(studio: Studio) -> None:
    with studio.opened(width=1440, theme="light") as page:
        _open_request(page)
        _shoot(page, IMAGES / "console-request.png")
    with studio.opened(width=1280, theme="light", height=560) as page:
        studio.chat(page)
        _shoot(page, IMAGES / "console-playground.png")


def _shoot_all(studio: Studio, folder: Path) -> None:
    for theme in ("light", "dark"):
        for width in WIDTHS:
            with studio.opened(width=width, theme=theme) as page:
                for section in SECTIONS:
                    page.evaluate("name => { location.hash = name; }", section)
                    page.locator(f".page-{section}").wait_for()
                    page.wait_for_timeout(1500)
                    _shoot(page, folder / f"{section}-{theme}-{width}.png")
                _open_request(page)
                _shoot(page, folder / f"request-{theme}-{width}.png")
                studio.chat(page)
                _shoot(page, folder / f"playground-{theme}-{width}.png")


def _shoot_reports(folder: Path) -> int:
    """Have each verb write its page, and take pictures of all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.jsonl"
    trace.write_text("".join(_TRACE_LINE.format(at=number * 40) for number in range(200)))
    complaints: list[str] = []
    pages: list[Path] = []
    with CompletionServer(_paced).in_thread() as server:
        measured = {"replay": ("replay", str(trace), "--url", server.url)}
        for name, words in {**_SIMULATED_REPORTS, **measured}.items():
            pages.append(folder / f"{name}.html")
            done = run_baton(*words, "--report", str(pages[-1]))
            if done.exit_code:
                complaints.append(f"{name}: {done.stderr}")
    with chromium() as browser:
        for page, theme, width in product(pages, ("light", "dark"), WIDTHS):
            size = {"width": width, "height": 900}
            session = WatchedPage(browser, page.as_uri(), viewport=size, color_scheme=theme)
            session.page.goto(session.base)
            picture = page.with_name(f"{page.stem}-{theme}-{width}.png")
            session.page.screenshot(path=str(picture), full_page=True)
            complaints += session.outside_requests + session.complaints
            session.close()
            sys.stderr.write(f"{picture}\n")
    sys.stderr.writelines(f"{complaint}\n" for complaint in complaints)
    return int(bool(complaints))


async def _paced(request: ReceivedRequest) -> AsyncIterator[str]:
    """A stream with pauses, so that its charts have something to show."""
    tokens = request.body["max_tokens"]
    for number in range(tokens):
        await asyncio.sleep(0.02 if number else 0.1)
        yield token(last=number == tokens - 1)
    yield usage(tokens)
    yield SSE_DONE


def _open_request(page: Page) -> None:
    page.evaluate("() => { location.hash = 'requests'; }")
    page.locator("tbody tr", has_text="→").locator("[data-row]").first.click()
    page.locator(".detail [data-test=bar]").first.wait_for()
    page.mouse.move(5, 5)


def _shoot(page: Page, path: Path) -> None:
    page.screenshot(path=str(path))
    sys.stderr.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
