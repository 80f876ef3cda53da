"""The console in a browser: what a person sees, and what the browser is made to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton.console.feed import ChatTarget
from baton.domain.commands import RequestRecord
from baton.domain.errors import LinkFailed
from baton.domain.value import evolve
from tests.console.browser import Page, WatchedPage, chromium, missing_reason, running_console
from tests.console.chat_api import WORDS, FakeApi, chat_target_of, running_api
from tests.console.live_feed import LiveFeed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason())),
]
HOSTILE = '"><img src=x onerror="document.title=1">{{7*7}}<script>alert(1)</script>'
SECTIONS = ("overview", "fleet", "requests", "scaling", "config", "playground")
KEY = "bk_acme_nobody_may_find_this"
Opened = Callable[..., Page]


class SpoiledFeed(LiveFeed):
    """One of a client that wants to be markup, and a controller that may be unresponsive."""

    is_unresponsive = False

    async def overview(self) -> Any:  # noqa: ANN401 - plain values
        if self.is_unresponsive:
            raise LinkFailed("controller", "it is gone")
        return await super().overview()

    def record(self, number: int) -> RequestRecord:
        record = super().record(number)
        if number % 7:
            return record
        return evolve(record, request_id=f"{HOSTILE}{number}", tenant=HOSTILE)


@pytest.fixture(scope="module")
def api() -> Iterator[FakeApi]:
    with running_api() as api:
        yield api


@pytest.fixture(scope="module")
def feed(api: FakeApi) -> SpoiledFeed:
    return SpoiledFeed(target=chat_target_of(api))


@pytest.fixture(scope="module")
def base(feed: SpoiledFeed) -> Iterator[str]:
    with running_console(feed) as base:
        yield base


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, base: str) -> Iterator[Opened]:  # noqa: ANN401 - see Page
    """Opens pages; none may have asked anybody outside, or complained."""
    watched: list[WatchedPage] = []

    def go(where: str = "", **context: object) -> Page:
        context.setdefault("viewport", {"width": 1440, "height": 900})
        watched.append(WatchedPage(browser, base, **context))
        return watched[-1].open(where)

    yield go
    for page in watched:
        page.close()
    assert [url for page in watched for url in page.outside_requests] == []
    assert [text for page in watched for text in page.complaints] == []


def seconds(page: Page, selector: str) -> list[float]:
    return [
        float(item.get_attribute("data-seconds") or "nan") for item in page.locator(selector).all()
    ]


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_numbers_move_by_themselves(opened: Opened) -> None:
    page = opened("#overview")
    shown = page.locator("[data-test=goodput]")
    before = shown.inner_text()
    assert re.match(r"[\d.]+", before)
    page.wait_for_function(
        "before => document.querySelector('[data-test=goodput]').innerText !== before", arg=before
    )


def test_the_chart_draws_what_was_asked_for_and_kept(opened: Opened) -> None:
    page = opened("#overview")
    page.wait_for_function("document.querySelector('[data-line=goodput_per_s] b').innerText > '0'")
    inked = """() => {
      const canvas = document.querySelector('.chart canvas');
      const { width, height } = canvas;
      const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
      const ink = getComputedStyle(document.documentElement).getPropertyValue('--good').trim();
      const [red, green] = [1, 3].map((at) => parseInt(ink.slice(at, at + 2), 16));
      const tenths = new Set();
      for (let at = 0; at < pixels.length; at += 4)
        if (pixels[at] === red && pixels[at + 1] === green)
          tenths.add(Math.floor((((at / 4) % width) / width) * 10));
      return [...tenths].sort();
    }"""
    # Half an hour, most of which nobody has watched; the first tenth also has the axis.
    assert page.evaluate(inked) == list(range(10))


def test_a_waterfall_adds_up_to_the_whole_request(opened: Opened, feed: SpoiledFeed) -> None:
    page = opened("#requests")
    page.locator("tbody [data-row]").first.click()
    page.locator("[data-test=bar]").first.wait_for()
    whole_s = seconds(page, "[data-test=e2e]")[0]
    name = page.locator(".detail .title").first.inner_text()
    record = next(other for other in feed.records() if other.request_id == name)
    assert whole_s == pytest.approx(record.ended_at_s - record.arrived_at_s, rel=0.05)
    assert sum(seconds(page, "[data-test=bar]")) == pytest.approx(whole_s, rel=0.05)


def test_a_waterfall_is_drawn_as_long_as_it_says(opened: Opened) -> None:
    page = opened("#requests")
    page.locator("tbody [data-row]").first.click()
    page.locator("[data-test=bar]").first.wait_for()
    lane = page.locator(".bars .lane").first.bounding_box()
    px_per_s = lane["width"] / (seconds(page, "[data-test=first]")[0] * 1.08)
    at_s = 0.0
    for row in page.locator("[data-test=bar]").all():
        box = row.locator(".bar").bounding_box()
        until_s = at_s + float(row.get_attribute("data-seconds"))
        left, right = lane["x"] + at_s * px_per_s, lane["x"] + until_s * px_per_s
        assert box["x"] == pytest.approx(left, abs=2)
        # The least that is drawn is two pixels; what goes on after the axis ends with it.
        assert box["x"] + box["width"] == pytest.approx(
            max(left + 2, min(right, lane["x"] + lane["width"])), abs=2
        )
        at_s = until_s


def test_the_whole_request_is_drawn_on_demand(opened: Opened) -> None:
    page = opened("#requests")
    page.locator("tbody [data-row]").first.click()
    page.locator("[data-test=bar]").first.wait_for()
    lane = page.locator(".bars .lane").first.bounding_box()
    before = page.locator("[data-test=bar] .bar").last.bounding_box()
    page.keyboard.press("z")
    page.get_by_role("button", name="all of it", pressed=True).wait_for()
    after = page.locator("[data-test=bar] .bar").last.bounding_box()
    assert after["width"] > before["width"]
    assert after["x"] + after["width"] == pytest.approx(lane["x"] + lane["width"], abs=2)


def test_a_request_shows_what_it_was_chosen_from(opened: Opened) -> None:
    page = opened("#requests")
    page.locator("tbody [data-row]").first.click()
    page.locator(".options tbody tr").first.wait_for()
    assert page.locator(".options tr.on").count() == 1
    head = page.locator(".options thead").inner_text().split("\t")
    assert [name.strip() for name in head][1:6] == [
        "Runs on",
        "Cost",
        "Interference",
        "TTFT",
        "= Queue",
    ]


def test_the_list_holds_still_under_the_pointer(opened: Opened) -> None:
    page = opened("#requests")
    first = page.locator("tbody [data-row]").first
    first.hover()
    page.get_by_text("paused while you read").wait_for()
    before = first.inner_text()
    page.wait_for_timeout(2500)
    assert first.inner_text() == before
    page.mouse.move(5, 5)
    page.wait_for_function(
        "before => document.querySelector('tbody [data-row]').innerText !== before", arg=before
    )


def test_everything_is_reached_by_keyboard(opened: Opened) -> None:
    page = opened("#overview")
    for number, section in enumerate(SECTIONS, 1):
        page.keyboard.press(str(number))
        page.locator(f".page-{section}").wait_for()
    page.keyboard.press("3")
    page.locator("tbody [data-row]").nth(3).wait_for()
    page.keyboard.press("j")
    page.get_by_text("paused while you read").wait_for()
    names = page.locator("tbody [data-row]").all_inner_texts()
    for key in ("j", "j", "k", "Enter"):
        page.keyboard.press(key)
    page.locator(".detail [data-test=bar]").first.wait_for()
    chosen = page.locator(".detail .title").first.inner_text()
    assert chosen == names[1]
    page.keyboard.press("Escape")
    page.locator(".detail").wait_for(state="detached")


def test_the_filter_is_entered_and_left_by_keyboard(opened: Opened) -> None:
    page = opened("#requests")
    page.locator("tbody [data-row]").nth(3).wait_for()
    page.keyboard.press("/")
    page.keyboard.type("no such request 3")
    page.get_by_text("None of these match").wait_for()
    assert page.locator(".page-requests").count() == 1
    page.keyboard.press("Escape")
    page.locator("tbody [data-row]").nth(3).wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.locator(".page-fleet").wait_for()


def test_help_is_a_dialog_that_escape_closes(opened: Opened) -> None:
    page = opened("#overview")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("2")
    assert page.locator(".page-overview").count() == 1
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")


def test_the_focused_element_is_visible(opened: Opened) -> None:
    page = opened("#overview")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert width == "2px"


def test_the_theme_is_the_systems_until_a_choice(opened: Opened) -> None:
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    assert background(light) != background(dark)
    light.keyboard.press("t")
    light.keyboard.press("t")
    assert background(light) == background(dark)
    light.reload()
    light.locator("#state.ok").wait_for()
    assert background(light) == background(dark)


def test_names_that_want_to_be_markup_are_text(opened: Opened) -> None:
    page = opened("#requests")
    page.keyboard.press("/")
    page.keyboard.type("onerror")
    row = page.locator("tbody [data-row]").first
    row.wait_for()
    assert HOSTILE in row.inner_text()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.locator(".detail [data-test=bar]").first.wait_for()
    assert HOSTILE in page.locator(".detail .title").first.inner_text()
    assert page.locator("img").count() == 0
    assert page.title() != "1"


def test_an_unresponsive_controller_is_shown_and_so_is_its_return(
    opened: Opened, feed: SpoiledFeed
) -> None:
    page = opened("#overview")
    page.locator("[data-test=goodput]").wait_for()
    feed.is_unresponsive = True
    try:
        page.locator("#troubles p").wait_for()
        assert "it is gone" in page.locator("#troubles").inner_text()
        assert page.locator("#state").inner_text() == "no answer"
        assert page.locator("[data-test=goodput]").is_visible()
    finally:
        feed.is_unresponsive = False
    page.locator("#troubles p").wait_for(state="detached")
    page.locator("#state.ok").wait_for()


@pytest.mark.parametrize("width", [360, 820, 1440, 3840])
def test_no_section_is_wider_than_the_window(opened: Opened, width: int) -> None:
    page = opened("#overview", viewport={"width": width, "height": 900})
    for section in SECTIONS:
        page.evaluate("name => { location.hash = name; }", section)
        page.locator(f".page-{section} h1, .page-{section} .yaml").first.wait_for()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, section


@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize(
    ("section", "columns"),
    [
        ("overview", ["Class", "Now", "Target", "Goodput", "TTFT", "TPOT"]),
        ("requests", ["Request", "TTFT", "TPOT", "Total", "Ran on"]),
        ("request", ["Runs on", "Cost", "Interference", "TTFT"]),
    ],
)
def test_columns_that_decide_are_not_cut_off(
    opened: Opened, section: str, columns: list[str], width: int
) -> None:
    where = "#overview" if section == "overview" else "#requests"
    page = opened(where, viewport={"width": width, "height": 900})
    table = page.locator(".options" if section == "request" else "main table").first
    if section == "request":
        page.locator("tbody [data-row]").first.click()
    table.locator("tbody tr").first.wait_for()
    box = table.locator("xpath=..").bounding_box()
    for name in columns:
        cell = table.get_by_role("columnheader", name=name, exact=True).bounding_box()
        assert cell["width"] > 0, name
        assert cell["x"] >= box["x"] - 1, name
        assert cell["x"] + cell["width"] <= min(width, box["x"] + box["width"]) + 1, name


def test_marks_of_every_section_have_a_legend(opened: Opened) -> None:
    page = opened("#overview")
    for section, words in {
        "overview": ["offered", "missed, rejected or failed", "draining", "dashed: its target"],
        "fleet": ["prefill", "quarantined", "stronger colour is faster"],
        "requests": ["ingress wait", "transfer", "missed an objective"],
        "scaling": ["decode desired", "prefill ready", "no change"],
    }.items():
        page.evaluate("name => { location.hash = name; }", section)
        for text in words:
            page.locator(f".page-{section}").get_by_text(text).first.wait_for()


def test_reduced_motion_stops_all_movement(opened: Opened) -> None:
    page = opened("#overview", reduced_motion="reduce")
    names = page.evaluate(
        "[...document.querySelectorAll('*')].map(n => getComputedStyle(n).animationName)"
    )
    assert set(names) == {"none"}


# ------------------------------------------------------------------------------- the playground


def test_a_chat_shows_its_answer_its_times_and_where_it_ran(
    opened: Opened, api: FakeApi, feed: SpoiledFeed
) -> None:
    record = next(record for record in feed.records() if len(record.legs) > 1)
    api.request_id = record.request_id
    page = opened("#playground")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("64")
    page.get_by_label("API key (optional)").fill(KEY)
    page.get_by_label("Message", exact=True).fill("Why?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Say it.")
    page.keyboard.press("Enter")
    figures = page.locator("[data-test=figures]", has_text="decode on")
    figures.wait_for()
    assert page.locator(".is-assistant .text").inner_text() == "".join(WORDS)
    for text in ("TTFT", "TPOT", "24 tokens", "prefill on"):
        assert text in figures.inner_text()
    headers, body = api.asked[-1]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?\nSay it."},
    ]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 64)
    figures.get_by_role("link").click()
    page.locator(".detail [data-test=bar]").first.wait_for()
    assert page.locator(".detail .title").first.inner_text() == record.request_id


def test_a_key_is_kept_in_memory_and_nowhere_else(opened: Opened) -> None:
    page = opened("#playground")
    page.get_by_label("API key (optional)").fill(KEY)
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    page.locator(".page-overview").wait_for()
    page.keyboard.press("6")
    assert page.get_by_label("API key (optional)").input_value() == KEY
    stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert KEY not in stored
    page.reload()
    assert page.get_by_label("API key (optional)").input_value() == ""


def test_a_deployment_with_keys_is_not_asked_before_there_is_one(
    opened: Opened, api: FakeApi, feed: SpoiledFeed
) -> None:
    asked, target = len(api.asked), feed.target
    assert isinstance(target, ChatTarget)
    feed.target = replace(target, needs_key=True)
    try:
        page = opened("#playground")
        page.get_by_label("API key").wait_for()
        page.get_by_label("Message", exact=True).fill("Hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("This deployment needs an API key.").wait_for()
    finally:
        feed.target = target
    assert len(api.asked) == asked


def test_a_page_that_is_not_encrypted_takes_no_key(opened: Opened) -> None:
    page = opened("#overview")
    page.evaluate("Object.defineProperty(window, 'isSecureContext', { value: false })")
    page.keyboard.press("6")
    page.get_by_text("This page is not encrypted, so it takes no key").wait_for()
    assert page.locator("input[type=password]").is_disabled()


def test_a_deployment_without_keys_asks_for_none(opened: Opened, feed: SpoiledFeed) -> None:
    target = feed.target
    assert isinstance(target, ChatTarget)
    feed.target = replace(target, takes_key=False)
    try:
        page = opened("#playground")
        page.get_by_label("Message", exact=True).wait_for()
        assert page.locator("input[type=password]").count() == 0
    finally:
        feed.target = target


def test_an_error_in_the_middle_of_an_answer_is_shown_as_text(opened: Opened, api: FakeApi) -> None:
    page = opened("#playground")
    api.error = HOSTILE
    try:
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        page.locator(".is-assistant .bad").wait_for()
    finally:
        api.error = ""
    assert page.locator(".is-assistant .text").inner_text() == WORDS[0]
    assert HOSTILE in page.locator(".is-assistant .bad").inner_text()
    assert page.locator("img").count() == 0
