"""The load on real engines: short prompts and long ones, and a client that nobody keeps waiting."""

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

from benchmarks._load import Client, Exchange, Undisturbed, completion_body
from benchmarks.rivals.load import MODEL, Prompts

SHORT_TOKENS, LONG_TOKENS = 64, 1500
LONG_SHARE = 4
"""One prompt of so many is long."""
MAX_TOKENS = 32
_REQUEST_LIMIT_S = 60.0
_LOAD_LIMIT_S = 300.0


class LoadFailedError(RuntimeError):
    """A load that did not end in time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and whether its prompt is long."""

    long: bool
    body: bytes


class Words:
    """Draws requests whose prompts have about the wanted numbers of tokens."""

    def __init__(self, model: Path) -> None:
        rng = random.Random(0)  # noqa: S311 - a load, no secret
        sample = json.loads(completion_body(rng, model=MODEL, words=2000, max_tokens=1))["prompt"]
        self._per_token = 2000 * Prompts(model).bytes_per_token / len(sample)

    def mixed(self, rng: random.Random, count: int) -> list[Asked]:
        """So many, one of `LONG_SHARE` long, in any order."""
        kinds = [number % LONG_SHARE == 0 for number in range(count)]
        rng.shuffle(kinds)
        return [self._one(rng, long=long) for long in kinds]

    def _one(self, rng: random.Random, *, long: bool) -> Asked:
        words = round((LONG_TOKENS if long else SHORT_TOKENS) * self._per_token)
        body = completion_body(rng, model=MODEL, words=words, max_tokens=MAX_TOKENS)
        return Asked(long=long, body=body)


class PatientClient(Client):
    """A client whose requests fail alone, each after a while at most."""

    async def _ask(self, body: bytes, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(_REQUEST_LIMIT_S):
                await super()._ask(body, exchange)
        except TimeoutError:
            exchange.problem = f"no end after {_REQUEST_LIMIT_S:.0f} s"
        except OSError as error:
            exchange.problem = f"no connection: {error}"


@contextmanager
def at_once() -> Iterator[bool]:
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


def send(url: str, requests: Sequence[Asked], arrivals: Sequence[float] | None) -> list[Exchange]:
    """Send each when the one before has ended, or at its time; returns when all have ended.

    Raises:
        LoadFailedError: they had not in time.
    """
    bodies = [one.body for one in requests]

    async def run() -> list[Exchange]:
        client = PatientClient(url)
        try:
            async with asyncio.timeout(_LOAD_LIMIT_S):
                await client.open(1 if arrivals is None else len(bodies))
                if arrivals is None:
                    return await client.one_by_one(bodies)
                return await client.at_times(bodies, arrivals)
        finally:
            client.close()

    try:
        with Undisturbed(), at_once():
            exchanges: list[Exchange] = uvloop.run(run())
    except TimeoutError:
        raise LoadFailedError(f"{len(bodies)} requests took over {_LOAD_LIMIT_S:.0f} s") from None
    except OSError as error:
        raise LoadFailedError(f"{url}: {error}") from error
    return exchanges
