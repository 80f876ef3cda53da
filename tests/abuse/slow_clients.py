"""Clients that are slow on purpose, and how long others wait for them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx

from tests.abuse.raw import Address

_BYTE_INTERVAL_S = 1.0
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: front.example\r\nContent-Type: application/json\r\n"
)


@dataclass(slots=True)
class SlowClientTotals:
    """What became of them."""

    opened: int = 0
    longest_connection_s: dict[str, float] = field(default_factory=dict)
    """By kind, until the last of them was sent away."""


def run_slow_clients(
    address: Address, *, key: str, per_kind: int, duration_s: float
) -> SlowClientTotals:
    """Open `per_kind` connections of each kind; say a byte a second, or nothing, on each."""
    openings = {
        "head": (_HEAD + b"X-Any: ", b"a"),
        "body": (_head_with(key) + b'{"prompt": "', b"a"),
        "silent": (b"", b""),
    }
    totals = SlowClientTotals()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for kind, (begin, more) in openings.items():
                for _ in range(per_kind):
                    group.create_task(one(kind, begin, more))

    async def one(kind: str, begin: bytes, more: bytes) -> None:
        reader, writer = await asyncio.open_connection(*address)
        totals.opened += 1
        began_s = time.monotonic()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(duration_s):
                writer.write(begin)
                await _wait_until_closed(reader, writer, more)
        took_s = time.monotonic() - began_s
        totals.longest_connection_s[kind] = max(totals.longest_connection_s.get(kind, 0.0), took_s)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    asyncio.run(run())
    return totals


def _head_with(key: str) -> bytes:
    return _HEAD + b"Authorization: Bearer %b\r\nContent-Length: 4000\r\n\r\n" % key.encode()


async def _wait_until_closed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, more: bytes
) -> None:
    while not reader.at_eof():
        with suppress(TimeoutError):
            async with asyncio.timeout(_BYTE_INTERVAL_S):
                await reader.read(65536)
                continue
        if more:
            writer.write(more)
            await writer.drain()


@dataclass(slots=True)
class StreamGaps:
    """Times between two events of a stream."""

    gaps_s: list[float] = field(default_factory=list)


@contextmanager
def stream_gaps(url: str, key: str, model: str) -> Iterator[StreamGaps]:
    """Stream one answer after the other for as long as this lasts, and time the events."""
    gaps, stopped = StreamGaps(), threading.Event()
    body = {"model": model, "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def run() -> None:
        while not stopped.is_set():
            content = json.dumps(body).encode()
            with httpx.stream(
                "POST", f"{url}/v1/completions", content=content, headers=headers, timeout=60
            ) as answer:
                _time_events(answer, gaps, stopped)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield gaps
    finally:
        stopped.set()
        thread.join(60)


def _time_events(answer: httpx.Response, gaps: StreamGaps, stopped: threading.Event) -> None:
    last_s: float | None = None
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            now_s = time.monotonic()
            if last_s is not None:
                gaps.gaps_s.append(now_s - last_s)
            last_s = now_s
        if stopped.is_set():
            return
