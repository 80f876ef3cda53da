"""A browser's end of the event stream, without a browser or a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message

TIMEOUT_S = 5.0
Event = tuple[str, Any]


class Viewer:
    """One GET that goes on; what it is sent is taken only while `is_reading` is set."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.sends = 0
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self._app = app
        self._path, _, self._query = path.partition("?")
        self._has_started = False
        self._disconnected = asyncio.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": self._query.encode(),
            "root_path": "",
            "headers": [],
        }
        await self._app(scope, self._receive, self._send)

    def disconnect(self) -> None:
        self._disconnected.set()

    async def next_event(
        self, name: str, predicate: Callable[[Any], bool] = lambda _data: True
    ) -> Any:  # noqa: ANN401 - JSON
        """The next event of that name, of those that it was sent."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                event_name, data = await self._events.get()
                if event_name == name and predicate(data):
                    return data

    async def _receive(self) -> Message:
        if not self._has_started:
            self._has_started = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.is_reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        self.sends += 1
        self.body += message["body"]
        for block in message["body"].decode().split("\n\n"):
            if block.startswith("event: "):
                name, data = block.removeprefix("event: ").split("\ndata: ")
                self._events.put_nowait((name, json.loads(data)))


@asynccontextmanager
async def running_viewer(app: ASGIApp, topics: str = "") -> AsyncIterator[Viewer]:
    """A viewer that leaves at the end; its stream must then end by itself."""
    viewer = Viewer(app, f"/events?topics={topics}")
    task = asyncio.create_task(viewer.run())
    try:
        yield viewer
    finally:
        viewer.is_reading.set()
        viewer.disconnect()
        async with asyncio.timeout(TIMEOUT_S):
            await task


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let others run until it holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - it is others that let it hold, and tell nobody
            await asyncio.sleep(0)
