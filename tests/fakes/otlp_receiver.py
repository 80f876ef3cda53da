"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as a collector sees it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: tuple[str, ...]
    ok: bool


class OtlpReceiver:
    """What came, and a way to wait for it."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[ReceivedSpan] = []
        self._received = threading.Condition()

    def ingest(self, body: bytes) -> None:
        spans = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self._received:
            self._spans.extend(spans)
            self._received.notify_all()

    def trace(
        self, trace_id: str, complete: Callable[[list[ReceivedSpan]], bool]
    ) -> list[ReceivedSpan]:
        """The spans of a trace once they are complete; fails when they are not in time."""

        def spans() -> list[ReceivedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self._received:
            is_complete = self._received.wait_for(lambda: complete(spans()), timeout=15.0)
            assert is_complete, (
                f"of trace {trace_id} there is only {[span.name for span in spans()]}"
            )
            return spans()


def span_paths(spans: list[ReceivedSpan]) -> list[str]:
    """Paths of names from the top, in order."""
    by_id = {span.span_id: span for span in spans}

    def path(span: ReceivedSpan) -> str:
        parent = by_id.get(span.parent_id)
        return f"{path(parent)}/{span.name}" if parent is not None else span.name

    return [path(span) for span in spans]


@contextmanager
def running_receiver() -> Iterator[OtlpReceiver]:
    """A collector that listens on a port of its own."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            receiver.ingest(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for group in request.resource_spans:
        resource = _plain(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_plain(span.attributes),
                    resource=resource,
                    events=tuple(event.name for event in span.events),
                    ok=span.status.code != span.status.STATUS_CODE_ERROR,
                )


def _plain(attributes: Any) -> dict[str, Any]:  # noqa: ANN401 - of protobuf
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:  # noqa: ANN401 - of protobuf
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(other) for other in value.array_value.values]
    return getattr(value, kind)
