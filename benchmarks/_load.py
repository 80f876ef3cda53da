"""The client: HTTP/1.1 over bare sockets in one event loop, a time for each piece that arrives.

Nothing is parsed while a load runs: a response's bytes are kept with their times and read later.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton.domain.names.addresses import format_address
from benchmarks._statistics import Segment

_LAST_CHUNK = b"0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_TEXT = """
the of a prompt is key value cache once and then for every token that follows so two engines
may share work between them one reads other writes block after block until last word has been
said while streams go on without pause at steady pace under load which rises with hour of day
when more people ask their questions than machine can answer in time it was given by those
"""


def completion_body(rng: random.Random, *, model: str, words: int, max_tokens: int) -> bytes:
    """A streamed completion request; its prompt shares no first block with another's."""
    prompt = f"{rng.getrandbits(64):x} " + " ".join(rng.choices(_TEXT.split(), k=words))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def poisson_arrivals(rng: random.Random, *, rate_per_s: float, window_s: float) -> list[float]:
    """Times of arrival from 0 to `window_s`."""
    at_s = rng.expovariate(rate_per_s)
    arrivals = []
    while at_s < window_s:
        arrivals.append(at_s)
        at_s += rng.expovariate(rate_per_s)
    return arrivals


@dataclass(slots=True)
class Exchange:
    """One request and what came back, unread."""

    send_delay_s: float
    """How much later than planned it was sent."""
    sent_at_s: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    error: str = ""

    def body(self) -> list[Segment]:
        """The segments without the response's head."""
        head = b""
        for number, (at_s, part) in enumerate(self.segments, start=1):
            head += part
            if (end := head.find(_HEAD_END)) >= 0:
                return [(at_s, head[end + len(_HEAD_END) :]), *self.segments[number:]]
        return []


class Connection(asyncio.Protocol):
    """One kept-alive connection, for one request at a time."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._will_close = False
        """Whether the server closes after this response."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send small writes at once."""
        self._transport = transport  # type: ignore[assignment]  # a stream's
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies the waiting task."""
        self.is_open = False
        if self._exchange is not None:
            self._finish(f"the connection was lost: {exc}")

    def data_received(self, data: bytes) -> None:
        """Keep it, with its time; notice the end."""
        at_s = time.perf_counter()
        exchange = self._exchange
        if exchange is None:
            return
        if not exchange.segments and not data.startswith(b"HTTP/1.1 200"):
            self.close()
            self._finish(data[:300].decode(errors="replace"))
            return
        if not exchange.segments:
            # HAProxy says so while another one takes its place.
            self._will_close = b"\r\nconnection: close" in data.partition(_HEAD_END)[0].lower()
        exchange.segments.append((at_s, data))
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) - 2 :]
        # An event's own text holds no carriage return.
        if self._tail == b"\r\n" + _LAST_CHUNK:
            if self._will_close:
                self.close()
            self._finish("")

    async def send(self, request: bytes, exchange: Exchange) -> None:
        """Send a request; returns when its response is complete or has failed."""
        self._exchange, self._tail = exchange, b""
        self._done = asyncio.get_running_loop().create_future()
        exchange.sent_at_s = time.perf_counter()
        if self._transport is None or not self.is_open:
            self._finish("the connection is closed")
        else:
            self._transport.write(request)
        await self._done

    def close(self) -> None:
        """Close."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def _finish(self, error: str) -> None:
        if self._exchange is not None:
            self._exchange.error = error
        self._exchange = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests to one endpoint over a pool of connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._idle: list[Connection] = []
        self.late_connections = 0

    async def open(self, connections: int) -> None:
        """Have connections ready."""
        self._idle += [await self._connect() for _ in range(connections)]

    def close(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.close()

    async def send_sequentially(self, bodies: Sequence[bytes]) -> list[Exchange]:
        """Send each request when the one before is answered."""
        exchanges = [Exchange(send_delay_s=0.0) for _ in bodies]
        for body, exchange in zip(bodies, exchanges, strict=True):
            await self._send(body, exchange)
        return exchanges

    async def send_at_times(
        self, bodies: Sequence[bytes], arrivals: Sequence[float]
    ) -> list[Exchange]:
        """Send each request at its time from now, however many are under way."""
        start_at_s = time.perf_counter()
        exchanges: list[Exchange] = []
        async with asyncio.TaskGroup() as tasks:
            for body, at_s in zip(bodies, arrivals, strict=True):
                wait_s = start_at_s + at_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                exchange = Exchange(send_delay_s=time.perf_counter() - start_at_s - at_s)
                exchanges.append(exchange)
                tasks.create_task(self._send(body, exchange))
        return exchanges

    async def _send(self, body: bytes, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                break
        else:
            self.late_connections += 1
            connection = await self._connect()
        await connection.send(self._http_request(body), exchange)
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port)
        return connection

    def _http_request(self, body: bytes) -> bytes:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {format_address(self._host, self._port)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class GcDisabled:
    """No garbage collection inside: a pause of the client would count as the server's."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()
