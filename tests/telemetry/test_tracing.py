"""Which traces are kept, and that sending them costs nobody anything."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.names.trace_context import TraceContext, is_in_sample
from baton.domain.slo import Slo, SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.tracing import SamplingRules, Tracer, TraceSpans
from tests.fakes.request_records import RECORD

MISSED = SloResult(was_served=True, ttft_met=False, tpot_met=True, itl_met=True)
WAIT_S = 5.0


def traced(number: int = 1, *, sampled: bool = False, missed: bool = False) -> RequestRecord:
    """One whose trace id falls into no share below a half."""
    context = TraceContext(f"{number:016x}ffffffffffffffff", sampled=sampled)
    one = evolve(RECORD, trace=context, slo=Slo(name="chat", ttft_s=1.0))
    return evolve(one, slo_result=MISSED) if missed else one


@dataclass
class Collector:
    """Takes batches; may be held up, and may be away."""

    takes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    taken: list[TraceSpans] = field(default_factory=list)
    away: str | None = None
    closed: bool = False

    def export(self, traces: list[TraceSpans]) -> str | None:
        if not self.takes.acquire(timeout=WAIT_S):
            raise TimeoutError("nobody let it take the batch")
        why = self.away
        if why is None:
            self.taken.extend(traces)
        self.asked.release()
        return why

    def close(self) -> None:
        self.closed = True


def tracer_to(collector: Collector, *, queue_traces: int = 100, sample: float = 0.0) -> Tracer:
    tracer = Tracer(
        SamplingRules(sample_fraction=sample),
        model="tiny",
        wall_offset_s=lambda: 1000.0,
        connect=lambda: collector,
        queue_traces=queue_traces,
    )
    tracer.start()
    return tracer


@pytest.mark.parametrize(
    ("record", "rules", "kept"),
    [
        (traced(), SamplingRules(sample_fraction=0.0), False),
        (traced(), SamplingRules(sample_fraction=1.0), True),
        (traced(), SamplingRules(sample_fraction=0.4), False),
        (traced(sampled=True), SamplingRules(sample_fraction=0.0), True),
        (traced(missed=True), SamplingRules(sample_fraction=0.0), True),
        (traced(missed=True), SamplingRules(sample_fraction=0.0, keep_slo_misses=False), False),
    ],
)
def test_traces_are_kept_that_somebody_wants(
    record: RequestRecord,
    rules: SamplingRules,
    kept: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    tracer = Tracer(rules, model="tiny", wall_offset_s=lambda: 0.0, connect=Collector)
    assert record.trace is not None
    assert is_in_sample(record.trace.trace_id, 1.0)
    assert tracer.should_keep(record, record.trace) is kept


def test_kept_traces_are_sent_with_the_walls_time() -> None:
    collector = Collector(threading.Semaphore(9))
    tracer = tracer_to(collector)
    tracer.record(traced(1, sampled=True))
    tracer.record(traced(2))
    tracer.record(evolve(traced(3), trace=None))
    tracer.close(WAIT_S)
    (sent,) = collector.taken
    assert sent.context.trace_id.startswith("0000000000000001")
    assert sent.wall_offset_s == 1000.0
    assert sent.spans[0].name == "request tiny"
    assert (tracer.counts.sent, tracer.counts.dropped, tracer.counts.failed) == (1, 0, 0)
    assert collector.closed


def test_where_there_is_no_room_traces_are_dropped_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector()  # takes nothing until it is let
    tracer = tracer_to(collector, queue_traces=2)
    for number in range(200):
        tracer.record(traced(number, sampled=True))
    assert tracer.counts.dropped >= 200 - 64 - 2
    assert [record.getMessage() for record in caplog.records].count("traces_dropped") == 1
    for _ in range(10):
        collector.takes.release()
    tracer.close(WAIT_S)
    assert tracer.counts.sent + tracer.counts.dropped == 200


def test_a_collector_that_is_away_is_said_once_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    collector = Collector(threading.Semaphore(0), away="nobody listens")
    tracer = tracer_to(collector, queue_traces=1000)
    for number in range(64 * 3):
        tracer.record(traced(number, sampled=True))
    collector.takes.release(2)
    for _ in range(2):
        assert collector.asked.acquire(timeout=WAIT_S)
    collector.away = None
    collector.takes.release()
    tracer.close(WAIT_S)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["trace_collector_away", "trace_collector_back"]
    assert (tracer.counts.failed, tracer.counts.sent) == (128, 64)


def test_a_tracer_that_breaks_says_so_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Collector:
        raise ImportError("no opentelemetry here")

    tracer = Tracer(
        SamplingRules(sample_fraction=1.0), model="tiny", wall_offset_s=lambda: 0.0, connect=broken
    )
    tracer.start()
    tracer.record(traced())
    tracer.close(WAIT_S)
    assert "requests are not traced any more" in caplog.text
    tracer.record(traced())


def test_closing_twice_or_before_the_start_is_no_harm() -> None:
    collector = Collector(threading.Semaphore(9))
    tracer = tracer_to(collector)
    tracer.close(WAIT_S)
    tracer.close(WAIT_S)
    Tracer(SamplingRules(), model="", wall_offset_s=lambda: 0.0, connect=Collector).close()
