"""What cases share: a load while something is done to the fleet, and what came of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from baton.domain.commands import RequestRecord
from baton.domain.request import Phase
from tests.chaos.case import Bound, Figure, Outcome
from tests.chaos.history import (
    Barred,
    Exchange,
    History,
    endings,
    judged,
    longest_first_token_s,
    longest_stall,
)
from tests.chaos.load import Load, open_loop
from tests.chaos.stage import SimStage

Script = Callable[[], Awaitable[None]]
"""What is done while a load runs."""
_LEASE_S = 40.0
"""A lease of 30 s, and a little."""


async def nothing() -> None:
    """No fault but that of the stage."""


async def played(stage: SimStage, load: Load, script: Script) -> list[Exchange]:
    """A load, spread over all doors, while something is done to the fleet."""

    async def ask(exchange: Exchange) -> None:
        number = int(exchange.request_id.rpartition("-")[2])
        await stage.doors[number % len(stage.doors)].ask(exchange)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(open_loop(load, ask))
        await script()
    return running.result()


async def kept(
    stage: SimStage,
    exchanges: Sequence[Exchange],
    barred: Sequence[Barred] = (),
) -> History:
    """A run on a stage, when all is quiet again: everything that can be known of it.

    What a coordinator was handed out and lost hold of, with its session, is kept until a lease of
    30 s ends: that late all must be free. How long it took is told.
    """
    began_s = time.monotonic()
    counters = await stage.quiet(within_s=_LEASE_S)
    return History(
        exchanges=exchanges,
        wanted=stage.wanted,
        counters=counters,
        records=stage.records(),
        barred=barred,
        # Where nothing was done to a link, a session that was lost says that its machine was busy.
        aside={
            "sessions_lost": sum(door.link.counters.sessions_lost for door in stage.doors),
            "quiet_after_s": time.monotonic() - began_s,
        },
    )


def outcome(
    history: History, bounds: Sequence[Bound], figures: Mapping[str, Figure] | None = None
) -> Outcome:
    """The rules of every history, and what the case asks besides."""
    rules, note = judged(history)
    stall = longest_stall(history.exchanges)
    seen: dict[str, Figure] = {
        "load_average": os.getloadavg()[0],
        "requests": len(history.exchanges),
        "endings": str(endings(history.exchanges)),
        "longest_stall_s": stall.took_s if stall else 0.0,
        "first_token_max_s": longest_first_token_s(history.exchanges),
    }
    return Outcome(
        bounds=(*rules, *bounds), figures={**seen, **history.aside, **(figures or {})}, note=note
    )


def resumed(records: Sequence[RequestRecord]) -> int:
    """Requests that were placed again."""
    return sum(record.resumes > 0 for record in records)


def in_phase(stage: SimStage, phase: Phase) -> int:
    """Requests that are in a phase now."""
    return sum(one is phase for door in stage.doors for one in door.coordinator.phases().values())


def legs_at(records: Sequence[RequestRecord], replica_id: str, *, since_s: float) -> int:
    """Legs that a replica got from a moment on."""
    return sum(
        leg.replica_id == replica_id and leg.began_at_s > since_s
        for record in records
        for leg in record.legs
    )
