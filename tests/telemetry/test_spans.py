"""The spans of one request, made of its record."""

from __future__ import annotations

from hypothesis import given

from baton.domain.commands import RequestRecord
from baton.domain.leg_record import LegOutcome
from baton.domain.names.trace_context import TraceContext, span_id
from baton.domain.request import Phase
from baton.domain.slo import Slo, SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.spans import MAX_TEXT_CHARS, Span, request_spans
from tests.fakes.request_records import DECODE, LOCAL, OPTION, PREFILL, RECORD
from tests.telemetry.test_waterfall import records, told

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


def test_the_request_is_its_callers_span_served_with_what_opentelemetry_has_names_for() -> None:
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
