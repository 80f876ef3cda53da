"""One model of an ingress: API server, coordinator and links to replicas."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from baton.config.derive.options import (
    adapter_sources,
    api_arguments,
    coordinator_limits,
    index_options,
    probe_options,
    scales_from_zero,
    service_rules,
)
from baton.config.derive.policies import build_placer, router_rng
from baton.config.schema.deployment import ApiServerKind, DeploymentConfig, ListenerKind
from baton.config.schema.observability import ObservabilityConfig
from baton.control.coordinator import Coordinator
from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.control.probing.notices import PairNoticeKind
from baton.control.queue.admission_controller import SheddingClass
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import Delivery, RecordSelection
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.domain.errors import BatonError, ComponentUnhealthy, LinkFailed, Rejected
from baton.domain.events import (
    ColdStartReported,
    Event,
    QuotasAllocated,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    TimerFired,
)
from baton.domain.fleet import LossReason, ReplicaFacts
from baton.domain.names.distribution import pip_install
from baton.engine.vllm.frontend.app import VllmFrontend, preload_python_frontend
from baton.engine.vllm.frontend.rust_frontend import RustFrontend, preload_rust_frontend
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.gate import AsgiApp
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.ports import Recorder
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.process.gc_tuning import freeze_startup_heap
from baton.serving.controller.quota_allocator import IngressShares, Shares
from baton.serving.http.access import TokenFile
from baton.serving.http.metrics_endpoint import MetricsEndpoint, MetricsRenderer
from baton.serving.ingress.auth import IngressAuth, frontend_limits, request_capabilities
from baton.serving.ingress.rust_ingress import RustIngress, open_routes
from baton.serving.ray.asgi_port import placeholder_app
from baton.serving.ray.membership import Member, Membership
from baton.serving.replica.engines import model_path
from baton.serving.shared.names import LINK_ADDRESS, REPLICA_ID
from baton.serving.shared.reports import (
    Row,
    fleet_report,
    link_report,
    policy_report,
    timing_report,
)
from baton.serving.store import config_store as live_config
from baton.serving.store.config_participant import Switch
from baton.telemetry.logs import log_event
from baton.telemetry.metrics.ingress import (
    AccessFacts,
    IngressCollector,
    IngressFacts,
    IngressMetrics,
)
from baton.telemetry.requests.outcomes import ReplicaOutcomes
from baton.telemetry.requests.recorders import Recorders
from baton.telemetry.requests.request_log import (
    RejectionLog,
    RequestLog,
    RequestReport,
    request_report,
)
from baton.telemetry.requests.tracing import Exporter, SamplingRules, Tracer

_LOGGER = logging.getLogger(__name__)
_WARNING_NOTICES = frozenset(
    {
        PairNoticeKind.QUARANTINED,
        PairNoticeKind.SOURCE_UNREACHABLE,
        PairNoticeKind.AGENT_FAILED,
    }
)
_FIRST_REPLICA_TIMEOUT_S = 1800.0
_MISSING_POOL_WAIT_S = 10.0
"""After this time an ingress serves without a pool that has no replica."""
_DEFAULT_LIMITS = CoordinatorLimits()
_KEPT_LOSSES = 32


class _Links(Protocol):
    """The part of the link client that membership drives."""

    def connect(self, replica_id: str, address: str) -> None:
        """Keep a session with a replica."""
        ...

    def disconnect(self, replica_id: str) -> None:
        """Forget a replica."""
        ...


class ModelIngress:
    """Everything an ingress owns for one model.

    It stands between driver and frontend, because link events may arrive before the frontend
    exists.
    """

    def __init__(
        self, config: DeploymentConfig, *, app: str, coordinator_id: str, link: LinkOptions
    ) -> None:
        self._config = config
        self._app = app
        self._coordinator_id = coordinator_id
        self._clock = MonotonicClock()
        self._request_log = RequestLog()
        self._rejections = RejectionLog(
            now_s=self._clock.now_s, call_later=asyncio.get_running_loop().call_later
        )
        self._frontend: VllmFrontend | RustFrontend | None = None
        self.rust_ingress: RustIngress | None = None
        self._auth = IngressAuth(config)
        self._quota_shares = IngressShares(coordinator_id)
        self._first_replica_facts: asyncio.Future[ReplicaFacts] = (
            asyncio.get_running_loop().create_future()
        )
        self._link = LinkClient(coordinator_id, self._on_link_event, options=link)
        rules, rng = service_rules(config), router_rng(config, coordinator_id)
        limits = coordinator_limits(config)
        self._placer = build_placer(config, rng)
        self._coordinator = Coordinator(
            limits=limits,
            placer=self._placer,
            rules=rules,
            coordinators=config.server.replicas.min,
            seed=rng.getrandbits(63),
            index=index_options(config),
            probing=probe_options(config),
        )
        self.telemetry = IngressTelemetry(
            config.observability,
            self._coordinator,
            rules,
            limits=limits,
            now_s=self._clock.now_s,
            count_unreachable=lambda: len(self._unreachable_ids),
        )
        self.telemetry.access = self._auth.facts
        tracer = ingress_tracer(config, instance_id=coordinator_id, clock=self._clock)
        self._tracers = () if tracer is None else (tracer,)
        self._driver = Driver(
            self._coordinator,
            link=self._link,
            frontend=self,
            recorder=Recorders(self._request_log, *self.telemetry.recorders, *self._tracers),
            clock=self._clock,
        )
        self._fleet_readiness = FleetReadiness(_permanent_pools(config))
        self._fleet_watch = FleetWatch(self._link, self._driver.on_event, now_s=self._clock.now_s)
        self._membership = Membership(
            app=app, deployments=tuple(config.pools), on_change=self._fleet_watch.on_members
        )

    async def start(self, host: str) -> AsgiApp:
        """Follow the fleet and start the API server; `host` is the address for metrics.

        Raises:
            EngineStartFailed: the frontend cannot be started.
        """
        await self.telemetry.start(host)
        for tracer in self._tracers:
            tracer.start()
        is_rust = self._config.server.api_server is ApiServerKind.RUST
        # First, because it blocks the event loop: replicas would miss its heartbeats and drop it.
        await asyncio.to_thread(preload_rust_frontend if is_rust else preload_python_frontend)
        await self._membership.start()
        await self._auth.start()
        settings = await asyncio.to_thread(self._frontend_settings)
        facts, hooks = await self._fleet_facts(), self._hooks()
        if is_rust:
            settings = replace(settings, routes=open_routes(self._config))
            self._frontend = RustFrontend(settings, facts, hooks=hooks, clock=self._clock)
            self.rust_ingress = self._build_rust_ingress(self._frontend)
            await self.rust_ingress.start()
            freeze_startup_heap()
            return placeholder_app
        self._frontend = VllmFrontend(settings, facts, hooks=hooks, clock=self._clock)
        app = await self._frontend.start()
        freeze_startup_heap()
        return app

    async def close(self) -> None:
        """Stop taking requests and free everything. Idempotent."""
        await self._membership.stop()
        await self._auth.close()
        if self.rust_ingress is not None:
            await self.rust_ingress.close()
        if self._frontend is not None:
            await self._frontend.close()
        self._driver.close()
        self._rejections.close()
        await self._link.close()
        await self.telemetry.close()
        for tracer in self._tracers:
            await asyncio.to_thread(tracer.close)

    def prepare_switch(self, config: DeploymentConfig) -> Switch:
        """Prepare another configuration; the returned function cannot fail.

        Requests in flight keep their limits and class. Blocks on key files.

        Raises:
            ConfigInvalid: a custom policy or the key files cannot be used.
        """
        self._auth.check(config)
        placer = self._placer
        if (config.router, config.slo) != (self._config.router, self._config.slo):
            placer = build_placer(config, router_rng(config, self._coordinator_id))
        limits, rules = coordinator_limits(config), service_rules(config)

        async def switch() -> None:
            await self._auth.reconfigure(config)
            self._config, self._placer = config, placer
            self._fleet_readiness.reconfigure(_permanent_pools(config))
            self._coordinator.reconfigure(limits=limits, placer=placer, rules=rules)
            self.telemetry.reconfigure(rules, limits)
            if self._frontend is not None:
                access = self._auth.access(config)
                self._frontend.reconfigure(limits=frontend_limits(config), access=access)
            self._driver.on_event(TimerFired())  # queued requests may be placed now

        return switch

    def healthy(self) -> bool:
        """Whether a new request could be served."""
        return self._frontend is not None and self._frontend.healthy()

    @property
    def frontend(self) -> VllmFrontend:
        """The API server.

        Raises:
            LinkFailed: it has not started, or is not in Python.
        """
        if not isinstance(self._frontend, VllmFrontend):
            raise LinkFailed("ingress", "its frontend has not started, or is not in Python")
        return self._frontend

    def check(self) -> None:
        """Check that requests can be served again; the lack of replicas is no failure.

        Raises:
            ComponentUnhealthy: vLLM's server lost its coordinator, or the gate died.
        """
        if self._frontend is not None and self._frontend.has_failed:
            raise ComponentUnhealthy(
                "ingress", "its frontend cannot reach its coordinator any more"
            )
        if self.rust_ingress is not None and self.rust_ingress.broken:
            raise ComponentUnhealthy("ingress", "the gate before its frontend has died")

    def status(self) -> dict[str, object]:
        """The fleet as this ingress sees it, and counts of its requests."""
        phases: dict[str, int] = {}
        for phase in self._driver.phases().values():
            phases[str(phase)] = phases.get(str(phase), 0) + 1
        access = self._auth.facts()
        return {
            "healthy": self.healthy(),
            "replicas": self._fleet_report(),
            "timings": timing_report(self._coordinator.fleet_model.timings.quality()),
            "unjoined": {
                replica_id: self._link.rejection_reasons.get(replica_id, "connecting")
                for replica_id in sorted(self._unreachable_ids)
            },
            "broken_agents": dict(self._coordinator.failed_agents()),
            "in_flight": phases,
            "ended": self._request_log.totals(),
            "rejections": self._rejections.rows(),
            "losses": self._fleet_watch.losses(),
            "traces": [tracer.counts.as_dict() for tracer in self._tracers],
            "policy": policy_report(self._config.router.policy, self._placer),
            "keys": {tenant: asdict(keys) for tenant, keys in access.keys.items()},
            "tls_expires_s": access.tls_expires_s,
            "unauthorized": dict(access.unauthorized),
        }

    def explain(self, request_id: str) -> list[RequestReport]:
        """Reports of a request, oldest first; empty when it is unknown or too old."""
        return [request_report(record) for record in self._request_log.find(request_id)]

    def requests(self, count: int, order: RecordSelection) -> list[RequestReport]:
        """Reports of recent requests, with the seconds since their end."""
        now_s = self._clock.now_s()
        return [
            request_report(record) | {"age_s": round(now_s - record.ended_at_s, 3)}
            for record in self._request_log.select(count, order)
        ]

    def links(self) -> list[Row]:
        """Estimates of every pair of replicas, one row per pair."""
        return link_report(self._coordinator.fleet_model.links.rows(self._clock.now_s()))

    def report(self) -> CoordinatorReport:
        """The controller's input for scaling and quotas."""
        return self._coordinator.report(self._coordinator_id, self._clock.now_s())

    def set_adapters(self, adapters: Sequence[RuntimeAdapter]) -> None:
        """Offer exactly these adapters in addition to those of the configuration."""
        if isinstance(self._frontend, VllmFrontend):
            self._frontend.set_adapters(adapters)

    def adapters_in_flight(self) -> Mapping[str, int]:
        """How many requests in flight need each adapter, by the fleet's name of it."""
        return self._coordinator.adapters_in_flight()

    def apply_quotas(self, shares: Shares, *, at_most: bool) -> str | None:
        """Apply this ingress' shares of tenants' limits; its id, or None if it has none."""
        own = self._quota_shares.update(shares, at_most=at_most)
        if own is None:
            return None
        self._driver.on_event(QuotasAllocated(shares=own))
        return self._coordinator_id

    def record_cold_start(self, start: ColdStart) -> None:
        """Record how long the next replica takes while there is none."""
        self._driver.on_event(ColdStartReported(cold_start=start))

    @property
    def _unreachable_ids(self) -> AbstractSet[str]:
        return self._link.replica_ids - self._link.joined_ids

    def _fleet_report(self) -> list[Row]:
        caches = self._coordinator.fleet_model.cache_states(self._clock.now_s())
        leases = self._coordinator.lease_counts()
        return fleet_report(self._driver.fleet(), caches=caches, leases=leases)

    # -------------------------------------------------------------- ports.Frontend

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Stream tokens to clients."""
        if self._frontend is not None:
            self._frontend.deliver(deliveries)

    def fail(self, request_id: str, error: BatonError) -> None:
        """End a request with an error for the client."""
        if isinstance(error, Rejected):
            self._rejections.record(error)
        if self._frontend is not None:
            self._frontend.fail(request_id, error)

    # -------------------------------------------------------------- wiring

    def _hooks(self) -> FrontendHooks:
        return FrontendHooks(
            on_request=self._driver.on_request,
            on_abort=self._driver.on_abort,
            admit=self._check_admission,
            healthy=self._can_serve,
        )

    def _build_rust_ingress(self, frontend: RustFrontend) -> RustIngress:
        def refusal(tenant: str) -> Rejected | None:
            return self._coordinator.rejection(tenant=tenant, now_s=self._clock.now_s())

        def shedding() -> list[SheddingClass]:
            return self._coordinator.shedding_classes(self._clock.now_s())

        return RustIngress(
            frontend,
            self._auth,
            config=lambda: self._config,
            refusal=refusal,
            shedding=shedding,
            deployment=self._gate_group(),
        )

    def _gate_group(self) -> str | None:
        """The deployment whose gates share the public port; None if Ray Serve's HAProxy listens."""
        if self._config.server.listener is not ListenerKind.INGRESS:
            return None
        from baton.serving.ray.context import session_name

        return f"{session_name()}/{self._app}"

    def _check_admission(self, requests: int, caller: Caller) -> Rejected | None:
        error = self._driver.check_admission(
            requests, tenant=caller.tenant, slo_class=caller.slo_class
        )
        if error is not None:
            self._rejections.record(error, requests=requests)
        return error

    def _frontend_settings(self) -> FrontendSettings:
        name = self._config.model_name
        model = self._config.models[name]
        return FrontendSettings(
            model=model_path(model),
            served_model_name=name,
            extra=api_arguments(model),
            routes=tuple(str(route) for route in self._config.server.routes),
            capabilities=request_capabilities(self._config),
            adapters=adapter_sources(model),
            runtime_adapters=model.runtime_adapters.max > 0,
            limits=frontend_limits(self._config),
            access=self._auth.access(self._config),
        )

    async def _fleet_facts(self) -> FleetFacts:
        """The facts of the fleet as one engine.

        Only the length of the context matters to the frontend. Without a configured length the
        first replica to join provides it; an engine start can take minutes.
        """
        model = self._config.models[self._config.model_name]
        max_len_tokens = model.max_len_tokens
        if max_len_tokens is None:
            max_len_tokens = await self._max_len_from_replicas()
        return FleetFacts(
            max_len_tokens=max_len_tokens,
            block_size_tokens=16,
            kv_blocks=max_len_tokens // 16,
            max_running_requests=1024,
            max_batched_tokens=8192,
            adapters=len(model.adapters) + model.runtime_adapters.max,
        )

    async def _max_len_from_replicas(self) -> int:
        """The context length in tokens, from the first replica.

        A fleet at zero would wait for a replica that no request starts. For it, the stored length
        of the last start is used.
        """
        store_key = f"context/{self._app}/{self._config.model_name}"
        stored = (
            await asyncio.to_thread(live_config.load, store_key)
            if scales_from_zero(self._config)
            else None
        )
        if stored is not None and not self._first_replica_facts.done():
            return int(stored)
        async with asyncio.timeout(_FIRST_REPLICA_TIMEOUT_S):
            max_len_tokens = (await self._first_replica_facts).max_len_tokens
        if scales_from_zero(self._config):
            await asyncio.to_thread(live_config.save, store_key, str(max_len_tokens).encode())
        return max_len_tokens

    def _can_serve(self) -> bool:
        views = self._driver.fleet().replicas.values()
        pools = [view.facts.pool for view in views if not view.draining]
        is_ready = self._fleet_readiness.is_ready(pools, self._clock.now_s())
        return is_ready and self._coordinator.can_serve()

    def _on_link_event(self, event: Event) -> None:
        self.telemetry.on_event(event)
        self._fleet_watch.on_link_event(event)
        self._log_notices()
        if isinstance(event, ReplicaJoined) and not self._first_replica_facts.done():
            self._first_replica_facts.set_result(event.facts)

    def _log_notices(self) -> None:
        for notice in self._coordinator.pop_notices():
            fields = {
                "source": notice.source_id,
                "target": notice.target_id,
                "reason": notice.reason,
            }
            level = logging.WARNING if notice.kind in _WARNING_NOTICES else logging.INFO
            log_event(_LOGGER, level, str(notice.kind).replace(" ", "_"), fields)


