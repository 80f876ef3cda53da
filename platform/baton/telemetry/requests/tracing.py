"""Selects the traces to keep, and exports their spans without delaying requests.

*Theory of operation.* A trace is kept if its caller sampled it, if it is in the sampled share, or
if it missed an objective. Its record goes into a bounded queue; a full queue drops and counts it.
One thread makes spans and exports them in batches, each with a deadline. A failed export loses its
batch; failure and recovery of the collector are logged once each. Nothing here raises into a
request.
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
    """The spans of one request."""

    context: TraceContext
    spans: tuple[Span, ...]
    wall_offset_s: float
    """Added to their times, gives seconds since 1970."""


class Exporter(Protocol):
    """Sends spans; called by one thread."""

    def export(self, traces: list[TraceSpans]) -> str | None:
        """Send them within its own deadline; returns the reason of a failure, or None."""
        ...

    def close(self) -> None:
        """Abort the export in progress, and send no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """Selects traces to keep."""

    sample_fraction: float = 0.01
    """Share of all requests, in addition to those that callers sample."""
    keep_slo_misses: bool = True


@dataclass(slots=True, kw_only=True)
class TraceCounts:
    """Requests by the result of their trace."""

    sent: int = 0
    dropped: int = 0
    failed: int = 0

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
        """Call `start` before the first record.

        `wall_offset_s` gives the seconds from the records' clock to wall time. `connect` is called
        in the thread, because its imports are slow.
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
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="baton-traces", daemon=True)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        """Queue a request's trace if it is kept and the queue has room; never waits."""
        if record.trace is None or not self.should_keep(record, record.trace):
            return
        try:
            self._queue.put_nowait((record, self._wall_offset_s()))
        except Full:
            self.counts.dropped += 1
            if self.counts.dropped == 1:
                reason = f"{self._queue.maxsize} wait to be sent; counted from now on"
                log_event(_LOGGER, logging.WARNING, "traces_dropped", {"reason": reason})

    def should_keep(self, record: RequestRecord, context: TraceContext) -> bool:
        """Whether the trace of an ended request is kept."""
        if context.sampled or is_in_sample(context.trace_id, self._rules.sample_fraction):
            return True
        return self._rules.keep_slo_misses and bool(missed_objectives(record))

    def close(self, deadline_s: float = _CLOSE_S) -> None:
        """Export queued traces for at most `deadline_s`, and stop. Blocks; idempotent."""
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
            # The boundary of the thread: serving continues without traces.
            _LOGGER.exception("requests are not traced any more")

    def _next_batch(self) -> list[tuple[RequestRecord, float]]:
        """Wait for records; empty once the tracer is closed and the queue drained."""
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
        reason = exporter.export([self._trace(record, offset_s) for record, offset_s in batch])
        if reason is None:
            self.counts.sent += len(batch)
        else:
            self.counts.failed += len(batch)
        if (reason is not None) != self._is_collector_down:
            self._is_collector_down = reason is not None
            event = "trace_collector_away" if self._is_collector_down else "trace_collector_back"
            level = logging.WARNING if self._is_collector_down else logging.INFO
            log_event(_LOGGER, level, event, {"reason": reason or "", "failed": self.counts.failed})

    def _trace(self, record: RequestRecord, offset_s: float) -> TraceSpans:
        assert record.trace is not None, "only requests with a trace are kept"
        spans = request_spans(record, record.trace, model=self._model)
        return TraceSpans(record.trace, spans, offset_s)
