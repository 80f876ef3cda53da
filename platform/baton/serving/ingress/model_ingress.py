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
    service_rules,
    wakes,
)
from baton.config.derive.policies import build_placer, router_rng
from baton.config.schema.deployment import DeploymentConfig, FrontendKind, FrontKind
from baton.control.coordinator import Coordinator
from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.control.probing.notices import PairNoticeKind
from baton.control.queue.recent_estimates import Shedding
from baton.domain.commands import Delivery, RecordOrder
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.domain.errors import BatonError, Broken, LinkFailed, Rejected
from baton.domain.events import (
    ColdStartReported,
    Event,
    QuotasShared,
    ReplicaJoined,
    TimePassed,
)
from baton.domain.fleet import ReplicaFacts
from baton.engine.vllm.frontend.app import VllmFrontend, import_python_frontend
from baton.engine.vllm.frontend.rust_frontend import RustFrontend, import_rust_frontend
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.gate import AsgiApp
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.process.gc_tuning import set_heap_aside
from baton.serving.controller.quota_allocator import OwnShares, Shares
from baton.serving.ingress.auth import FrontDoor, brought, frontend_limits
from baton.serving.ingress.fleet_readiness import FirstView
from baton.serving.ingress.fleet_watch import FleetWatch
from baton.serving.ingress.rust_ingress import RustIngress, open_routes
from baton.serving.ingress.telemetry import IngressTelemetry
from baton.serving.ingress.tracing import ingress_tracer
from baton.serving.ray.asgi_port import nothing_here
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
from baton.telemetry.requests.request_log import RecordBook, Story, story

_LOGGER = logging.getLogger(__name__)
_BAD_NOTICES = frozenset(
    {
        *(PairNoticeKind.QUARANTINED, PairNoticeKind.SOURCE_UNREACHABLE),
        PairNoticeKind.AGENT_BROKEN,
    }
)
_FIRST_REPLICA_S = 1800.0


