"""Which traces are kept, and that sending them costs nobody anything."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given

from baton.domain.commands import RequestRecord
from baton.domain.leg_record import LegOutcome
from baton.domain.names.trace_context import TraceContext, is_in_sample, span_id
from baton.domain.request import Phase
from baton.domain.slo import Slo, SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.spans import MAX_TEXT_CHARS, Span, request_spans
from baton.telemetry.requests.tracing import SamplingRules, Tracer, TraceSpans
from tests.fakes.request_records import DECODE, LOCAL, OPTION, PREFILL, RECORD
from tests.telemetry.test_waterfall import records, told

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
        reason = self.away
        if reason is None:
            self.taken.extend(traces)
        self.asked.release()
        return reason

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
def test_requested_traces_are_kept(
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


def test_a_tracer_that_breaks_logs_it_and_fails_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_closing_twice_or_before_the_start_is_allowed() -> None:
    collector = Collector(threading.Semaphore(9))
    tracer = tracer_to(collector)
    tracer.close(WAIT_S)
    tracer.close(WAIT_S)
    Tracer(SamplingRules(), model="", wall_offset_s=lambda: 0.0, connect=Collector).close()


# -------------------------------------------------------------------- spans


CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", operation="chat")


def spans_of(record: RequestRecord, context: TraceContext = CONTEXT) -> list[Span]:
    return list(request_spans(record, context, model="tiny"))


def tree(record: RequestRecord) -> list[str]:
    """Each span under its parents, by name, in the order in which they are told."""
    paths: dict[str, str] = {CONTEXT.parent_id: ""}
    for span in spans_of(record):
        paths[span.span_id] = f"{paths[span.parent_id]}/{span.name}"
    return list(paths.values())[1:]


def only(name: str, record: RequestRecord = RECORD) -> Span:
    (found,) = [span for span in spans_of(record) if span.name == name]
    return found


def test_a_handed_off_request_is_one_trace_with_both_engines_under_its_legs() -> None:
    assert tree(RECORD) == [
        "/chat tiny",
        "/chat tiny/admission",
        "/chat tiny/route",
        "/chat tiny/leg prefill",
        "/chat tiny/leg prefill/queue",
        "/chat tiny/leg prefill/prefill",
        "/chat tiny/leg decode",
        "/chat tiny/leg decode/transfer",
        "/chat tiny/leg decode/decode",
        "/chat tiny/leg decode/decode",
    ]
    whose = {span.name: span.replica_id for span in spans_of(RECORD)}
    assert (whose["queue"], whose["prefill"]) == ("p", "p")
    assert (whose["transfer"], whose["decode"], whose["leg decode"]) == ("d", "d", "")


def test_the_request_is_a_server_span_of_its_caller_with_opentelemetrys_names() -> None:
    root = spans_of(RECORD)[0]
    assert (root.parent_id, root.is_server, root.error) == (CONTEXT.parent_id, True, "")
    assert root.span_id == span_id(CONTEXT.trace_id, "r"), "what engines were told"
    assert (root.start_s, root.end_s) == (100.0, 103.0)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 1.5,
        "baton.request_id": "r",
        "baton.verdict": "good",
    }
    assert wanted.items() <= root.attributes.items()


def test_a_route_tells_what_it_was_chosen_from() -> None:
    route = only("route")
    assert route.start_s == route.end_s == 100.0
    assert route.attributes["baton.considered"] == 1
    (candidate,) = route.events
    assert candidate.attributes["baton.prefill_s"] == OPTION.prefill_s
    assert candidate.attributes["baton.ttft_s"] == OPTION.ttft_s


def test_a_leg_tells_what_its_engine_said_and_nothing_where_it_said_nothing() -> None:
    leg = only("leg prefill")
    assert leg.attributes["baton.engine_compute_s"] == 0.25
    silent = only("leg prefill", told(evolve(PREFILL, engine_times=None), DECODE))
    assert "baton.engine_compute_s" not in silent.attributes


def test_a_resume_is_told_with_its_reason_between_the_legs() -> None:
    broken = evolve(DECODE, outcome=LegOutcome.FAILED, ended_at_s=102.0, last_output_at_s=101.75)
    again = evolve(LOCAL, leg_id="r~3", route_index=1, started_at_s=102.5, first_output_at_s=102.75)
    resumed = evolve(told(PREFILL, broken, again), resume_reasons=("d: " + "x" * 999,))
    span = only("resume", resumed)
    assert (span.start_s, span.end_s) == (102.0, 102.5)
    assert len(str(span.attributes["baton.reason"])) == MAX_TEXT_CHARS
    assert span.attributes["baton.placed_again"] is True
    assert only("lost", resumed).replica_id == "d"
    assert [s.error for s in spans_of(resumed) if s.name == "leg decode"] == ["failed"]


def test_a_request_that_was_refused_says_why_and_was_never_anywhere() -> None:
    refused = evolve(
        told(outcome=Phase.SHED),
        reason="the queue is full",
        slo=Slo(name="chat", ttft_s=1.0),
        slo_result=SloResult(was_served=False, ttft_met=False, tpot_met=True, itl_met=True),
        first_token_at_s=None,
        output_tokens=0,
    )
    root, admission = spans_of(refused)
    assert root.error == "the queue is full"
    assert root.attributes["error.type"] == "shed"
    assert root.attributes["baton.missed"] == ("served", "ttft")
    assert admission.attributes["baton.admitted"] is False


def test_a_trace_that_begins_here_has_no_parent() -> None:
    assert spans_of(RECORD, CONTEXT._replace(parent_id=""))[0].parent_id == ""


@given(records())
def test_every_span_has_its_own_id_and_lies_within_its_parent(record: RequestRecord) -> None:
    spans = {span.span_id: span for span in spans_of(record)}
    assert len(spans) == len(spans_of(record))
    for span in list(spans.values())[1:]:
        parent = spans[span.parent_id]
        assert parent.start_s - 1e-6 <= span.start_s <= span.end_s <= parent.end_s + 1e-6
