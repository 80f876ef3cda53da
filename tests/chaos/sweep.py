"""Long loads on a stage without Ray: planned piece by piece, and swept up while they run.

A coordinator's process is the test's own here. What a long run writes down of its requests would be
most of its memory, and its garbage collections pauses of the coordinator: so once a second the
requests that have ended are taken off the door's books, and a few figures of each are kept.
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
from tests.chaos.history import Ending, Exchange, History, Rule, Violation, differs, violations
from tests.chaos.load import Ask, Load, open_loop
from tests.chaos.local_ingress import Door

_PIECE_S = 30.0
_SWEEP_S = 1.0
_NOTED = 5


async def steadily(load: Load, ask: Ask, *, minutes: float) -> None:
    """Send a load at its rate for so long, whatever is served; returns when all have ended.

    It is planned in pieces of half a minute, each by a seed of its own.
    """
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(math.ceil(minutes * 60.0 / _PIECE_S)):
            length_s = min(_PIECE_S, minutes * 60.0 - number * _PIECE_S)
            requests = max(1, round(load.rate_per_s * length_s))
            piece = replace(load, requests=requests, seed=load.seed + number)
            await asyncio.sleep(max(0.0, began_s + number * _PIECE_S - time.monotonic()))
            group.create_task(_send(piece, ask))


async def _send(piece: Load, ask: Ask) -> None:
    await open_loop(piece, ask)


class Sweep:
    """What is kept of the requests of a door that have ended."""

    def __init__(self, door: Door) -> None:
        self.endings: Counter[str] = Counter()
        self.added_s = array("d")
        """Of each that had a first token where it was first sent: its time to it, less what engines
        took for it; NaN where they did not say."""
        self.finished_at_s = array("d")
        """When each that finished had ended."""
        self.refused_s = array("d")
        """How long each that was refused had waited for that."""
        self.resumes = 0
        self._door = door
        self._found: list[Violation] = []
        self._streams: list[tuple[Exchange, bool]] = []
        """As they came, without their times; and whether they finished."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweep while the body runs; once more at its end."""
        sweeping = asyncio.create_task(self._every_second())
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.wait((sweeping,))
            self.take()

    async def _every_second(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.take()

    def take(self) -> None:
        """Take all that have ended."""
        door, waiting, ended = self._door, list[RequestRecord](), list[RequestRecord]()
        for record in door.records:
            (ended if door.exchanges[record.request_id].endings else waiting).append(record)
        exchanges = [door.exchanges.pop(record.request_id) for record in ended]
        for record, exchange in zip(ended, exchanges, strict=True):
            door._ends.pop(record.request_id)
            self._note(record, exchange)
        self._found += violations(History(exchanges=exchanges, records=ended))
        door.records[:] = waiting

    def _note(self, record: RequestRecord, exchange: Exchange) -> None:
        ended_at_s, finished = exchange.ended_at_s, exchange.ending is Ending.FINISHED
        assert ended_at_s is not None, "it was taken before its end"
        self.endings[str(exchange.ending)] += 1
        self.resumes += record.resumes
        if finished:
            self.finished_at_s.append(ended_at_s)
        elif exchange.ending is Ending.REFUSED:
            self.refused_s.append(ended_at_s - exchange.sent_at_s)
        if record.first_token_at_s is not None:
            if not record.resumes:  # else it waited for what failed, too
                self.added_s.append(added_s(record))
            exchange.times_s.clear()
            self._streams.append((exchange, finished))

    def judged(
        self, *, wanted: Callable[[Exchange], Sequence[int]], held: Mapping[str, float]
    ) -> tuple[tuple[Bound, ...], str]:
        """A bound for each rule of a history, and a note of what broke them."""
        found = [*self._found, *self._wrong(wanted)]
        found += violations(History(exchanges=[], counters=held))
        left = [*self._door.exchanges]
        found += [Violation(rule=Rule.ENDS_ONCE, of=one, what="it has not ended") for one in left]
        count = Counter(one.rule for one in found)
        bounds = tuple(
            exactly(rule.value, count[rule], 0) for rule in Rule if rule is not Rule.ROUTES
        )
        return bounds, "; ".join(f"{one.of}: {one.what}" for one in found[:_NOTED])

    def _wrong(self, wanted: Callable[[Exchange], Sequence[int]]) -> list[Violation]:
        found = []
        for exchange, finished in self._streams:
            what = differs(exchange.tokens, wanted(exchange), whole=finished)
            if what:
                found.append(Violation(rule=Rule.TOKENS, of=exchange.request_id, what=what))
        return found


def added_s(record: RequestRecord) -> float:
    """Time to the first token, less what the engines say that they took until then.

    What is left is the coordinator's: deciding, holding, and the links to and fro. NaN where an
    engine did not say.
    """
    first_at_s = record.first_token_at_s
    if first_at_s is None:
        return math.nan
    taken_s = 0.0
    for leg in record.legs:
        if leg.began_at_s <= first_at_s:
            if leg.times is None:
                return math.nan
            taken_s += leg.times.queue_s + leg.times.compute_s
    return first_at_s - record.arrived_at_s - taken_s