def _permanent_pools(config: DeploymentConfig) -> list[str]:
    """Pools that always have a replica."""
    return [name for name, pool in config.pools.items() if pool.replicas.min > 0]


class FleetWatch:
    """Connects new members, drains those that leave, and forgets lost replicas.

    A replica that leaves the membership is stopping, but may still finish streams. Its link
    stays until it breaks; the replica gets no new work.
    """

    def __init__(
        self, links: _Links, on_event: Callable[[Event], None], *, now_s: Callable[[], float]
    ) -> None:
        self._links = links
        self._on_event = on_event
        self._now_s = now_s
        self._losses: deque[tuple[float, ReplicaLost]] = deque(maxlen=_KEPT_LOSSES)
        self._members: frozenset[str] = frozenset()
        self._joined: set[str] = set()
        self._draining: set[str] = set()

    def on_members(self, members: frozenset[Member]) -> None:
        """Apply a new view of the membership."""
        addresses = {
            str(member.metadata[REPLICA_ID]): str(member.metadata[LINK_ADDRESS])
            for member in members
            if LINK_ADDRESS in member.metadata
        }
        removed = self._members - addresses.keys()
        self._members = frozenset(addresses)
        for replica_id in sorted(self._draining & addresses.keys()):
            # Draining is final; only a new session resets it.
            self._links.disconnect(replica_id)
        self._draining -= self._members
        for replica_id, address in addresses.items():
            self._links.connect(replica_id, address)
        for replica_id in sorted(removed):
            if replica_id in self._joined:
                self._draining.add(replica_id)
                _log("replica_draining", {"replica_id": replica_id})
                self._on_event(ReplicaDraining(replica_id=replica_id))
            else:
                # A killed replica: its link broke before Ray noticed.
                self._links.disconnect(replica_id)

    def on_link_event(self, event: Event) -> None:
        """Pass on an event of the link; forget a draining replica whose link breaks."""
        try:
            self._on_event(event)
        finally:  # only this object tracks who has joined, so it does even after an error
            self._track_membership(event)

    def losses(self) -> list[Row]:
        """The last replicas that were lost unexpectedly, oldest first."""
        now_s = self._now_s()
        return [
            {
                "replica_id": lost.replica_id,
                "age_s": round(now_s - at_s, 1),
                "reason": str(lost.reason),
                "detail": lost.detail.partition("\n")[0],
            }
            for at_s, lost in self._losses
        ]

    def _track_membership(self, event: Event) -> None:
        if isinstance(event, ReplicaJoined):
            facts = event.facts
            _log("replica_joined", {"replica_id": facts.replica_id, "role": str(facts.role)})
            self._joined.add(facts.replica_id)
        elif isinstance(event, ReplicaLost):
            expected = event.reason is LossReason.LEFT or event.replica_id in self._draining
            level = logging.INFO if expected else logging.WARNING
            if not expected:
                self._losses.append((self._now_s(), event))
            fields = {"replica_id": event.replica_id, "reason": str(event.reason)}
            _log("replica_lost", fields, level)
            self._joined.discard(event.replica_id)
            if event.replica_id in self._draining:
                self._draining.discard(event.replica_id)
                self._links.disconnect(event.replica_id)


