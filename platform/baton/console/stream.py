"""Server-sent events to one viewer, until it leaves."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from baton.console.hub import Hub, TooManyViewers
from baton.console.mailbox import Mailbox
from baton.console.topics import Topic
from baton.domain.names.retry_after import retry_after_seconds, retry_after_text

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_KEEPALIVE = b": \n\n"
_RETRY_AFTER_S = 10.0


class EventStream:
    """An ASGI response. A slow viewer misses frames: see `Mailbox`."""

    def __init__(self, hub: Hub, topics: frozenset[Topic], *, keepalive_s: float = 15.0) -> None:
        self._hub = hub
        self._topics = topics
        self._keepalive_s = keepalive_s
        """After so long without an event a comment is sent, so that proxies keep the stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the viewer leaves or the hub closes; 503 when there is no room."""
        try:
            mailbox = self._hub.subscribe(self._topics)
        except TooManyViewers as error:
            response = JSONResponse(
                {"why": f"{error}; {retry_after_text(_RETRY_AFTER_S)}"},
                status_code=503,
                headers={"retry-after": str(retry_after_seconds(_RETRY_AFTER_S))},
            )
            await response(scope, receive, send)
            return
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._serve(mailbox, receive, send)
        finally:
            self._hub.unsubscribe(mailbox)

    async def _serve(self, mailbox: Mailbox, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = {
                group.create_task(self._send_frames(mailbox, send)),
                group.create_task(_wait_for_disconnect(receive)),
            }
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _send_frames(self, mailbox: Mailbox, send: Send) -> None:
        while frames := await self._next(mailbox):
            try:
                await send(_body(frames, more=True))
            except OSError:
                return  # the viewer is gone
        await send(_body(b"", more=False))

    async def _next(self, mailbox: Mailbox) -> bytes:
        try:
            async with asyncio.timeout(self._keepalive_s):
                return await mailbox.drain()
        except TimeoutError:
            return _KEEPALIVE


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
