"""What an ingress has for one model: an API server, a coordinator behind it, links to replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

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
from baton.control.coordinator import Coordinator
from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.control.probing.notices import PairNoticeKind
from baton.control.queue.recent_estimates import SheddingClass
from baton.domain.commands import Delivery, RecordSelection
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.domain.errors import BatonError, ComponentUnhealthy, LinkFailed, Rejected
from baton.domain.events import (
    ColdStartReported,
    Event,
    QuotasAllocated,
    ReplicaJoined,
    TimerFired,
)
from baton.domain.fleet import ReplicaFacts
from baton.engine.vllm.frontend.app import VllmFrontend, preload_python_frontend
from baton.engine.vllm.frontend.rust_frontend import RustFrontend, preload_rust_frontend
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.gate import AsgiApp
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.process.gc_tuning import freeze_startup_heap
from baton.serving.controller.quota_allocator import IngressShares, Shares
from baton.serving.ingress.auth import IngressAuth, frontend_limits, request_capabilities
from baton.serving.ingress.fleet_watch import FleetReadiness, FleetWatch
from baton.serving.ingress.rust_ingress import RustIngress, open_routes
from baton.serving.ingress.telemetry import IngressTelemetry, ingress_tracer
from baton.serving.ray.asgi_port import placeholder_app
from baton.serving.ray.membership import Membership
from baton.serving.replica.engines import model_path
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
from baton.telemetry.requests.recorders import Recorders
from baton.telemetry.requests.request_log import RequestLog, RequestReport, request_report

_LOGGER = logging.getLogger(__name__)
_WARNING_NOTICES = frozenset(
    {
        *(PairNoticeKind.QUARANTINED, PairNoticeKind.SOURCE_UNREACHABLE),
        PairNoticeKind.AGENT_FAILED,
    }
)
_FIRST_REPLICA_TIMEOUT_S = 1800.0


class ModelIngress:
    """Everything an ingress replica owns; `start` builds it up, `close` takes it down.

    It stands between the driver and the frontend, because the link may speak before the frontend
    is there to be spoken to.
    """

    def __init__(
        self, config: DeploymentConfig, *, app: str, coordinator_id: str, link: LinkOptions
    ) -> None:
        self._config = config
        self._app = app
        self._coordinator_id = coordinator_id
        self._clock = MonotonicClock()
        self._request_log = RequestLog()
        self._frontend: VllmFrontend | RustFrontend | None = None
        self.rust_ingress: RustIngress | None = None
        """What serves its clients in Rust mode, once it has started."""
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
        self._fleet_watch = FleetWatch(self._link, self._driver.on_event)
        self._membership = Membership(
            app=app, deployments=tuple(config.pools), on_change=self._fleet_watch.on_members
        )

    async def start(self, host: str) -> AsgiApp:
        """Follow the fleet and bring the API up; metrics are served at this address.

        Raises:
            EngineStartFailed: the frontend cannot be started.
        """
        await self.telemetry.start(host)
        for tracer in self._tracers:
            tracer.start()
        is_rust = self._config.server.api_server is ApiServerKind.RUST
        # First, for it keeps the loop waiting: replicas would miss its beats, leave and come back.
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
        await self._link.close()
        await self.telemetry.close()
        for tracer in self._tracers:
            await asyncio.to_thread(tracer.close)

    def prepare_switch(self, config: DeploymentConfig) -> Switch:
        """The way to another configuration; whatever can fail has not.

        Requests under way keep what they were promised. Blocks on key files.

        Raises:
            ConfigInvalid: a policy of the user's own, or key files, cannot be used.
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
            self._driver.on_event(TimerFired())  # who waits may have a place now

        return switch

    def healthy(self) -> bool:
        """Whether a request that comes now could be served."""
        return self._frontend is not None and self._frontend.healthy()

    @property
    def frontend(self) -> VllmFrontend:
        """Its API server.

        Raises:
            LinkFailed: it has not started, or is none in Python.
        """
        if not isinstance(self._frontend, VllmFrontend):
            raise LinkFailed("ingress", "its frontend has not started, or is not in Python")
        return self._frontend

    def check(self) -> None:
        """Raise when no request will be served here again; that there is no replica is no reason.

        Raises:
            Broken: vLLM's server has lost the coordinator behind it, or what lets clients in died.
        """
        if self._frontend is not None and self._frontend.has_failed:
            raise ComponentUnhealthy(
                "ingress", "its frontend cannot reach its coordinator any more"
            )
        if self.rust_ingress is not None and self.rust_ingress.broken:
            raise ComponentUnhealthy("ingress", "the gate before its frontend has died")

    def status(self) -> dict[str, object]:
        """The fleet as this ingress sees it, and what it has done."""
        phases: dict[str, int] = {}
        for phase in self._driver.phases().values():
            phases[str(phase)] = phases.get(str(phase), 0) + 1
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
            "traces": [tracer.counts.as_dict() for tracer in self._tracers],
            "policy": policy_report(self._config.router.policy, self._placer),
        }

    def explain(self, request_id: str) -> list[RequestReport]:
        """The stories of a request, oldest first; empty when it is unknown or long gone."""
        return [request_report(record) for record in self._request_log.find(request_id)]

    def requests(self, count: int, order: RecordSelection) -> list[RequestReport]:
        """Stories of requests that have ended lately, and how long ago they did."""
        now_s = self._clock.now_s()
        return [
            request_report(record) | {"age_s": round(now_s - record.ended_at_s, 3)}
            for record in self._request_log.select(count, order)
        ]

    def links(self) -> list[Row]:
        """What this ingress knows of every pair of replicas, one row a pair."""
        return link_report(self._coordinator.fleet_model.links.rows(self._clock.now_s()))

    def report(self) -> CoordinatorReport:
        """What the controller scales by, and deals quotas out by."""
        return self._coordinator.report(self._coordinator_id, self._clock.now_s())

    def set_adapters(self, adapters: Sequence[RuntimeAdapter]) -> None:
        """Offer these adapters of its model besides those of the file, and no others."""
        if isinstance(self._frontend, VllmFrontend):
            self._frontend.set_adapters(adapters)

    def adapters_in_flight(self) -> Mapping[str, int]:
        """How many requests under way need each adapter, as the fleet calls them."""
        return self._coordinator.adapters_in_flight()

    def apply_quotas(self, shares: Shares, *, at_most: bool) -> str | None:
        """Go by this ingress' shares of tenants' limits; its id, or None when it has none."""
        own = self._quota_shares.update(shares, at_most=at_most)
        if own is None:
            return None
        self._driver.on_event(QuotasAllocated(shares=own))
        return self._coordinator_id

    def record_cold_start(self, start: ColdStart) -> None:
        """Know how long the next replica takes, while there is none."""
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
        """End a request with an error the client can read."""
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
        """Whose gates share the public port; None where Ray Serve's HAProxy listens there."""
        if self._config.server.listener is not ListenerKind.INGRESS:
            return None
        from baton.serving.ray.context import session_name

        return f"{session_name()}/{self._app}"

    def _check_admission(self, requests: int, caller: Caller) -> Rejected | None:
        return self._driver.check_admission(
            requests, tenant=caller.tenant, slo_class=caller.slo_class
        )

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
        """What the frontend is told of its engine, which is the whole fleet.

        Only the context's length matters to it. Where the configuration does not say it, the first
        replica that joins does; an engine start can take minutes.
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
        """Tokens of the context, as the first replica says that joins.

        Where the fleet may be at zero none would ever join, for nobody is let in before: there,
        what replicas said the last time counts.
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
        """Log what became of pairs of replicas."""
        for notice in self._coordinator.pop_notices():
            fields = {"source": notice.source_id, "target": notice.target_id, "why": notice.why}
            level = logging.WARNING if notice.kind in _WARNING_NOTICES else logging.INFO
            log_event(_LOGGER, level, str(notice.kind).replace(" ", "_"), fields)


def _permanent_pools(config: DeploymentConfig) -> list[str]:
    """Pools that have a replica at any time."""
    return [name for name, pool in config.pools.items() if pool.replicas.min > 0]
