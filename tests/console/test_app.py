"""The console's routes: what each answers, with which headers, and to whom."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from baton.console.app import MAX_CONCURRENT_QUERIES, MAX_REQUEST_ID_CHARS, console_app
from baton.console.hub import Hub, PollOptions
from baton.domain.errors import LinkFailed
from tests.console.scripted_feed import OVERVIEW, ScriptedFeed, request_report
from tests.console.viewers import TIMEOUT_S, running_viewer, wait_until

HOSTILE = '"><img src=x onerror=alert(1)>\r\n\r\nevent: hello\ndata: {}\n\n</script>\u2028'
QUICK = PollOptions(interval_s=0.0, deadline_s=2.0, stop_polling_after_s=0.0)


def app_of(feed: ScriptedFeed, *, most_viewers: int = 4, deadline_s: float = 2.0) -> Starlette:
    hub = Hub(feed, poll_options=QUICK, max_viewers=most_viewers)
    return console_app(feed, hub=hub, deadline_s=deadline_s)


def client_of(app: Starlette, prefix: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=f"http://baton.test{prefix}/")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(
        app_of(ScriptedFeed(reports=[request_report("a"), request_report(HOSTILE)]))
    ) as client:
        yield client


async def files_of_the_page(client: httpx.AsyncClient) -> list[str]:
    page = (await client.get("")).text
    return re.findall(r'(?:href|src)="(static/[^"]+)"', page)


# ------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("path", "status"),
    [("", 200), ("api/config", 200), ("api/request?id=a", 200), ("nowhere", 404)],
)
async def test_every_answer_is_closed_to_everything_from_elsewhere(
    client: httpx.AsyncClient, path: str, status: int
) -> None:
    answer = await client.get(path)
    assert answer.status_code == status
    policy = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "style-src 'self'" in policy
    assert "connect-src 'self'" in policy
    assert "img-src 'self' data:" in policy
    assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= set(policy)
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
@pytest.mark.parametrize("path", ["", "events", "api/config", "api/request?id=a", "nowhere"])
async def test_the_console_only_reads(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"
    assert "content-security-policy" in answer.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_other_sites_get_nothing(client: httpx.AsyncClient, site: str) -> None:
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    for path in ("", "events", "api/config"):
        assert (await client.get(path, headers=headers)).status_code == 403


async def test_a_link_on_another_site_leads_to_the_page(client: httpx.AsyncClient) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await client.get("", headers=headers)).status_code == 200


# ------------------------------------------------------------------------------------- the page


async def test_the_page_has_nothing_inline_and_nothing_from_elsewhere(
    client: httpx.AsyncClient,
) -> None:
    page = (await client.get("")).text
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    assert "//" not in page
    assert not re.search(r'(?:href|src)="/', page)


async def test_every_file_that_the_page_names_is_there(client: httpx.AsyncClient) -> None:
    names = await files_of_the_page(client)
    assert len(names) >= 5
    for name in names:
        assert (await client.get(name)).status_code == 200


async def test_every_module_that_a_module_imports_is_there(client: httpx.AsyncClient) -> None:
    wanted = {name for name in await files_of_the_page(client) if name.endswith(".js")}
    seen: set[str] = set()
    while wanted - seen:
        name = (wanted - seen).pop()
        answer = await client.get(name)
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith("text/javascript")
        folder = name.rpartition("/")[0]
        wanted |= {f"{folder}/{item}" for item in re.findall(r'from "\./([^"]+)"', answer.text)}
        seen.add(name)
    assert len(seen) > 8


async def test_files_are_kept_by_their_content_and_the_page_is_asked_for_again(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("")).headers["cache-control"] == "no-cache"
    name = (await files_of_the_page(client))[0]
    answer = await client.get(name)
    assert "immutable" in answer.headers["cache-control"]
    again = await client.get(name, headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "static/000000000000/app.js",
        "static/{tag}/../app.py",
        "static/{tag}/..%2f..%2fapp.py",
        "static/{tag}/%2e%2e/hub.py",
        "static/{tag}//etc/passwd",
        "static/{tag}/vendor/uplot/README.md",
        "static/{tag}/",
    ],
)
async def test_nothing_but_the_pages_files_is_served(client: httpx.AsyncClient, path: str) -> None:
    tag = (await files_of_the_page(client))[0].split("/")[1]
    assert (await client.get(path.format(tag=tag))).status_code == 404


async def test_it_works_below_another_path() -> None:
    outer = Starlette(routes=[Mount("/console", app=app_of(ScriptedFeed()))])
    async with client_of(outer, "/console") as client:
        for name in ["", "api/config", *await files_of_the_page(client)]:
            assert (await client.get(name)).status_code == 200, name
    async with running_viewer(outer, "latest") as viewer:
        viewer._path = "/console/events"
        await viewer.next_event("latest")


# ------------------------------------------------------------------------------------- answers


async def test_the_reports_of_a_request_are_shown(client: httpx.AsyncClient) -> None:
    answer = await client.get("api/request", params={"id": "a"})
    assert [item["request_id"] for item in answer.json()["requests"]] == ["a"]


async def test_a_hostile_id_comes_back_as_data_and_as_nothing_else(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("api/request", params={"id": HOSTILE})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["requests"][0]["request_id"] == HOSTILE


async def test_an_unknown_request_id_is_reported_as_such(client: httpx.AsyncClient) -> None:
    answer = await client.get("api/request", params={"id": "gone"})
    assert answer.status_code == 404
    assert "no ingress has its record" in answer.json()["reason"]


@pytest.mark.parametrize("request_id", ["", "x" * (MAX_REQUEST_ID_CHARS + 1)])
async def test_an_id_of_no_length_or_too_much_is_refused(
    client: httpx.AsyncClient, request_id: str
) -> None:
    answer = await client.get("api/request", params={"id": request_id})
    assert answer.status_code == 400
    assert str(MAX_REQUEST_ID_CHARS) in answer.json()["reason"]


async def test_the_configuration_is_sent_once_for_each_content(client: httpx.AsyncClient) -> None:
    answer = await client.get("api/config")
    assert answer.text == "model: tiny\n"
    again = await client.get("api/config", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    ("feed", "why"),
    [
        (ScriptedFeed(hanging={"config"}), "no answer within 0.01 s"),
        (ScriptedFeed(errors={"config": LinkFailed("controller", "gone")}), "gone"),
        (ScriptedFeed(errors={"config": RuntimeError("a secret")}), "controller's log"),
    ],
)
async def test_a_feed_that_does_not_answer_is_said_in_words(feed: ScriptedFeed, why: str) -> None:
    async with client_of(app_of(feed, deadline_s=0.01)) as client:
        answer = await client.get("api/config")
    assert answer.status_code == 503
    assert why in answer.json()["reason"]
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


async def test_the_fleet_gets_a_limited_number_of_questions_at_once() -> None:
    feed = ScriptedFeed()
    async with client_of(app_of(feed)) as client:
        answers = await asyncio.gather(*(client.get("api/config") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert feed.max_in_flight == MAX_CONCURRENT_QUERIES


# ------------------------------------------------------------------------------------- events


async def test_an_event_stream_is_not_cached() -> None:
    async with running_viewer(app_of(ScriptedFeed()), "latest") as viewer:
        await viewer.next_event("hello")
        await viewer.next_event("latest")
    assert viewer.status == 200
    assert viewer.headers["content-type"].startswith("text/event-stream")
    assert viewer.headers["cache-control"] == "no-store"
    assert "content-security-policy" in viewer.headers


async def test_a_hostile_id_begins_no_event_of_its_own() -> None:
    feed = ScriptedFeed(reports=[request_report(HOSTILE)])
    async with running_viewer(app_of(feed), "latest") as viewer:
        await viewer.next_event("hello")
        latest = await viewer.next_event("latest")
    assert latest["requests"][0]["request_id"] == HOSTILE
    assert viewer.body.count(b"event: hello\n") == 1


async def test_a_topic_that_does_not_exist_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get("events", params={"topics": "latest,prompts"})
    assert answer.status_code == 400
    assert answer.json()["reason"].startswith("no topic 'prompts', there are overview, ")


async def test_a_viewer_beyond_the_limit_gets_a_retry_time() -> None:
    app = app_of(ScriptedFeed(), most_viewers=1)
    async with running_viewer(app) as viewer, client_of(app) as client:
        await viewer.next_event("hello")
        async with asyncio.timeout(TIMEOUT_S):
            answer = await client.get("events")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "10"
        assert answer.json()["reason"] == "1 pages watch already; retry in 10 s"


async def test_a_viewer_that_leaves_makes_room() -> None:
    app = app_of(ScriptedFeed(), most_viewers=1)
    for _ in range(3):
        async with running_viewer(app) as viewer:
            await viewer.next_event("overview")
        assert app.state.hub.viewer_count == 0
    await wait_until(lambda: not app.state.hub.is_polling)


def is_generation(number: int) -> Callable[[Any], bool]:
    return lambda data: bool(data["overview"]["generation"] == number)


async def test_a_viewer_that_reads_slowly_gets_the_newest_and_not_all() -> None:
    feed = ScriptedFeed()
    app = app_of(feed)
    async with running_viewer(app) as slow, running_viewer(app) as quick:
        await slow.next_event("overview")
        slow.is_reading.clear()
        for generation in range(100, 200):
            feed.report = {**OVERVIEW, "generation": generation}
            await quick.next_event("overview", is_generation(generation))
        sends = slow.sends
        slow.is_reading.set()
        await slow.next_event("overview", is_generation(199))
        assert slow.sends - sends <= 4


async def test_closing_the_hub_ends_an_open_stream() -> None:
    app = app_of(ScriptedFeed())
    async with running_viewer(app) as viewer:
        await viewer.next_event("overview")
        await app.state.hub.close()
        await wait_until(lambda: viewer.body.endswith(b"\n\n") and app.state.hub.viewer_count == 0)
    assert viewer.status == 200


async def test_a_quiet_stream_says_that_it_is_still_there() -> None:
    from baton.console.app import EventStream

    hub = Hub(ScriptedFeed(hanging={"overview"}), poll_options=QUICK)
    async with running_viewer(EventStream(hub, frozenset(), keepalive_s=0.005)) as viewer:
        await viewer.next_event("hello")
        await wait_until(lambda: viewer.body.count(b": \n\n") >= 2)
    await hub.close()


# ------------------------------------------------------------------------------------- its files

STATIC = Path(__file__).parents[2] / "platform/baton/console/static"
OWN = sorted(STATIC.glob("*.js"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_script_makes_no_markup_of_text_and_contacts_no_other_host(path: Path) -> None:
    text = path.read_text().replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    assert not re.search(r"new Function|srcdoc|setAttribute\(\"(?:style|on)", text)
    assert not re.search(r"https?://|import\(|importScripts|sendBeacon|XMLHttpRequest", text)


def test_vendored_files_equal_the_fetched_ones() -> None:
    import hashlib

    folder = STATIC / "vendor/uplot"
    readme = (folder / "README.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE"):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert f"| `{name}` | `{digest}` |" in readme
