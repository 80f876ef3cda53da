"""Long loads on a stage without Ray: planned piece by piece, and swept up while they run.

A coordinator's process is the test's own here. What a long run writes down of its requests would be
most of its memory, and its garbage collections pauses of the coordinator: so once a second the
requests that have ended are removed from the ingress' records, and a few figures of each are kept.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.domain.commands import RequestRecord
from tests.chaos.case import Bound, exactly
from tests.chaos.history import (
    Ending,
    Exchange,
    History,
    Invariant,
    Violation,
    describe_difference,
    find_violations,
)
from tests.chaos.load import Load, SendRequest, open_loop
from tests.chaos.local_ingress import Ingress

_CHUNK_S = 30.0
_SWEEP_S = 1.0
_MAX_NOTED = 5


async def run_steady_load(load: Load, ask: SendRequest, *, minutes: float) -> None:
    """Send a load at its rate for a time, at any answer; returns when all have ended.

    It is planned in pieces of half a minute, each by a seed of its own.
    """
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(math.ceil(minutes * 60.0 / _CHUNK_S)):
            length_s = min(_CHUNK_S, minutes * 60.0 - number * _CHUNK_S)
            requests = max(1, round(load.rate_per_s * length_s))
            chunk = replace(load, requests=requests, seed=load.seed + number)
            await asyncio.sleep(max(0.0, started_s + number * _CHUNK_S - time.monotonic()))
            group.create_task(_send(chunk, ask))


async def _send(chunk: Load, ask: SendRequest) -> None:
    await open_loop(chunk, ask)


class RunningTotals:
    """What is kept of the ended requests of an ingress."""

    def __init__(self, ingress: Ingress) -> None:
        self.endings: Counter[str] = Counter()
        self.overheads_s = array("d")
        """Of each that had a first token where it was first sent: its time to it, less what engines
        took for it; NaN where they did not say."""
        self.finished_at_s = array("d")
        """When each that finished had ended."""
        self.rejection_waits_s = array("d")
        """How long each that was refused had waited for that."""
        self.resumes = 0
        self._ingress = ingress
        self._violations: list[Violation] = []
        self._streams: list[tuple[Exchange, bool]] = []
        """As they came, without their times; and whether they finished."""

    @asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        """Sweep while the body runs; once more at its end."""
        task = asyncio.create_task(self._collect_periodically())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            self.collect()

    async def _collect_periodically(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.collect()

    def collect(self) -> None:
        """Take all that have ended."""
        ingress, waiting, ended = self._ingress, list[RequestRecord](), list[RequestRecord]()
        for record in ingress.records:
            (ended if ingress.exchanges[record.request_id].endings else waiting).append(record)
        exchanges = [ingress.exchanges.pop(record.request_id) for record in ended]
        for record, exchange in zip(ended, exchanges, strict=True):
            ingress._ended_events.pop(record.request_id)
            self._add(record, exchange)
        self._violations += find_violations(History(exchanges=exchanges, records=ended))
        ingress.records[:] = waiting

    def _add(self, record: RequestRecord, exchange: Exchange) -> None:
        ended_at_s, finished = exchange.ended_at_s, exchange.ending is Ending.FINISHED
        assert ended_at_s is not None, "it was taken before its end"
        self.endings[str(exchange.ending)] += 1
        self.resumes += record.resumes
        if finished:
            self.finished_at_s.append(ended_at_s)
        elif exchange.ending is Ending.REJECTED:
            self.rejection_waits_s.append(ended_at_s - exchange.sent_at_s)
        if record.first_token_at_s is not None:
            if not record.resumes:  # else it waited for what failed, too
                self.overheads_s.append(overhead_s(record))
            exchange.times_s.clear()
            self._streams.append((exchange, finished))

    def check_invariants(
        self, *, expected_tokens: Callable[[Exchange], Sequence[int]], counters: Mapping[str, float]
    ) -> tuple[tuple[Bound, ...], str]:
        """A bound for each rule of a history, and a note of what broke them."""
        violations_found = [*self._violations, *self._token_violations(expected_tokens)]
        violations_found += find_violations(History(exchanges=[], counters=counters))
        unended = [*self._ingress.exchanges]
        violations_found += [
            Violation(invariant=Invariant.ENDS_ONCE, subject=name, description="it has not ended")
            for name in unended
        ]
        count = Counter(violation.invariant for violation in violations_found)
        bounds = tuple(
            exactly(rule.value, count[rule], 0)
            for rule in Invariant
            if rule is not Invariant.ROUTES
        )
        return bounds, "; ".join(
            f"{violation.subject}: {violation.description}"
            for violation in violations_found[:_MAX_NOTED]
        )

    def _token_violations(self, wanted: Callable[[Exchange], Sequence[int]]) -> list[Violation]:
        found = []
        for exchange, finished in self._streams:
            what = describe_difference(exchange.tokens, wanted(exchange), is_whole=finished)
            if what:
                found.append(
                    Violation(
                        invariant=Invariant.TOKENS, subject=exchange.request_id, description=what
                    )
                )
        return found


def overhead_s(record: RequestRecord) -> float:
    """Time to the first token, less what the engines say that they took until then.

    What is left is the coordinator's: deciding, holding, and the links to and fro. NaN where an
    engine did not say.
    """
    first_at_s = record.first_token_at_s
    if first_at_s is None:
        return math.nan
    engine_s = 0.0
    for leg in record.legs:
        if leg.started_at_s <= first_at_s:
            if leg.engine_times is None:
                return math.nan
            engine_s += leg.engine_times.queue_s + leg.engine_times.compute_s
    return first_at_s - record.arrived_at_s - engine_s
