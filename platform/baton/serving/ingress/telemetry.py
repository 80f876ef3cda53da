"""One ingress' metrics: measured as requests end, collected when asked, served on a port of theirs.

Nothing here can hurt a request: what goes wrong is logged once, and the request goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from baton.config.schema.deployment import DeploymentConfig
from baton.config.schema.observability import ObservabilityConfig
from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.events import Event
from baton.runtime.ports import Recorder
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.process.log_events import log_event
from baton.serving.http.access import TokenFile
from baton.serving.http.metrics_endpoint import MetricsEndpoint, MetricsRenderer
from baton.telemetry.metrics.ingress import IngressCollector, IngressFacts, IngressMetrics
from baton.telemetry.requests.outcomes import ReplicaOutcomes
from baton.telemetry.requests.tracing import Exporter, SamplingRules, Tracer

_DEFAULT_LIMITS = CoordinatorLimits()
_LOGGER = logging.getLogger(__name__)


class IngressTelemetry:
    """Measures one coordinator, where that is wanted; nothing is served before `start`."""

    def __init__(
        self,
        config: ObservabilityConfig,
        coordinator: Coordinator,
        rules: ServiceRules,
        *,
        limits: CoordinatorLimits = _DEFAULT_LIMITS,
        now_s: Callable[[], float],
        count_unreachable: Callable[[], int],
    ) -> None:
        self._config = config
        self.generation: Callable[[], int] = lambda: 0
        """Of the configuration that the ingress goes by; whoever knows it replaces this."""
        self.outcomes = ReplicaOutcomes()
        """What each replica has done, which rollouts go by: kept whether metrics are or not."""
        self._metrics = IngressMetrics(rules.slos.classes.values(), limits, now_s=now_s)
        facts = IngressFacts(now_s, count_unreachable, self._current_generation)
        self._collector = IngressCollector(coordinator, self._metrics, facts, tenants=rules.tenants)
        self._endpoint: MetricsEndpoint | None = None
        self._error_logged = False

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """Who is to be told of every request that has ended."""
        metrics = (self._metrics,) if self._config.metrics.enabled else ()
        return (self.outcomes, *metrics)

    @property
    def address(self) -> str | None:
        """Where the metrics are, `host:port`; None where they are nowhere."""
        return None if self._endpoint is None else self._endpoint.address

    def on_event(self, event: Event) -> None:
        """Is to be told what replicas say, before anybody acts on it."""
        if not self._config.metrics.enabled:
            return
        try:
            self._metrics.on_event(event)
        except Exception:
            if not self._error_logged:
                self._error_logged = True
                _LOGGER.exception("a %s could not be measured", type(event).__name__)

    def reconfigure(self, rules: ServiceRules, limits: CoordinatorLimits) -> None:
        """Classes, tenants and timeouts are others from now on."""
        changed = self._metrics.set_edges(rules.slos.classes.values(), limits)
        self._collector.add_tenants(rules.tenants)
        if changed and self._config.metrics.enabled:
            fields = {"histograms": "; ".join(map(str, changed))}
            log_event(_LOGGER, logging.INFO, "histogram_edges_changed", fields)

    async def start(self, host: str) -> None:
        """Serve metrics at an address of this node, on any port that is free; never raises."""
        path = self._config.token_file
        if self._config.metrics.enabled:
            token = None if path is None else TokenFile(Path(path))
            metrics = MetricsRenderer(self._collector.collect)
            self._endpoint = MetricsEndpoint(metrics, host=host, token=token)
            await self._endpoint.start()

    async def close(self) -> None:
        """Serve no more. Idempotent."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def _current_generation(self) -> int:
        return self.generation()


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
