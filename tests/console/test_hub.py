"""One poll for all viewers: who is asked when, and what each viewer is sent."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.console.hub import Hub, PollOptions, TooManyViewers
from baton.console.topics import Topic
from baton.domain.errors import LinkFailed
from tests.console.scripted_feed import OVERVIEW, ScriptedFeed, request_report
from tests.console.viewers import TIMEOUT_S, wait_until

QUICK = PollOptions(interval_s=0.0, deadline_s=2.0, stop_polling_after_s=0.0)
ONCE = PollOptions(interval_s=3600.0, deadline_s=2.0, stop_polling_after_s=0.0)
"""Reads each source once."""


@asynccontextmanager
async def opened(
    feed: ScriptedFeed, pace: PollOptions = QUICK, most_viewers: int = 4
) -> AsyncIterator[Hub]:
    hub = Hub(feed, poll_options=pace, max_viewers=most_viewers)
    try:
        yield hub
    finally:
        await hub.close()


class Reader:
    """Takes events out of a mailbox, one after the other."""

    def __init__(self, hub: Hub, *topics: Topic) -> None:
        self.mailbox = hub.subscribe(frozenset(topics))
        self._blocks: list[str] = []

    async def event(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """The next event of that name; those before it are passed over."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                self._blocks = self._blocks or (await self.mailbox.drain()).decode().split("\n\n")
                block = self._blocks.pop(0)
                if block.startswith(f"event: {name}\n"):
                    return json.loads(block.partition("data: ")[2])

    async def rest(self) -> str:
        """Everything that waits now."""
        return "\n\n".join(self._blocks) + (await self.mailbox.drain()).decode()


async def test_without_viewers_the_fleet_is_not_queried() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        await asyncio.sleep(0)
        assert not hub.is_polling
    assert not feed.calls


async def test_a_viewer_is_greeted_with_the_history_and_then_told_what_holds() -> None:
    async with opened(ScriptedFeed()) as hub:
        mailbox = Reader(hub)
        assert (await mailbox.event("hello"))["history"] == {}
        overview = await mailbox.event("overview")
        assert overview["overview"]["model"] == "tiny"
        assert overview["point"] is None


async def test_the_first_viewer_sees_earlier_ticks() -> None:
    feed, now_s = ScriptedFeed(), time.monotonic()
    for tick in range(900):
        feed.points.add(OVERVIEW, now_s - 1798.0 + 2.0 * tick)
    async with opened(feed) as hub:
        mailbox = Reader(hub)
        hello = await mailbox.event("hello")
        columns = hello["history"]
        assert len(columns["at_s"]) == 900
        assert columns["goodput_per_s"] == [3.0] * 900
        assert (await mailbox.event("overview"))["point"]["at_s"] == columns["at_s"][-1]
        feed.points.add(OVERVIEW, now_s + 2.0)
        async with asyncio.timeout(TIMEOUT_S):
            while (await mailbox.event("overview"))["point"]["at_s"] == columns["at_s"][-1]:
                feed.report = {**feed.report, "up_s": time.monotonic()}


async def test_updates_go_on() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        mailbox = Reader(hub)
        await mailbox.event("overview")
        feed.report = {**OVERVIEW, "generation": 3}
        async with asyncio.timeout(TIMEOUT_S):
            while (await mailbox.event("overview"))["overview"]["generation"] != 3:
                pass


async def test_only_watched_topics_are_queried() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        Reader(hub, Topic.TICKS)
        await wait_until(lambda: feed.calls["overview"] > 3 and feed.calls["ticks"] > 3)
    assert set(feed.calls) == {"overview", "ticks"}


async def test_many_viewers_cost_the_fleet_no_more_than_one() -> None:
    feed = ScriptedFeed()
    async with opened(feed, ONCE, most_viewers=10) as hub:
        first = Reader(hub, Topic.LATEST)
        await first.event("latest")
        others = [Reader(hub, Topic.LATEST) for _ in range(9)]
        for mailbox in others:
            assert len((await mailbox.event("latest"))["requests"]) == 2
    assert feed.calls["overview"] == 1
    assert feed.calls["requests latest"] == 1


async def test_a_viewer_of_another_topic_does_not_wait_for_the_next_tick() -> None:
    feed = ScriptedFeed()
    async with opened(feed, ONCE) as hub:
        await Reader(hub).event("overview")
        second = Reader(hub, Topic.FLEET, Topic.SLOWEST)
        assert len((await second.event("fleet"))["replicas"]) == 2
        await second.event("slowest")
    assert feed.calls["overview"] == 2, "the replicas are not kept where nobody watches them"


async def test_a_topic_without_viewers_is_read_again_before_it_is_shown() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        one, other = Reader(hub, Topic.LATEST), Reader(hub)
        await one.event("latest")
        hub.unsubscribe(one.mailbox)
        asked = feed.calls["overview"]
        await wait_until(lambda: feed.calls["overview"] > asked + 5)
        await other.event("overview")
        feed.reports = [request_report("new")]
        latest = await Reader(hub, Topic.LATEST).event("latest")
    assert [row["request_id"] for row in latest["requests"]] == ["new"]


async def test_a_viewer_is_not_sent_what_it_does_not_watch() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        plain, other = Reader(hub), Reader(hub, Topic.LATEST)
        await other.event("latest")
        seen = await plain.rest()
    assert "event: overview" in seen
    assert "event: latest" not in seen


async def test_unchanged_data_is_not_sent_again() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        mailbox = Reader(hub, Topic.LATEST)
        await mailbox.event("latest")
        asked = feed.calls["requests latest"]
        await wait_until(lambda: feed.calls["requests latest"] > asked + 3)
        feed.report = {**OVERVIEW, "generation": 3}
        assert "event: latest" not in await mailbox.rest()
        feed.reports = [request_report("new")]
        assert (await mailbox.event("latest"))["requests"][0]["request_id"] == "new"


