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
    Exchange,
    ExcludedReplica,
    History,
    check_invariants,
    endings,
    longest_first_token_s,
    longest_stall,
)
from tests.chaos.load import Load, open_loop
from tests.chaos.stage import SimStage

Script = Callable[[], Awaitable[None]]
"""What is done while a load runs."""
_LEASE_S = 40.0
"""A lease of 30 s, and a little."""


async def no_fault() -> None:
    """No fault but that of the stage."""


async def run_load(stage: SimStage, load: Load, script: Script) -> list[Exchange]:
    """A load, spread over all ingresses, while something is done to the fleet."""

    async def ask(exchange: Exchange) -> None:
        number = int(exchange.request_id.rpartition("-")[2])
        await stage.ingresses[number % len(stage.ingresses)].send(exchange)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(open_loop(load, ask))
        await script()
    return running.result()


async def collect_history(
    stage: SimStage,
    exchanges: Sequence[Exchange],
    excluded_replicas: Sequence[ExcludedReplica] = (),
) -> History:
    """A run on a stage, when all is quiet again: everything that can be known of it.

    What a coordinator was handed out and lost hold of, with its session, is kept until a lease of
    30 s ends: that late all must be free. How long it took is a figure.
    """
    started_s = time.monotonic()
    counters = await stage.wait_idle(timeout_s=_LEASE_S)
    return History(
        exchanges=exchanges,
        expected_tokens=stage.expected_tokens,
        counters=counters,
        records=stage.records(),
        excluded_replicas=excluded_replicas,
        # Where nothing was done to a link, a session that was lost says that its machine was busy.
        context_figures={
            "sessions_lost": sum(
                ingress.link.counters.sessions_lost for ingress in stage.ingresses
            ),
            "quiet_after_s": time.monotonic() - started_s,
        },
    )


def outcome(
    history: History, bounds: Sequence[Bound], figures: Mapping[str, Figure] | None = None
) -> Outcome:
    """The rules of every history, and the bounds of the case."""
    invariant_bounds, note = check_invariants(history)
    stall = longest_stall(history.exchanges)
    figures_seen: dict[str, Figure] = {
        "load_average": os.getloadavg()[0],
        "requests": len(history.exchanges),
        "endings": str(endings(history.exchanges)),
        "longest_stall_s": stall.took_s if stall else 0.0,
        "first_token_max_s": longest_first_token_s(history.exchanges),
    }
    return Outcome(
        bounds=(*invariant_bounds, *bounds),
        figures={**figures_seen, **history.context_figures, **(figures or {})},
        note=note,
    )


def count_resumed(records: Sequence[RequestRecord]) -> int:
    """Requests that were placed again."""
    return sum(record.resumes > 0 for record in records)


def count_in_phase(stage: SimStage, phase: Phase) -> int:
    """Requests that are in a phase now."""
    return sum(
        other is phase
        for ingress in stage.ingresses
        for other in ingress.coordinator.phases().values()
    )


def count_legs(records: Sequence[RequestRecord], replica_id: str, *, since_s: float) -> int:
    """Legs that a replica got from a moment on."""
    return sum(
        leg.replica_id == replica_id and leg.started_at_s > since_s
        for record in records
        for leg in record.legs
    )
