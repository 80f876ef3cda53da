"""An API for the console's playground: it streams a fixed answer, and tells what it was asked."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.console.feed import ChatTarget

CHAT_WAIT_S = 20.0
"""Seconds that a test waits for an answer."""
WORDS = (
    "A long prompt would hold up every stream of its engine. ",
    "On separate engines, ",
    "streams go on while it is computed elsewhere.",
)


@dataclass
class FakeApi:
    """One answer for every request; `gate` holds back what follows the first word."""

    request_id: str = "chatcmpl-1"
    status: int = 200
    error: str = ""
    gate: asyncio.Event | None = None
    pause_s: float = 0.0
    """Before each word, for pictures."""
    asked: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    """Headers and body of each request."""
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has left before the end."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.strip().split("\r\n")
            headers = {"": line} | {
                name.lower(): value for name, value in (item.split(": ", 1) for item in rest)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.asked.append((headers, json.loads(body)))
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            self.abandoned.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            error = json.dumps({"error": {"message": self.error}})
            writer.write(_head(self.status, "application/json") + error.encode())
            await writer.drain()
            return
        writer.write(_head(200, "text/event-stream"))
        for number, word in enumerate(WORDS):
            if number == 1 and self.gate is not None:
                await self._wait_at_gate(reader)
            await asyncio.sleep(self.pause_s)
            await self._send(writer, {"choices": [{"delta": {"content": word}}]})
            if self.error:
                await self._send(writer, {"error": {"message": self.error}})
                return
        usage = {"prompt_tokens": 20, "completion_tokens": 24}
        await self._send(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    async def _wait_at_gate(self, reader: asyncio.StreamReader) -> None:
        assert self.gate is not None
        gone = asyncio.ensure_future(reader.read())
        passed = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait({gone, passed}, return_when=asyncio.FIRST_COMPLETED)
        passed.cancel()
        if gone.done():
            raise ConnectionResetError
        gone.cancel()

    async def _send(self, writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
        writer.write(b"data: " + json.dumps({"id": self.request_id, **event}).encode() + b"\n\n")
        await writer.drain()


def _head(status: int, media_type: str) -> bytes:
    return (
        f"HTTP/1.1 {status} status\r\ncontent-type: {media_type}\r\nconnection: close\r\n\r\n"
    ).encode()


@asynccontextmanager
async def opened_api(
    api: FakeApi | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FakeApi]:
    """The API at a port of this machine, on this loop."""
    api = api or FakeApi()
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0, ssl=tls)
    api.port = server.sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        server.close()
        await server.wait_closed()


@contextmanager
def running_api() -> Iterator[FakeApi]:
    """The API on a thread of its own, for a browser."""
    api, ready, ended = FakeApi(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with opened_api(api):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(CHAT_WAIT_S)
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(CHAT_WAIT_S)
        loop.close()


def chat_target_of(api: FakeApi, *, needs_key: bool = False) -> ChatTarget:
    """Leads to that API."""
    return ChatTarget(urls=(api.url,), models=("qwen-7b",), takes_key=True, needs_key=needs_key)
