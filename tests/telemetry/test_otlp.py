"""Spans arrive at a collector, over HTTP, as OpenTelemetry wants them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from baton.domain.names.trace_context import TraceContext
from baton.telemetry.requests.spans import request_spans
from baton.telemetry.requests.tracing import TraceSpans
from tests.fakes.free_ports import free_port
from tests.fakes.request_records import RECORD

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from baton.domain.value import evolve
from baton.telemetry.requests.otlp import OtlpExporter
from tests.fakes.otlp_receiver import OtlpReceiver, running_receiver, span_paths

CONTEXT = TraceContext(
    "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", state="v=1", operation="chat"
)
WALL_S = 1_700_000_000.0


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with running_receiver() as found:
        yield found


def traced(context: TraceContext = CONTEXT) -> TraceSpans:
    record = evolve(RECORD, trace=context)
    return TraceSpans(context, request_spans(record, context, model="tiny"), WALL_S)


def test_a_trace_arrives_whole_with_each_engine_as_its_own_service(
    collector: OtlpReceiver,
) -> None:
    assert OtlpExporter(collector.url, instance_id="ingress-1").export([traced()]) is None
    spans = collector.trace(CONTEXT.trace_id, lambda found: len(found) == 10)
    assert sorted(span_paths(spans)) == [
        "chat tiny",
        "chat tiny/admission",
        "chat tiny/leg decode",
        "chat tiny/leg decode/decode",
        "chat tiny/leg decode/decode",
        "chat tiny/leg decode/transfer",
        "chat tiny/leg prefill",
        "chat tiny/leg prefill/prefill",
        "chat tiny/leg prefill/queue",
        "chat tiny/route",
    ]
    by_name = {span.name: span for span in spans}
    root = by_name["chat tiny"]
    assert root.parent_id == CONTEXT.parent_id
    assert root.resource["service.name"] == "baton"
    assert root.resource["service.instance.id"] == "ingress-1"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.start_ns == int((100.0 + WALL_S) * 1e9)
    assert by_name["route"].events == ("candidate",)
    engines = {
        (span.resource["service.name"], span.resource["service.instance.id"])
        for span in spans
        if span.name in {"queue", "prefill", "transfer", "decode"}
    }
    assert engines == {("baton-engine", "p"), ("baton-engine", "d")}


def test_a_collector_that_is_not_there_is_given_up_within_the_deadline() -> None:
    exporter = OtlpExporter(
        f"http://127.0.0.1:{free_port()}/", instance_id="ingress-1", deadline_s=0.2
    )
    began_s = time.monotonic()
    reason = exporter.export([traced()])
    assert reason is not None
    assert "/v1/traces did not take 10 spans" in reason
    assert time.monotonic() - began_s < 2.0
    exporter.close()