class IngressBody:
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
        self._records = RecordBook()
        self._frontend: VllmFrontend | RustFrontend | None = None
        self.rust: RustIngress | None = None
        """What serves its clients in Rust mode, once it has started."""
        self._door = FrontDoor(config)
        self._shares = OwnShares(coordinator_id)
        self._first_facts: asyncio.Future[ReplicaFacts] = asyncio.get_running_loop().create_future()
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
            unjoined=lambda: len(self._unjoined),
        )
        tracer = ingress_tracer(config, instance_id=coordinator_id, clock=self._clock)
        self._tracers = () if tracer is None else (tracer,)
        self._driver = Driver(
            self._coordinator,
            link=self._link,
            frontend=self,
            recorder=Recorders(self._records, *self.telemetry.recorders, *self._tracers),
            clock=self._clock,
        )
        self._first_view = FirstView(_always_there(config))
        self._watch = FleetWatch(self._link, self._driver.on_event)
        self._membership = Membership(
            app=app, deployments=tuple(config.pools), on_change=self._watch.on_members
        )

    async def start(self, host: str) -> AsgiApp:
        """Follow the fleet and bring the API up; metrics are served at this address.

        Raises:
            EngineStartFailed: the frontend cannot be started.
        """
        await self.telemetry.start(host)
        for tracer in self._tracers:
            tracer.start()
        is_rust = self._config.server.frontend is FrontendKind.RUST
        # First, for it keeps the loop waiting: replicas would miss its beats, leave and come back.
        await asyncio.to_thread(import_rust_frontend if is_rust else import_python_frontend)
        await self._membership.start()
        await self._door.start()
        settings = await asyncio.to_thread(self._frontend_settings)
        facts, hooks = await self._fleet_facts(), self._hooks()
        if is_rust:
            settings = replace(settings, routes=open_routes(self._config))
            self._frontend = RustFrontend(settings, facts, hooks=hooks, clock=self._clock)
            self.rust = self._rust_ingress(self._frontend)
            await self.rust.start()
            set_heap_aside()
            return nothing_here
        self._frontend = VllmFrontend(settings, facts, hooks=hooks, clock=self._clock)
        app = await self._frontend.start()
        set_heap_aside()
        return app

    async def close(self) -> None:
        """Stop taking requests and free everything. Idempotent."""
        await self._membership.stop()
        await self._door.close()
        if self.rust is not None:
            await self.rust.close()
        if self._frontend is not None:
            await self._frontend.close()
        self._driver.close()
        await self._link.close()
        await self.telemetry.close()
        for tracer in self._tracers:
            await asyncio.to_thread(tracer.close)

    def switch_to(self, config: DeploymentConfig) -> Switch:
        """The way to another configuration; whatever can fail has not.

        Requests under way keep what they were promised. Blocks on key files.

        Raises:
            ConfigInvalid: a policy of the user's own, or key files, cannot be used.
        """
        self._door.check(config)
        placer = self._placer
        if (config.router, config.slo) != (self._config.router, self._config.slo):
            placer = build_placer(config, router_rng(config, self._coordinator_id))
        limits, rules = coordinator_limits(config), service_rules(config)

        async def switch() -> None:
            await self._door.reconfigure(config)
            self._config, self._placer = config, placer
            self._first_view.reconfigure(_always_there(config))
            self._coordinator.reconfigure(limits=limits, placer=placer, rules=rules)
            self.telemetry.go_by(rules, limits)
            if self._frontend is not None:
                access = self._door.access(config)
                self._frontend.reconfigure(limits=frontend_limits(config), access=access)
            self._driver.on_event(TimePassed())  # who waits may have a place now

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
        if self._frontend is not None and self._frontend.broken:
            raise Broken("ingress", "its frontend cannot reach its coordinator any more")
        if self.rust is not None and self.rust.broken:
            raise Broken("ingress", "the gate before its frontend has died")

    def status(self) -> dict[str, object]:
        """The fleet as this ingress sees it, and what it has done."""
        phases: dict[str, int] = {}
        for phase in self._driver.phases().values():
            phases[str(phase)] = phases.get(str(phase), 0) + 1
        return {
            "healthy": self.healthy(),
            "replicas": self._fleet_report(),
            "timings": timing_report(self._coordinator.knowledge.timings.quality()),
            "unjoined": {
                replica_id: self._link.refusals.get(replica_id, "connecting")
                for replica_id in sorted(self._unjoined)
            },
            "broken_agents": dict(self._coordinator.broken_agents()),
            "in_flight": phases,
            "ended": self._records.totals(),
            "traces": [tracer.counts.told() for tracer in self._tracers],
            "policy": policy_report(self._config.router.policy, self._placer),
        }

    def explain(self, request_id: str) -> list[Story]:
        """The stories of a request, oldest first; empty when it is unknown or long gone."""
        return [story(record) for record in self._records.find(request_id)]

    def requests(self, count: int, order: RecordOrder) -> list[Story]:
        """Stories of requests that have ended lately, and how long ago they did."""
        now_s = self._clock.now_s()
        return [
            story(record) | {"age_s": round(now_s - record.ended_at_s, 3)}
            for record in self._records.pick(count, order)
        ]

    def links(self) -> list[Row]:
        """What this ingress knows of every pair of replicas, one row a pair."""
        return link_report(self._coordinator.knowledge.links.rows(self._clock.now_s()))

    def report(self) -> CoordinatorReport:
        """What the controller scales by, and deals quotas out by."""
        return self._coordinator.report(self._coordinator_id, self._clock.now_s())

    def take_adapters(self, adapters: Sequence[RuntimeAdapter]) -> None:
        """Offer these adapters of its model besides those of the file, and no others."""
        if isinstance(self._frontend, VllmFrontend):
            self._frontend.set_adapters(adapters)

    def adapters_in_flight(self) -> Mapping[str, int]:
        """How many requests under way need each adapter, as the fleet calls them."""
        return self._coordinator.adapters_in_flight()

    def take_quotas(self, shares: Shares, *, at_most: bool) -> str | None:
        """Go by this ingress' shares of tenants' limits; its id, or None when it has none."""
        own = self._shares.take(shares, at_most=at_most)
        if own is None:
            return None
        self._driver.on_event(QuotasShared(shares=own))
        return self._coordinator_id

    def take_start(self, start: ColdStart) -> None:
        """Know how long the next replica takes, while there is none."""
        self._driver.on_event(ColdStartReported(start=start))

    @property
    def _unjoined(self) -> AbstractSet[str]:
        return self._link.replica_ids - self._link.joined_ids

    def _fleet_report(self) -> list[Row]:
        caches = self._coordinator.knowledge.caches(self._clock.now_s())
        leases = self._coordinator.leases()
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
            admit=self._refuse,
            healthy=self._can_serve,
        )

    def _rust_ingress(self, frontend: RustFrontend) -> RustIngress:
        def refusal(tenant: str) -> Rejected | None:
            return self._coordinator.refusal(tenant=tenant, now_s=self._clock.now_s())

        def shedding() -> list[Shedding]:
            return self._coordinator.shedding(self._clock.now_s())

        return RustIngress(
            frontend,
            self._door,
            config=lambda: self._config,
            refusal=refusal,
            shedding=shedding,
            deployment=self._deployment(),
        )

    def _deployment(self) -> str | None:
        """Whose gates share the public port; None where Ray Serve's HAProxy listens there."""
        if self._config.server.front is not FrontKind.GATE:
            return None
        from baton.serving.ray.context import session_name

        return f"{session_name()}/{self._app}"

    def _refuse(self, requests: int, caller: Caller) -> Rejected | None:
        return self._driver.refuse(requests, tenant=caller.tenant, slo_class=caller.slo_class)

    def _frontend_settings(self) -> FrontendSettings:
        name = self._config.model_name
        model = self._config.models[name]
        return FrontendSettings(
            model=model_path(model),
            served_name=name,
            extra=api_arguments(model),
            routes=tuple(str(route) for route in self._config.server.routes),
            allow=brought(self._config),
            adapters=adapter_sources(model),
            runtime_adapters=model.runtime_adapters.max > 0,
            limits=frontend_limits(self._config),
            access=self._door.access(self._config),
        )

    async def _fleet_facts(self) -> FleetFacts:
        """What the frontend is told of its engine, which is the whole fleet.

        Only the context's length matters to it. Where the configuration does not say it, the first
        replica that joins does; an engine start can take minutes.
        """
        model = self._config.models[self._config.model_name]
        max_len_tokens = model.max_len_tokens
        if max_len_tokens is None:
            max_len_tokens = await self._context_of_replicas()
        return FleetFacts(
            max_len_tokens=max_len_tokens,
            block_size_tokens=16,
            kv_blocks=max_len_tokens // 16,
            max_running_requests=1024,
            max_batched_tokens=8192,
            adapters=len(model.adapters) + model.runtime_adapters.max,
        )

    async def _context_of_replicas(self) -> int:
        """Tokens of the context, as the first replica says that joins.

        Where the fleet may be at zero none would ever join, for nobody is let in before: there,
        what replicas said the last time counts.
        """
        name = f"context/{self._app}/{self._config.model_name}"
        known = await asyncio.to_thread(live_config.load, name) if wakes(self._config) else None
        if known is not None and not self._first_facts.done():
            return int(known)
        async with asyncio.timeout(_FIRST_REPLICA_S):
            found = (await self._first_facts).max_len_tokens
        if wakes(self._config):
            await asyncio.to_thread(live_config.save, name, str(found).encode())
        return found

    def _can_serve(self) -> bool:
        views = self._driver.fleet().replicas.values()
        pools = [view.facts.pool for view in views if not view.draining]
        knows_all = self._first_view.is_complete(pools, self._clock.now_s())
        return knows_all and self._coordinator.can_serve()

    def _on_link_event(self, event: Event) -> None:
        self.telemetry.on_event(event)
        self._watch.on_link_event(event)
        self._say_notices()
        if isinstance(event, ReplicaJoined) and not self._first_facts.done():
            self._first_facts.set_result(event.facts)

    def _say_notices(self) -> None:
        """Log what became of pairs of replicas."""
        for notice in self._coordinator.take_notices():
            fields = {"source": notice.source_id, "target": notice.target_id, "why": notice.why}
            level = logging.WARNING if notice.kind in _BAD_NOTICES else logging.INFO
            log_event(_LOGGER, level, str(notice.kind).replace(" ", "_"), fields)


def _always_there(config: DeploymentConfig) -> list[str]:
    """Pools that have a replica at any time."""
    return [name for name, pool in config.pools.items() if pool.replicas.min > 0]
