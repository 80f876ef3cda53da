"""Exports spans to an OpenTelemetry collector, as OTLP over HTTP.

Imports OpenTelemetry, the extra `otel`: import this module only where traces are
configured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

import baton
from baton.telemetry.requests.spans import Span
from baton.telemetry.requests.tracing import TraceSpans

EXPORT_S = 5.0
"""The longest time for a batch, retries included."""
_PATH = "/v1/traces"
_NS = 1_000_000_000
_SCOPE = InstrumentationScope("baton", baton.__version__)
_MAX_ENGINES = 4096


class OtlpExporter:
    """Sends spans to one collector. Satisfies `tracing.Exporter`."""

    def __init__(self, url: str, *, instance_id: str, deadline_s: float = EXPORT_S) -> None:
        """Prepare to send to `url`, as `http://collector:4318`, without connecting yet."""
        # It logs every attempt; the tracer logs only when the collector fails and recovers.
        logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
        endpoint = url if url.endswith(_PATH) else url.rstrip("/") + _PATH
        self._url = endpoint
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=deadline_s)
        self._ingress_resource = _resource("baton", instance_id)
        self._engine_resources: dict[str, Resource] = {}

    def export(self, traces: list[TraceSpans]) -> str | None:
        """Send spans; returns the reason of a failure, or None."""
        spans = [span for trace in traces for span in self._to_otel_spans(trace)]
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return None
        return f"{self._url} did not take {len(spans)} spans in time"

    def close(self) -> None:
        """Abort the export in progress."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # of the SDK

    def _to_otel_spans(self, trace: TraceSpans) -> Iterator[ReadableSpan]:
        trace_id = int(trace.context.trace_id, 16)
        state = TraceState.from_header([trace.context.state]) if trace.context.state else None

        def context(span_id: str) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(
                trace_id, int(span_id, 16), is_remote=False, trace_flags=flags, trace_state=state
            )

        def nanoseconds(at_s: float) -> int:
            return int((at_s + trace.wall_offset_s) * _NS)

        for span in trace.spans:
            yield ReadableSpan(
                name=span.name,
                context=context(span.span_id),
                parent=context(span.parent_id) if span.parent_id else None,
                resource=self._resource_of(span),
                attributes=dict(span.attributes),
                events=[
                    Event(event.name, dict(event.attributes), nanoseconds(event.at_s))
                    for event in span.events
                ],
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=nanoseconds(span.start_s),
                end_time=nanoseconds(span.end_s),
                instrumentation_scope=_SCOPE,
            )

    def _resource_of(self, span: Span) -> Resource:
        if not span.replica_id:
            return self._ingress_resource
        resource = self._engine_resources.get(span.replica_id)
        if resource is None:
            if len(self._engine_resources) >= _MAX_ENGINES:
                self._engine_resources.clear()
            resource = self._engine_resources[span.replica_id] = _resource(
                "baton-engine", span.replica_id
            )
        return resource


def _resource(service: str, instance_id: str) -> Resource:
    return Resource.create(
        {
            "service.name": service,
            "service.version": baton.__version__,
            "service.instance.id": instance_id,
        }
    )
