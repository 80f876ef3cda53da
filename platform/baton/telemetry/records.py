"""The stories of ended requests: logged once each, and the latest kept to be explained."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque

from baton.domain.commands import RequestRecord
from baton.domain.request import Phase
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_TROUBLED = frozenset({Phase.FAILED, Phase.EVICTED, Phase.SHED})
Story = dict[str, object]


class RecordBook:
    """Keeps the latest `capacity` records. Satisfies `ports.Recorder`."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._by_outcome: dict[Phase, int] = {}
        self._resumes = 0

    def record(self, record: RequestRecord) -> None:
        """Log a record and keep it; the oldest one makes room."""
        self._records[record.request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)
        self._by_outcome[record.outcome] = self._by_outcome.get(record.outcome, 0) + 1
        self._resumes += record.resumes
        level = logging.WARNING if record.outcome in _TROUBLED else logging.INFO
        if _LOGGER.isEnabledFor(level):
            log_event(_LOGGER, level, "request_ended", story(record))

    def find(self, request_id: str) -> list[RequestRecord]:
        """The records of a request, oldest first.

        The API layer makes its own ids of a client's (a kind in front, a random part or a choice's
        number behind), so every record whose id contains `request_id` is returned.
        """
        return [record for key, record in self._records.items() if request_id in key]

    def latest(self, count: int) -> list[RequestRecord]:
        """The last records, oldest first."""
        return list(deque(self._records.values(), maxlen=count))

    def totals(self) -> dict[str, int]:
        """How many requests ended in each way since the start, and how often any was resumed."""
        return {str(outcome): count for outcome, count in self._by_outcome.items()} | {
            "resumes": self._resumes
        }


def story(record: RequestRecord) -> Story:
    """A record as plain values; times become durations since arrival, for clocks differ."""

    def since_arrival(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - record.arrived_at_s, 6)

    route = record.routes[-1] if record.routes else None
    return {
        "request_id": record.request_id,
        "outcome": str(record.outcome),
        "reason": record.reason,
        "mode": None if route is None else str(route.mode),
        "route_reason": None if route is None else str(route.reason),
        "prefill_replica": None
        if route is None
        else route.prefill_replica_id or route.decode_replica_id,
        "decode_replica": None if route is None else route.decode_replica_id,
        "placements": len(record.routes),
        "resumes": record.resumes,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "prefill_done_s": since_arrival(record.prefill_done_at_s),
        "first_token_s": since_arrival(record.first_token_at_s),
        "last_token_s": since_arrival(record.last_token_at_s),
        "ended_s": since_arrival(record.ended_at_s),
        "handed_off_blocks": record.handed_off_blocks,
    }
