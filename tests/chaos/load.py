"""Clients in open loop: they arrive by a schedule, and write down what they see.

A load is planned before it begins, the same for the same seed. The carrier of a request is an
`SendRequest`: `HttpClient` over HTTP, a stage's ingress in the same process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from baton.bench.client.client import EventReader, StreamInvalid
from tests.chaos.history import Ending, Exchange

SendRequest = Callable[[Exchange], Awaitable[None]]
"""Sends a request and writes down what comes; returns when it has ended."""

_OK = 200
_DONE = b"[DONE]"
_CONNECT_S = 10.0
_MAX_ERROR_CHARS = 200
"""Characters that are kept of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of random lengths at random times."""

    rate_per_s: float
    """Poisson."""
    requests: int
    prompt_tokens: tuple[int, int] = (32, 512)
    """From and to, both included."""
    output_tokens: tuple[int, int] = (48, 96)
    shared_prompts: int = 0
    """This many beginnings, each of half a longest prompt, are in common to all; 0: none is."""
    vocabulary: tuple[int, int] = (3, 90)
    """Ids of prompts: from, and up to but not with."""
    seed: int = 0
    deadline_s: float = 120.0
    """For one request; what has not ended by then is taken to hang."""
    name: str = "r"
    """Of its requests."""

    def plan_requests(self) -> list[Exchange]:
        """The requests, in the order in which they come."""
        rng = Random(f"{self.name} {self.seed}")
        prefixes = [self._ids(rng, self.prompt_tokens[1] // 2) for _ in range(self.shared_prompts)]
        at_s, planned = 0.0, list[Exchange]()
        for number in range(self.requests):
            at_s += rng.expovariate(self.rate_per_s)
            length = rng.randint(*self.prompt_tokens)
            prefix = rng.choice(prefixes)[: length - 1] if prefixes else ()
            planned.append(
                Exchange(
                    request_id=f"{self.name}-{self.seed}-{number}",
                    prompt=(*prefix, *self._ids(rng, length - len(prefix))),
                    max_tokens=rng.randint(*self.output_tokens),
                    planned_at_s=at_s,
                )
            )
        return planned

    def _ids(self, rng: Random, length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(*self.vocabulary) for _ in range(length))


async def open_loop(
    load: Load, send: SendRequest, *, planned: Sequence[Exchange] | None = None
) -> list[Exchange]:
    """Send each request at its time, however many are under way; returns when all have ended.

    One that does not end within the load's deadline is given up and has no ending.
    """
    exchanges = load.plan_requests() if planned is None else list(planned)
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for exchange in exchanges:
            wait_s = started_s + exchange.planned_at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(_send_with_deadline(exchange, send, load.deadline_s))
    return exchanges


async def send_sequentially(
    exchanges: Sequence[Exchange], send: SendRequest, *, deadline_s: float
) -> None:
    """Send each request when the one before has ended."""
    for exchange in exchanges:
        await _send_with_deadline(exchange, send, deadline_s)


async def _send_with_deadline(exchange: Exchange, send: SendRequest, deadline_s: float) -> None:
    exchange.sent_at_s = time.monotonic()
    try:
        async with asyncio.timeout(deadline_s):
            await send(exchange)
    except TimeoutError:
        exchange.reason = exchange.reason or f"no end within {deadline_s:g} s"


def copy_requests(exchanges: Sequence[Exchange], name: str) -> list[Exchange]:
    """The same requests at the same times, unsent, by other ids."""
    return [
        Exchange(
            request_id=f"{name}-{number}",
            prompt=exchange.prompt,
            max_tokens=exchange.max_tokens,
            planned_at_s=exchange.planned_at_s,
        )
        for number, exchange in enumerate(exchanges)
    ]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class _StreamState:
    """A stream that is being read."""

    exchange: Exchange
    finish: str | None = None
    has_done: bool = False
    events: EventReader = field(default_factory=EventReader)


class HttpClient:
    """Streams completions by token ids from an OpenAI-compatible endpoint; use with `async with`.

    Every request has a connection of its own: what a broken one costs shows in its request alone.
    """

    def __init__(
        self, url: str, *, model: str = "tiny", headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model
        self._headers = dict(headers or {})
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def send(self, exchange: Exchange) -> None:
        """Send a request and read its stream to the end."""
        state = _StreamState(exchange)
        try:
            await self._stream(state)
        except (aiohttp.ClientError, OSError, StreamInvalid, msgspec.DecodeError) as error:
            if not exchange.endings:
                reason = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
                exchange.end(Ending.CUT, time.monotonic(), reason)

    async def _stream(self, state: _StreamState) -> None:
        assert self._http is not None, "asked before it was entered"
        exchange = state.exchange
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": exchange.prompt,
                "max_tokens": exchange.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": exchange.request_id,
            **self._headers,
        }
        async with self._http.post(self._url, data=body, headers=headers) as response:
            exchange.status = response.status
            if response.status != _OK:
                error_text = (await response.text())[:_MAX_ERROR_CHARS]
                _record_rejection(exchange, response.headers.get("Retry-After"), error_text)
                return
            async for chunk in response.content.iter_any():
                for data in state.events.feed(chunk):
                    _record_event(state, data)
        if not exchange.endings:
            exchange.end(Ending.CUT, time.monotonic(), "the stream ended without [DONE]")


def _record_rejection(exchange: Exchange, retry_after: str | None, error_text: str) -> None:
    try:
        exchange.retry_after_s = None if retry_after is None else float(retry_after)
    except ValueError:
        error_text = f"Retry-After {retry_after!r}: {error_text}"
    is_rejection = exchange.status in {429, 503}
    exchange.end(Ending.REJECTED if is_rejection else Ending.FAILED, time.monotonic(), error_text)


def _record_event(state: _StreamState, data: bytes) -> None:
    """Write down what an event of a stream says."""
    exchange, now_s = state.exchange, time.monotonic()
    if data == _DONE:
        if state.has_done:
            exchange.end(Ending.CUT, now_s, "[DONE] twice")
        state.has_done = True
        is_finished = state.finish == "length"
        ending = Ending.FINISHED if is_finished else Ending.CUT
        if not exchange.endings:
            exchange.end(ending, now_s, "" if is_finished else f"finish reason {state.finish!r}")
        return
    chunk = _CHUNK.decode(data)
    if chunk.error is not None:
        exchange.end(Ending.FAILED, now_s, str(chunk.error)[:_MAX_ERROR_CHARS])
    for choice in chunk.choices[:1]:
        if choice.token_ids:
            exchange.add_tokens(choice.token_ids, now_s)
        state.finish = choice.finish_reason or state.finish