async def test_a_slow_viewer_loses_updates_and_costs_no_memory() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        slow = Reader(hub, Topic.LATEST)
        for number in range(200):
            feed.reports = [request_report(f"r{number}")]
            asked = feed.calls["requests latest"]
            await wait_until(lambda asked=asked: feed.calls["requests latest"] > asked + 1)  # type: ignore[misc]
        frames = await slow.rest()
    assert frames.count("event: latest") == 1
    assert "r199" in frames or "r198" in frames
    assert frames.count("event: ") <= 3


async def test_the_poll_ends_when_the_last_viewer_has_left() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        one, two = Reader(hub), Reader(hub)
        hub.unsubscribe(one.mailbox)
        await two.event("overview")
        assert hub.is_polling
        hub.unsubscribe(two.mailbox)
        await wait_until(lambda: not hub.is_polling)
        asked = feed.calls["overview"]
        for _ in range(20):
            await asyncio.sleep(0)
        assert feed.calls["overview"] == asked


async def test_a_page_that_is_loaded_again_finds_what_is_known() -> None:
    feed = ScriptedFeed()
    async with opened(feed, PollOptions(interval_s=0.0, stop_polling_after_s=3600.0)) as hub:
        mailbox = Reader(hub)
        await mailbox.event("overview")
        hub.unsubscribe(mailbox.mailbox)
        assert hub.is_polling
        again = Reader(hub)
        assert "event: overview" in await again.rest()


async def test_the_number_of_viewers_is_limited() -> None:
    async with opened(ScriptedFeed(), most_viewers=2) as hub:
        first = Reader(hub)
        Reader(hub)
        with pytest.raises(TooManyViewers, match="2 pages watch already"):
            Reader(hub)
        hub.unsubscribe(first.mailbox)
        Reader(hub)
        assert hub.viewer_count == 2


async def test_a_viewer_is_told_that_the_controller_does_not_answer_and_since_when() -> None:
    feed = ScriptedFeed(errors={"overview": LinkFailed("controller", "it does not answer")})
    async with opened(feed) as hub:
        trouble = await Reader(hub).event("trouble")
    assert trouble["source"] == "overview"
    assert "it does not answer" in trouble["reason"]
    assert trouble["for_s"] >= 0


async def test_a_feed_that_does_not_answer_in_time_is_named() -> None:
    feed = ScriptedFeed(hanging={"links"})
    async with opened(
        feed, PollOptions(interval_s=0.0, deadline_s=0.01, stop_polling_after_s=0.0)
    ) as hub:
        trouble = await Reader(hub, Topic.LINKS).event("trouble")
    assert (trouble["source"], trouble["reason"]) == ("links", "no answer within 0.01 s")


async def test_one_source_that_fails_does_not_hold_up_the_others() -> None:
    feed = ScriptedFeed(hanging={"overview"}, errors={"links": LinkFailed("ingress", "gone")})
    async with opened(feed) as hub:
        mailbox = Reader(hub, Topic.LATEST, Topic.LINKS)
        assert len((await mailbox.event("latest"))["requests"]) == 2


async def test_when_a_source_answers_again_its_trouble_is_withdrawn() -> None:
    feed = ScriptedFeed(errors={"links": LinkFailed("ingress", "gone")})
    async with opened(feed) as hub:
        mailbox = Reader(hub, Topic.LINKS)
        assert (await mailbox.event("trouble"))["reason"] is not None
        feed.errors.clear()
        async with asyncio.timeout(TIMEOUT_S):
            while (await mailbox.event("trouble"))["reason"] is not None:
                pass
        second = Reader(hub, Topic.LINKS)
        assert "event: trouble" not in await second.rest()


async def test_a_late_viewer_gets_failures_that_are_not_new() -> None:
    feed = ScriptedFeed(errors={"overview": LinkFailed("controller", "gone")})
    async with opened(feed, ONCE) as hub:
        await Reader(hub).event("trouble")
        assert (await Reader(hub).event("trouble"))["source"] == "overview"
    assert feed.calls["overview"] == 1


async def test_a_bug_is_logged_once_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    feed = ScriptedFeed(errors={"ticks": RuntimeError("secret of the code")})
    with caplog.at_level(logging.WARNING):
        async with opened(feed) as hub:
            trouble = await Reader(hub, Topic.TICKS).event("trouble")
            await wait_until(lambda: feed.calls["ticks"] > 5)
    assert trouble["reason"] == "see the controller's log"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "secret of the code" in str(caplog.records[0].exc_text)


async def test_a_report_without_what_is_expected_is_trouble_and_no_end_of_the_poll() -> None:
    feed = ScriptedFeed(report={"classes": [{}]})
    async with opened(feed) as hub:
        mailbox = Reader(hub)
        await mailbox.event("trouble")
        feed.report = OVERVIEW
        await mailbox.event("overview")


async def test_large_answers_are_read_less_often() -> None:
    feed = ScriptedFeed(reports=[request_report("a", tenant="t" * 8_000_000)])
    async with opened(feed, PollOptions(interval_s=0.05, stop_polling_after_s=0.0)) as hub:
        Reader(hub, Topic.LATEST)
        await wait_until(lambda: feed.calls["overview"] >= 5)
    assert feed.calls["requests latest"] == 1


async def test_closing_ends_every_stream() -> None:
    feed = ScriptedFeed()
    async with opened(feed) as hub:
        mailbox = Reader(hub)
        await mailbox.event("overview")
        await hub.close()
        async with asyncio.timeout(TIMEOUT_S):
            while await mailbox.mailbox.drain():
                pass
        assert hub.viewer_count == 0
        assert not hub.is_polling
