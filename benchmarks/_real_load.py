"""The load on real engines: short prompts and long ones, and a client that never waits."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks._load import Client, Exchange, GcDisabled, completion_body
from benchmarks.rivals.load import MODEL, PromptFiles

SHORT_TOKENS, LONG_TOKENS = 64, 1500
LONG_PROMPT_EVERY = 4
"""One prompt of this many is long."""
MAX_TOKENS = 32
_REQUEST_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 300.0


class LoadFailedError(RuntimeError):
    """A load that did not end in time."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, and whether its prompt is long."""

    is_long: bool
    body: bytes


class RequestFactory:
    """Draws requests whose prompts have about the wanted numbers of tokens."""

    def __init__(self, model: Path) -> None:
        rng = random.Random(0)  # noqa: S311 - a load, no secret
        sample = json.loads(completion_body(rng, model=MODEL, words=2000, max_tokens=1))["prompt"]
        self._words_per_token = 2000 * PromptFiles(model).bytes_per_token / len(sample)

    def draw_mixed(self, rng: random.Random, count: int) -> list[LoadRequest]:
        """`count` prompts, one of `LONG_PROMPT_EVERY` long, in any order."""
        kinds = [number % LONG_PROMPT_EVERY == 0 for number in range(count)]
        rng.shuffle(kinds)
        return [self._draw(rng, long=long) for long in kinds]

    def _draw(self, rng: random.Random, *, long: bool) -> LoadRequest:
        words = round((LONG_TOKENS if long else SHORT_TOKENS) * self._words_per_token)
        body = completion_body(rng, model=MODEL, words=words, max_tokens=MAX_TOKENS)
        return LoadRequest(is_long=long, body=body)


class TimeoutClient(Client):
    """A client whose requests fail alone, each after a while at most."""

    async def _send(self, body: bytes, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                await super()._send(body, exchange)
        except TimeoutError:
            exchange.error = f"no end after {_REQUEST_TIMEOUT_S:.0f} s"
        except OSError as error:
            exchange.error = f"no connection: {error}"


@contextmanager
def realtime_priority() -> Iterator[bool]:
    """Inside, this thread gets a core when it wants one; says whether that is so.

    Engines that wait for each other keep every core of a small machine busy. An ordinary client
    then reads what has come tens of milliseconds late, and whole streams at a time; where it may
    not be more than that, the figures say so.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def send(
    url: str, requests: Sequence[LoadRequest], arrivals: Sequence[float] | None
) -> list[Exchange]:
    """Send each when the one before has ended, or at its time; returns when all have ended.

    Raises:
        LoadFailedError: they had not in time.
    """
    bodies = [request.body for request in requests]

    async def run() -> list[Exchange]:
        client = TimeoutClient(url)
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                await client.open(1 if arrivals is None else len(bodies))
                if arrivals is None:
                    return await client.send_sequentially(bodies)
                return await client.send_at_times(bodies, arrivals)
        finally:
            client.close()

    try:
        with GcDisabled(), realtime_priority():
            exchanges: list[Exchange] = uvloop.run(run())
    except TimeoutError:
        raise LoadFailedError(f"{len(bodies)} requests took over {_LOAD_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise LoadFailedError(f"{url}: {error}") from error
    return exchanges
