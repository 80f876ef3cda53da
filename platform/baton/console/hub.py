"""Polls the fleet once for all viewers.

*Theory of operation.* A viewer subscribes to topics and gets a mailbox. While there are viewers,
each source of a watched topic is read about once a second, encoded once, and put into mailboxes.
Polling stops `STOP_POLLING_AFTER_S` after the last viewer has left: a reloading page is absent only
for a moment. Large answers are read less often, so that no source takes more than `MAX_BYTES_PER_S`
of a viewer. A source that fails is named to its viewers, with the time since when, and read again;
the others continue. The hub keeps the newest frame of each topic. The points of the charts come
from the controller's ticks, so that they do not depend on viewers.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from baton.console.feed import Feed
from baton.console.topics import Source, Topic, make_sources
from baton.domain.errors import BatonError

_LOGGER = logging.getLogger(__name__)
MAX_VIEWERS: Final = 32
STOP_POLLING_AFTER_S: Final = 10.0
MAX_BYTES_PER_S: Final = 65536
_Frame = bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PollOptions:
    """Interval and deadline of polls, in seconds."""

    interval_s: float = 1.0
    deadline_s: float = 5.0
    stop_polling_after_s: float = STOP_POLLING_AFTER_S


class TooManyViewers(Exception):
    """The limit of viewers is reached."""


class Hub:
    """See the module. `close` ends it and every viewer's stream."""

    def __init__(
        self,
        feed: Feed,
        *,
        poll_options: PollOptions | None = None,
        max_viewers: int = MAX_VIEWERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll_options = poll_options or PollOptions()
        self._max_viewers = max_viewers
        self._clock = clock
        self._points = feed.points
        self._sources = make_sources(feed)
        self._viewers: set[Mailbox] = set()
        self._frames: dict[str, _Frame] = {}
        """By watched topic, or `trouble:` and the topic if its source fails."""
        self._failing_since: dict[Source, float] = {}
        self._wake = {source: asyncio.Event() for source in self._sources}
        self._task: asyncio.Task[None] | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    @property
    def viewer_count(self) -> int:
        """Present viewers."""
        return len(self._viewers)

    @property
    def is_polling(self) -> bool:
        """Whether the fleet is polled."""
        return self._task is not None

    def subscribe(self, topics: frozenset[Topic]) -> Mailbox:
        """A mailbox for these topics, with the kept frames in it.

        Raises:
            TooManyViewers: the limit is reached.
        """
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers(f"{self._max_viewers} pages watch already")
        mailbox = Mailbox(frozenset(topics | {Topic.OVERVIEW}))
        self._viewers.add(mailbox)
        mailbox.put("hello", self._hello_frame())
        for key, frame in self._frames.items():
            if key.removeprefix("trouble:") in mailbox.topics:
                mailbox.put(key, frame)
        self._start()
        for source in self._sources:
            if any(self._is_unknown(topic) for topic in source.topics & mailbox.topics):
                self._wake[source].set()
        return mailbox

    def unsubscribe(self, mailbox: Mailbox) -> None:
        """End a viewer's subscription. Idempotent."""
        self._viewers.discard(mailbox)
        mailbox.close()
        if not self._viewers and self._task is not None and self._linger_timer is None:
            loop = asyncio.get_running_loop()
            self._linger_timer = loop.call_later(
                self._poll_options.stop_polling_after_s, self._stop
            )

    async def close(self) -> None:
        """End every stream, and the poll. Idempotent."""
        for mailbox in tuple(self._viewers):
            self.unsubscribe(mailbox)
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.wait({task})

    # ------------------------------------------------------------------------------- the poll

    def _start(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if self._task is None:
            # Its own context: the poll does not belong to the request that starts it.
            self._task = asyncio.create_task(
                self._poll(), name="console", context=contextvars.Context()
            )

    def _stop(self) -> None:
        """End the poll, and drop frames that would be stale for the next viewer."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._linger_timer, task, self._task = None, self._task, None
        self._frames.clear()
        self._failing_since.clear()
        if task is not None:
            task.cancel()

    async def _poll(self) -> None:
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._poll_source(source))

    async def _poll_source(self, source: Source) -> None:
        """Read a source repeatedly while a viewer watches it."""
        wake = self._wake[source]
        while True:
            wake.clear()
            watched = source.topics & self._watched()
            self._discard_frames(source.topics - watched)
            sent_bytes = await self._read(source, watched) if watched else 0
            wait_s = self._poll_options.interval_s * max(1.0, sent_bytes / MAX_BYTES_PER_S)
            try:
                async with asyncio.timeout(wait_s if watched else None):
                    await wake.wait()
            except TimeoutError:
                continue

    def _watched(self) -> frozenset[Topic]:
        return frozenset(topic for mailbox in self._viewers for topic in mailbox.topics)

    def _is_unknown(self, topic: Topic) -> bool:
        return topic not in self._frames and f"trouble:{topic}" not in self._frames

    def _discard_frames(self, topics: frozenset[Topic]) -> None:
        """Drop frames of unwatched topics, which would be stale for the next viewer."""
        for topic in topics:
            self._frames.pop(topic, None)
            self._frames.pop(f"trouble:{topic}", None)

    async def _read(self, source: Source, watched: frozenset[Topic]) -> int:
        """Read a source once and send its frames or its failure; returns the size of the frames."""
        try:
            async with asyncio.timeout(self._poll_options.deadline_s):
                views = await source.read(watched)
            frames = {topic: _frame_of(topic, view) for topic, view in views.items()}
        except TimeoutError:
            self._on_failure(source, f"no answer within {self._poll_options.deadline_s:g} s")
        except BatonError as error:
            self._on_failure(source, str(error))
        except Exception as error:  # noqa: BLE001 - supervised: logged, published and retried
            self._on_failure(source, "see the controller's log", error)
        else:
            self._on_success(source)
            for topic, frame in frames.items():
                self._send(topic, topic, frame)
            return sum(map(len, frames.values()))
        return 0

    def _on_failure(self, source: Source, reason: str, error: Exception | None = None) -> None:
        if source not in self._failing_since:
            self._failing_since[source] = self._clock()
            _LOGGER.warning("console cannot read %s: %s", source.name, reason, exc_info=error)
        for topic in source.topics:
            self._frames.pop(topic, None)
        self._send_failure(source, reason)

    def _on_success(self, source: Source) -> None:
        if self._failing_since.pop(source, None) is not None:
            self._send_failure(source, None)
            for topic in source.topics:
                self._frames.pop(f"trouble:{topic}", None)

    def _send_failure(self, source: Source, reason: str | None) -> None:
        since_s = self._failing_since.get(source)
        for_s = None if since_s is None else round(self._clock() - since_s, 1)
        frame = _frame_of("trouble", {"source": source.name, "reason": reason, "for_s": for_s})
        for topic in sorted(source.topics):
            self._send(f"trouble:{topic}", topic, frame)

    def _send(self, key: str, topic: Topic, frame: _Frame) -> None:
        """Keep a frame, and send it to viewers of its topic, unless unchanged."""
        if self._frames.get(key) == frame:
            return
        self._frames[key] = frame
        for mailbox in self._viewers:
            if topic in mailbox.topics:
                mailbox.put(key, frame)

    def _hello_frame(self) -> _Frame:
        hello = {
            "now_s": round(self._clock(), 3),
            "every_s": self._poll_options.interval_s,
            "history": self._points.columns(self._clock()),
        }
        return _frame_of("hello", hello)


def _frame_of(event: str, value: object) -> _Frame:
    """A server-sent event; JSON contains no raw line breaks."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(value))


class Mailbox:
    """Holds the newest frame of each topic: a slow viewer loses updates and costs no memory."""

    def __init__(self, topics: frozenset[Topic]) -> None:
        self.topics = topics
        self._pending: dict[str, _Frame] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, key: str, frame: _Frame) -> None:
        """Replace the waiting frame of that key."""
        self._pending[key] = frame
        self._changed.set()

    def close(self) -> None:
        """End `drain`. Idempotent."""
        self._closed = True
        self._changed.set()

    async def drain(self) -> bytes:
        """Waits for frames; empty after `close`."""
        await self._changed.wait()
        frames = b"".join(self._pending.values())
        self._pending.clear()
        if not self._closed:
            self._changed.clear()
        return frames