def _log(event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
    log_event(_LOGGER, level, event, fields)


class FleetReadiness:
    """Delays readiness until each pool with permanent replicas has a joined replica.

    An ingress that knows only one pool would run both phases there. Readiness stays; later losses
    are up to placement.
    """

    def __init__(self, pools: Iterable[str], *, wait_s: float = _MISSING_POOL_WAIT_S) -> None:
        self._required_pools = frozenset(pools)
        self._ready = False
        self._wait_s = wait_s
        self._serving_since_s: float | None = None

    def reconfigure(self, pools: Iterable[str]) -> None:
        """Set the pools that always have replicas."""
        self._required_pools = frozenset(pools)

    def is_ready(self, joined_pools: Iterable[str], now_s: float) -> bool:
        """Whether to accept requests, given the pools of replicas that can serve."""
        if self._ready:
            return True
        serving_pools = frozenset(joined_pools)
        if serving_pools and self._serving_since_s is None:
            self._serving_since_s = now_s
        waited_s = 0.0 if self._serving_since_s is None else now_s - self._serving_since_s
        self._ready = serving_pools >= self._required_pools or waited_s >= self._wait_s
        return self._ready


class IngressTelemetry:
    """Measures one coordinator if metrics are enabled; serves them after `start`.

    A failure here is logged once and never affects a request.
    """

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
        """Set by the ingress."""
        self.access: Callable[[], AccessFacts] = AccessFacts
        """Likewise."""
        self.outcomes = ReplicaOutcomes()
        """For rollouts; recorded even without metrics."""
        self._metrics = IngressMetrics(rules.slos.classes.values(), limits, now_s=now_s)
        facts = IngressFacts(now_s, count_unreachable, self._current_generation, self._access_now)
        self._collector = IngressCollector(coordinator, self._metrics, facts, tenants=rules.tenants)
        self._endpoint: MetricsEndpoint | None = None
        self._error_logged = False

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """Recorders of every request that has ended."""
        metrics = (self._metrics,) if self._config.metrics.enabled else ()
        return (self.outcomes, *metrics)

    @property
    def address(self) -> str | None:
        """Address of the metrics, `host:port`; None without."""
        return None if self._endpoint is None else self._endpoint.address

    def on_event(self, event: Event) -> None:
        """Measure an event of the link, before it takes effect."""
        if not self._config.metrics.enabled:
            return
        try:
            self._metrics.on_event(event)
        except Exception:
            if not self._error_logged:
                self._error_logged = True
                _LOGGER.exception("a %s could not be measured", type(event).__name__)

    def reconfigure(self, rules: ServiceRules, limits: CoordinatorLimits) -> None:
        """Apply other classes, tenants and timeouts."""
        changed = self._metrics.set_edges(rules.slos.classes.values(), limits)
        self._collector.add_tenants(rules.tenants)
        if changed and self._config.metrics.enabled:
            fields = {"histograms": "; ".join(map(str, changed))}
            log_event(_LOGGER, logging.INFO, "histogram_edges_changed", fields)

    async def start(self, host: str) -> None:
        """Serve metrics at this address on any free port; never raises."""
        path = self._config.token_file
        if self._config.metrics.enabled:
            token = None if path is None else TokenFile(Path(path))
            metrics = MetricsRenderer(self._collector.collect)
            self._endpoint = MetricsEndpoint(metrics, host=host, token=token)
            await self._endpoint.start()

    async def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def _current_generation(self) -> int:
        return self.generation()

    def _access_now(self) -> AccessFacts:
        return self.access()


def ingress_tracer(
    config: DeploymentConfig, *, instance_id: str, clock: MonotonicClock
) -> Tracer | None:
    """Exports traces of this ingress' requests, once started; None without tracing."""
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
                f" run {pip_install('otel')} on every node, or set it to null"
            ) from error
        return OtlpExporter(url, instance_id=instance_id)

    return Tracer(
        SamplingRules(sample_fraction=tracing.sample, keep_slo_misses=tracing.keep_slo_misses),
        model=config.model_name,
        wall_offset_s=clock.wall_offset_s,
        connect=connect,
    )
