"""The tracer of one ingress, where traces are configured."""

from __future__ import annotations

from baton.config.schema.deployment import DeploymentConfig
from baton.runtime.process.clock import MonotonicClock
from baton.telemetry.requests.tracing import Exporter, SamplingRules, Tracer


def ingress_tracer(
    config: DeploymentConfig, *, instance_id: str, clock: MonotonicClock
) -> Tracer | None:
    """Sends traces of this ingress' requests, once started; None where nothing is traced."""
    tracing = config.observability.tracing
    if tracing.otlp is None:
        return None
    url = tracing.otlp

    def connect() -> Exporter:
        try:
            from baton.telemetry.requests.otlp import OtlpExporter
        except ImportError as error:
            raise RuntimeError(
                "observability.tracing.otlp is set, but opentelemetry is not installed here:"
                " install baton[otel] on every node, or set it to null"
            ) from error
        return OtlpExporter(url, instance_id=instance_id)

    return Tracer(
        SamplingRules(sample_fraction=tracing.sample, keep_slo_misses=tracing.keep_slo_misses),
        model=config.model_name,
        wall_offset_s=clock.wall_offset_s,
        connect=connect,
    )
