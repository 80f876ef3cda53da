"""Pulls by the replica they came from, out of what the NIXL connector counted in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from baton.domain.fleet import LinkTotals
from baton.domain.handoff import Leg
from baton.engine.vllm.wire.kv_handles import source_engine_id
from baton.engine.vllm.wire.transfer_keys import (
    CONNECTOR,
    DURATIONS_KEY,
    FAILED_SOURCES_KEY,
    SOURCES_KEY,
    TRANSFERS_KEY,
)

FAILURE_KEYS = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes")
_MAX_SOURCES = 1024
"""Replicas that are remembered; of more, those that were longest not pulled from are forgotten."""


_V = TypeVar("_V")


class PullMeter:
    """Adds up, by source, what steps report of transfers.

    Exact with baton's connector, which names the source engine of every entry; which replica that
    engine belongs to is in the legs that bring its tickets. Under another connector an entry counts
    where all legs that wait for their blocks wait for one source. What cannot be told is in no
    link; the replica's `TransferTotals` have it all the same.
    """

    def __init__(self, transport: Callable[[str], str] = lambda _source_id: "") -> None:
        """Take what says by which transport blocks come from a replica; empty: not known."""
        self._transport = transport
        self._replicas: dict[str, str] = {}
        self._awaited_sources: dict[str, str | None] = {}
        self._totals: dict[str, LinkTotals] = {}

    def on_leg_submitted(self, leg: Leg) -> None:
        """A leg was handed to the engine; it may have to fetch its blocks."""
        if leg.kv_handle is None:
            return
        if leg.source_id is not None:
            _put_newest(self._replicas, source_engine_id(leg.kv_handle), leg.source_id)
        self._awaited_sources[leg.leg_id] = leg.source_id

    def on_fetch_ended(self, leg_id: str) -> None:
        """A leg waits no more: it produced something, or ended."""
        self._awaited_sources.pop(leg_id, None)

    def on_step(self, statistics: Mapping[str, Any]) -> None:
        """Take in one step's statistics of the NIXL connector."""
        transferred = _entries(statistics, TRANSFERS_KEY)
        durations_s = _entries(statistics, DURATIONS_KEY)
        sources = self._replicas_of_entries(statistics, SOURCES_KEY, expected=len(transferred))
        for source_id, moved_bytes, busy_s in zip(sources, transferred, durations_s, strict=False):
            self._add(source_id, LinkTotals("", 1, int(moved_bytes), busy_s))
        failures = sum(len(_entries(statistics, key)) for key in FAILURE_KEYS)
        for source_id in self._replicas_of_entries(
            statistics, FAILED_SOURCES_KEY, expected=failures
        ):
            self._add(source_id, LinkTotals("", failures=1))

    def _replicas_of_entries(
        self, statistics: Mapping[str, Any], key: str, *, expected: int
    ) -> Sequence[str | None]:
        """The replica of each entry; None where it cannot be told."""
        engine_ids: Sequence[str] | None = statistics.get(key)
        if engine_ids is not None and (key == FAILED_SOURCES_KEY or len(engine_ids) == expected):
            return [self._replicas.get(engine_id) for engine_id in engine_ids]
        awaited = set(self._awaited_sources.values())
        return [awaited.pop() if len(awaited) == 1 else None] * expected

    def _add(self, source_id: str | None, increment: LinkTotals) -> None:
        if source_id is None:
            return
        total = self._totals.get(source_id, LinkTotals(source_id))
        summed = LinkTotals(
            source_id,
            total.pulls + increment.pulls,
            total.moved_bytes + increment.moved_bytes,
            total.busy_s + increment.busy_s,
            total.failures + increment.failures,
        )
        _put_newest(self._totals, source_id, summed)

    def totals(self) -> tuple[LinkTotals, ...]:
        """What was pulled so far, by source."""
        return tuple(
            total._replace(transport=self._transport(source_id))
            for source_id, total in self._totals.items()
        )


def nixl_statistics(statistics: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the NIXL connector says, where it may be one of several."""
    nixl: Mapping[str, Any] = statistics.get(CONNECTOR, statistics)
    return nixl


def _entries(statistics: Mapping[str, Any], key: str) -> Sequence[float]:
    entries: Sequence[float] = statistics.get(key) or ()
    return entries


def _put_newest(table: dict[str, _V], key: str, value: _V) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _MAX_SOURCES:
        del table[next(iter(table))]
