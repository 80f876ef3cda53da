"""A small OpenAI-compatible HTTP server on asyncio, whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

SSE_DONE = "data: [DONE]\n\n"
_TURNS_OF_A_CONNECTION = 5
"""Of asyncio's loop, until an accepted connection has its answer's task."""


@dataclass(slots=True)
class ReceivedRequest:
    """A completion that was asked for."""

    body: dict[str, Any]
    headers: dict[str, str]


Behaviour = Callable[[ReceivedRequest], AsyncIterator[str]]
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

    async def behave(_: ReceivedRequest) -> AsyncIterator[str]:
        for event in written:
            yield event

    return behave


async def stream_all_tokens(request: ReceivedRequest) -> AsyncIterator[str]:
    """As many tokens as are asked for."""
    tokens = request.body["max_tokens"]
    for number in range(tokens):
        yield token(last=number == tokens - 1)
    yield usage(tokens, 3)
    yield SSE_DONE


@dataclass(slots=True)
class CompletionServer:
    """Serves one model; what was asked is kept."""

    behaviour: Behaviour = stream_all_tokens
    models: str = '{"data": [{"id": "tiny", "max_model_len": 1000}]}'
    models_status: str = "200 OK"
    tls: ssl.SSLContext | None = None
    requests: list[ReceivedRequest] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CompletionServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        scheme = "http" if self.tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            # asyncio leaves a connection open that it accepts just before its server closes.
            asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
            for _ in range(_TURNS_OF_A_CONNECTION):
                await asyncio.sleep(0)
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
            loop.run_until_complete(_cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the server ends
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if head[0].startswith("GET /v1/models"):
            _write_head(writer, self.models_status)
            writer.write(self.models.encode())
            return await writer.drain()
        body = await reader.readexactly(int(headers["content-length"]))
        request = ReceivedRequest(json.loads(body), headers)
        self.requests.append(request)
        has_started = False
        async for event in self.behaviour(request):
            if not has_started:
                status = event if event[0].isdigit() else "200 OK"
                _write_head(writer, status)
                has_started = True
                if status is event:
                    continue
            writer.write(event.encode())
            await writer.drain()
        return None


async def _cancel_all() -> None:
    """Give up answers that nobody waits for any more; each closes its connection."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write_head(writer: asyncio.StreamWriter, status: str) -> None:
    writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
