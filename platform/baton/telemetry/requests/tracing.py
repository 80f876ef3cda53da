"""Which requests leave a trace, and how their spans get to a collector without costing anything.

Theory of operation: when a request has ended its record is looked at once: whoever called wants its
trace kept, or it is among the share that is sampled, or it missed an objective. A record that is
kept goes into a bounded queue; where that is full it is dropped and counted. One thread makes spans
of records and sends them, a batch at a time, each with a deadline. A collector that is away costs
the batch, is said once, and said again when it is back. Nothing here raises into a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import NamedTuple, Protocol

from baton.domain.commands import RequestRecord
from baton.domain.names.trace_context import TraceContext, is_in_sample
from baton.telemetry.logs import log_event
from baton.telemetry.requests.error_budget import missed_objectives
from baton.telemetry.requests.spans import Span, request_spans

_LOGGER = logging.getLogger(__name__)
_QUEUE_TRACES = 2048
_BATCH_TRACES = 64
_LINGER_S = 0.5
"""How long the first record of a batch waits for others."""
_CLOSE_S = 2.0


class TraceSpans(NamedTuple):
    """One request's spans, ready to be sent."""

    context: TraceContext
    spans: tuple[Span, ...]
    wall_offset_s: float
    """To be added to their times for seconds since 1970."""


class Exporter(Protocol):
    """Whoever sends spans. Called by one thread."""

    def export(self, traces: list[TraceSpans]) -> str | None:
        """Send them, within a deadline of its own; why not, or None when they were taken."""
        ...

    def close(self) -> None:
        """End what is under way and send no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """Which requests' traces are kept."""

    sample_fraction: float = 0.01
    """The share of all, besides those that their callers keep."""
    keep_slo_misses: bool = True


@dataclass(slots=True, kw_only=True)
class TraceCounts:
    """What became of traces, in requests."""

    sent: int = 0
    dropped: int = 0
    """For which there was no room."""
    failed: int = 0
    """Which the collector did not take."""

    def as_dict(self) -> dict[str, int]:
        """As plain values."""
        return {"sent": self.sent, "dropped": self.dropped, "failed": self.failed}


class Tracer:
    """Keeps the traces of ended requests. Satisfies `ports.Recorder`."""

    def __init__(
        self,
        rules: SamplingRules,
        *,
        model: str,
        wall_offset_s: Callable[[], float],
        connect: Callable[[], Exporter],
        queue_traces: int = _QUEUE_TRACES,
    ) -> None:
        """Take what to keep; `start` before the first record.

        Args:
            rules: Which traces are kept.
            model: What the model is called that is served.
            wall_offset_s: Seconds from the clock of the records to that of the wall, by now.
            connect: Makes the exporter; called in the thread, because it may import a lot.
            queue_traces: How many may wait to be sent.
        """
        self.counts = TraceCounts()
        self._rules = rules
        self._model = model
        self._wall_offset_s = wall_offset_s
        self._connect = connect
        self._queue: Queue[tuple[RequestRecord, float] | None] = Queue(queue_traces)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._is_collector_down = False
        self._exporter: Exporter | None = None

    def start(self) -> None:
        """Begin to send."""
        self._thread = threading.Thread(target=self._run, name="baton-traces", daemon=True)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        """Keep a request's trace, if it is to be kept and there is room; never waits."""
        if record.trace is None or not self.should_keep(record, record.trace):
            return
        try:
            self._queue.put_nowait((record, self._wall_offset_s()))
        except Full:
            self.counts.dropped += 1
            if self.counts.dropped == 1:
                why = f"{self._queue.maxsize} wait to be sent; counted from now on"
                log_event(_LOGGER, logging.WARNING, "traces_dropped", {"why": why})

    def should_keep(self, record: RequestRecord, context: TraceContext) -> bool:
        """Whether the trace of an ended request is kept."""
        if context.sampled or is_in_sample(context.trace_id, self._rules.sample_fraction):
            return True
        return self._rules.keep_slo_misses and bool(missed_objectives(record))

    def close(self, deadline_s: float = _CLOSE_S) -> None:
        """Send what waits, for so long, and stop. Blocks; idempotent."""
        if self._closed.is_set() or self._thread is None:
            return
        self._closed.set()
        with suppress(Full):  # then the thread is awake, and looks at the flag after its batch
            self._queue.put_nowait(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive() and self._exporter is not None:
            self._exporter.close()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            self._exporter = self._connect()
            while batch := self._next_batch():
                self._send(self._exporter, batch)
            self._exporter.close()
        except Exception:
            # The boundary of the thread: nobody waits for it, and service goes on without.
            _LOGGER.exception("requests are not traced any more")

    def _next_batch(self) -> list[tuple[RequestRecord, float]]:
        """Wait for records; none once it is closed and all were taken."""
        batch: list[tuple[RequestRecord, float]] = []
        while len(batch) < _BATCH_TRACES:
            try:
                timeout_s = _LINGER_S if batch else None
                item = self._queue.get(block=not self._closed.is_set(), timeout=timeout_s)
            except Empty:
                break
            if item is None:
                if self._queue.empty():
                    break
                continue
            batch.append(item)
        return batch

    def _send(self, exporter: Exporter, batch: list[tuple[RequestRecord, float]]) -> None:
        why = exporter.export([self._trace(record, offset_s) for record, offset_s in batch])
        if why is None:
            self.counts.sent += len(batch)
        else:
            self.counts.failed += len(batch)
        if (why is not None) != self._is_collector_down:
            self._is_collector_down = why is not None
            event = "trace_collector_away" if self._is_collector_down else "trace_collector_back"
            level = logging.WARNING if self._is_collector_down else logging.INFO
            log_event(_LOGGER, level, event, {"why": why or "", "failed": self.counts.failed})

    def _trace(self, record: RequestRecord, offset_s: float) -> TraceSpans:
        assert record.trace is not None, "only requests with a trace are kept"
        spans = request_spans(record, record.trace, model=self._model)
        return TraceSpans(record.trace, spans, offset_s)
