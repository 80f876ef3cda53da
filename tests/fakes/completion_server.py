"""A small OpenAI-compatible HTTP server on asyncio, whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

END = "data: [DONE]\n\n"


@dataclass(slots=True)
class Asked:
    """A completion that was asked for."""

    body: dict[str, Any]
    headers: dict[str, str]


Behaviour = Callable[[Asked], AsyncIterator[str]]
"""The events of an answer's stream; the first may be a status line such as `503 Busy`."""


def chunk(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def token(*, last: bool = False) -> str:
    return chunk(choices=[{"text": "a", "finish_reason": "length" if last else None}], usage=None)


def usage(tokens: int, cached: int | None = None) -> str:
    details = None if cached is None else {"cached_tokens": cached}
    return chunk(choices=[], usage={"completion_tokens": tokens, "prompt_tokens_details": details})


def events(*written: str) -> Behaviour:
    """Each answer is these."""

    async def behave(_: Asked) -> AsyncIterator[str]:
        for event in written:
            yield event

    return behave


async def as_asked(asked: Asked) -> AsyncIterator[str]:
    """As many tokens as are asked for."""
    tokens = asked.body["max_tokens"]
    for number in range(tokens):
        yield token(last=number == tokens - 1)
    yield usage(tokens, 3)
    yield END


@dataclass(slots=True)
class CompletionServer:
    """Serves one model; what was asked is kept."""

    behaviour: Behaviour = as_asked
    models: str = '{"data": [{"id": "tiny", "max_model_len": 1000}]}'
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CompletionServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    @contextmanager
    def in_thread(self) -> Iterator[CompletionServer]:
        """For clients that run an event loop of their own."""
        ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

        async def serve() -> None:
            async with self.running():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.run_until_complete(_ended(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if head[0].startswith("GET /v1/models"):
            _begin(writer, "200 OK")
            writer.write(self.models.encode())
            return await writer.drain()
        body = await reader.readexactly(int(headers["content-length"]))
        asked = Asked(json.loads(body), headers)
        self.asked.append(asked)
        begun = False
        async for event in self.behaviour(asked):
            if not begun:
                status = event if event[0].isdigit() else "200 OK"
                _begin(writer, status)
                begun = True
                if status is event:
                    continue
            writer.write(event.encode())
            await writer.drain()
        return None


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Give up answers that nobody waits for any more, and let their connections close."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)


def _begin(writer: asyncio.StreamWriter, status: str) -> None:
    writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
