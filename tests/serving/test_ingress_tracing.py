"""An ingress traces what its configuration says."""

from __future__ import annotations

import sys

import pytest

from baton.domain.names.distribution import pip_install
from baton.domain.names.trace_context import TraceContext
from baton.runtime.process.clock import MonotonicClock
from baton.serving.ingress.auth import IngressAuth
from baton.serving.ingress.model_ingress import ingress_tracer
from baton.telemetry.requests.tracing import Tracer
from tests.fakes.request_records import RECORD
from tests.serving.configs import simulated

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from baton.domain.value import evolve
from tests.fakes.otlp_receiver import running_receiver

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", sampled=True, operation="chat")


def tracer_of(*sets: str) -> Tracer | None:
    return ingress_tracer(simulated(*sets), instance_id="ingress-1", clock=MonotonicClock())


def test_without_a_collector_nothing_is_traced_and_no_trace_begins() -> None:
    assert tracer_of() is None
    assert IngressAuth(simulated()).access(simulated()).trace_sample_fraction is None


def test_with_a_collector_traces_begin_at_the_gate_in_the_share_that_is_sampled() -> None:
    wanted = simulated(
        "observability.tracing.otlp=http://127.0.0.1:1", "observability.tracing.sample=0.25"
    )
    assert IngressAuth(wanted).access(wanted).trace_sample_fraction == 0.25


def test_a_request_that_has_ended_arrives_at_the_collector_at_the_walls_time() -> None:
    clock = MonotonicClock()
    now_s = clock.now_s()
    wall_ns = int((now_s + clock.wall_offset_s()) * 1e9)
    with running_receiver() as collector:
        tracer = tracer_of(f"observability.tracing.otlp={collector.url}")
        assert tracer is not None
        tracer.start()
        moved_s = now_s - RECORD.ended_at_s
        tracer.record(
            evolve(
                RECORD,
                trace=TRACE,
                legs=(),
                decisions=(),
                arrived_at_s=RECORD.arrived_at_s + moved_s,
                ended_at_s=now_s,
            )
        )
        tracer.close(10.0)
        root, _admission = collector.trace(TRACE.trace_id, lambda found: len(found) == 2)
    assert root.name == f"chat {simulated().model_name}"
    assert abs(root.end_ns - wall_ns) < 1e9
    assert tracer.counts.as_dict() == {"sent": 1, "dropped": 0, "failed": 0}


def test_a_node_without_opentelemetry_says_what_to_install_and_serves_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "baton.telemetry.requests.otlp", None)
    tracer = tracer_of("observability.tracing.otlp=http://127.0.0.1:1")
    assert tracer is not None
    tracer.start()
    tracer.close(10.0)
    assert pip_install("otel") in caplog.text
    tracer.record(evolve(RECORD, trace=TRACE))
