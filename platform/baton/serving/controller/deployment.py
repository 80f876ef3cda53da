"""The controller: a small actor that scales pools and divides quotas; no request waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial

from prometheus_client.metrics_core import Metric as Family

import baton
from baton.config.derive.options import (
    devices_per_replica,
    ingress_bounds,
    price_per_hour,
    scales_from_zero,
    slo_classes,
    split_by_model,
    tenants,
)
from baton.config.schema.deployment import DeploymentConfig
from baton.console.feed import ChatTarget, ChatUnavailable
from baton.console.history import History
from baton.control.accounting.usage import usage_rows
from baton.control.autoscaling.observer import Observer
from baton.control.fleet.adapter_registry import AdapterRejection, LoadRequest
from baton.domain.errors import ComponentUnhealthy, OperatorError
from baton.runtime.ports import Clock
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.process.gc_tuning import freeze_startup_heap, trim_memory
from baton.serving.controller.adapter_manager import AdapterManager
from baton.serving.controller.cold_start_notices import ColdStartNotifier
from baton.serving.controller.http_server import (
    ControllerHttp,
    LiveFeed,
    TargetGroup,
    call_ingresses,
    chat_target,
    target_groups,
)
from baton.serving.controller.ingress_scaler import IngressScaler
from baton.serving.controller.quota_allocator import QuotaAllocator
from baton.serving.controller.serve_fleet import ClusterControllerStore, ServeFleet
from baton.serving.controller.usage_store import UsageStore
from baton.serving.http.metrics_endpoint import MetricsRenderer
from baton.serving.ray.grpc_port import bind_grpc_to_node
from baton.serving.ray.membership import (
    Member,
    Membership,
    ReplicaLoss,
    dead_actors,
    local_last_words,
    replica_losses,
)
from baton.serving.ray.packing import pack
from baton.serving.ray.serve_control import call_all
from baton.serving.scaling.loop import ScalingLoop
from baton.serving.scaling.plan import observer_options, scaling_plan
from baton.serving.scaling.ports import TickInputs
from baton.serving.scaling.reports import (
    RecentClassStats,
    class_rows,
    demand_row,
    override_rows,
    pool_rows,
    recent_class_stats,
    remaining_s,
    tick_rows,
)
from baton.serving.shared.names import INGRESS
from baton.serving.store import config_store as live_config
from baton.serving.store.config_participant import ConfigParticipant, Switch
from baton.serving.store.config_store import Generations, LiveConfig, unix_time_s
from baton.serving.versions import code_version
from baton.telemetry.logs import configure_logs, log_event
from baton.telemetry.metrics.controller import (
    ClassStatus,
    ControllerState,
    PoolSize,
    controller_families,
)
from baton.telemetry.metrics.usage_meter import UsageMeter

_LOGGER = logging.getLogger(__name__)
_MEMBER_FIELDS = ("replica_id", "pool", "role", "link", "pid")
_FIRST_VIEW_TIMEOUT_S = 10.0
_HEAP_TRIM_INTERVAL_S = 60.0
Json = dict[str, object]
_LOSSES_TIMEOUT_S = 2.0
_LOSSES_AGE_S = 5.0
_MIN_CLOCK_STEP_S = 10.0
"""Serve's health checks are seconds apart, so smaller steps do no harm."""


class ControllerService:
    """Every component of the controller, which can recover all its state.

    The configuration comes with the deployment, members from Serve, overrides and usage from the
    cluster's store. While it is down, pools and quotas stay as they are.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        app: str,
        name: str,
        find_losses: Callable[[], tuple[ReplicaLoss, ...]] | None = None,
    ) -> None:
        self._config = config
        self._clock = MonotonicClock()
        self._losses = RecentLosses(
            find_losses or partial(_find_losses, app, (*config.pools, INGRESS)),
            clock=self._clock,
            wall_now_s=unix_time_s,
        )
        self._started_at_s = time.monotonic()
        self._code_version = code_version()
        self._members_known = asyncio.Event()
        self._membership = Membership(
            app=app,
            deployments=(*config.pools, INGRESS),
            on_change=lambda _members: self._members_known.set(),
        )
        fleet = ServeFleet(app, tuple(config.pools))
        self._slos = slo_classes(config).classes
        plan = scaling_plan(config)
        self._observer = Observer(observer_options(plan), slos=self._slos)
        self._quotas = QuotaAllocator(tenants(config).values(), fleet.send_quota_shares)
        report_ages = ReportAges(self._clock)
        self.adapters = AdapterManager(
            lambda: self._config, partial(call_all, app), clock=self._clock
        )
        self._usage = UsageStore(self._observer.cluster_totals, live_config, clock=self._clock)
        self.points = History()
        self._loop = ScalingLoop(
            plan,
            fleet=fleet,
            observer=self._observer,
            store=ClusterControllerStore(live_config, owner=name, clock=self._clock),
            clock=self._clock,
            listeners=(
                self._quotas,
                report_ages,
                self._usage,
                self.adapters,
                ColdStartNotifier(
                    fleet.send_cold_starts,
                    observation=lambda: self._loop.last_observation,
                    plan=lambda: self._loop.plan,
                    overrides=lambda: self._loop.overrides(),  # noqa: PLW0108 - it is made here
                ),
                IngressScaler(
                    ingress_bounds(config),
                    usage=fleet.ingress_usage,
                    target=fleet.ingress_target,
                    scale=fleet.scale_ingresses,
                    clock=self._clock,
                ),
                ClockStepGuard(self._clock, unix_time_s, fleet.restart_serve_controller),
                HeapTrimmer(self._clock),
                PointRecorder(self.points, self._service_levels, clock=self._clock),
            ),
        )
        self.metrics = ControllerMetrics(
            config,
            loop=self._loop,
            observer=self._observer,
            report_ages=report_ages,
            clock=self._clock,
        )

    async def start(self) -> None:
        """Start to follow members, adapters and ticks."""
        await self._membership.start()
        await self.adapters.follower.start()
        self._loop.start()
        freeze_startup_heap()

    async def close(self) -> None:
        """Stop all of them, and save usage for the next controller. Idempotent."""
        await self._loop.stop()
        await self.adapters.follower.close()
        await self._membership.stop()
        try:
            await self._usage.save()
        except Exception as error:  # noqa: BLE001 - a boundary: whatever Ray raises, it ends
            fields = {"reason": f"{type(error).__name__}: {error}"}
            log_event(_LOGGER, logging.WARNING, "usage_not_noted", fields)

    def check(self) -> None:
        """Raises `ComponentUnhealthy` if the scaling loop has ended."""
        if self._loop.has_ended:
            raise ComponentUnhealthy("controller", "its scaling loop has ended")

    def prepare_switch(self, config: DeploymentConfig) -> Switch:
        """Prepare another configuration; the returned function cannot fail.

        Raises:
            ConfigInvalid: a custom scaling policy cannot be used.
        """
        plan, slos = scaling_plan(config), slo_classes(config).classes
        tenant_limits = tenants(config).values()
        plan.policy()

        async def switch() -> None:
            self._config, self._slos = config, slos
            self.metrics.reconfigure(config)
            self._observer.reconfigure(options=observer_options(plan), slos=slos)
            self._quotas.reconfigure(tenant_limits)
            self._loop.reconfigure(plan)
            self.adapters.follower.reapply()

        return switch

    async def status(self) -> Json:
        """Configured and running replicas, results of classes, and the autoscaler's state."""
        async with asyncio.timeout(_FIRST_VIEW_TIMEOUT_S):
            await self._members_known.wait()
        return {
            "baton": self._code_version,
            "model": self._config.model_name,
            "up_s": round(time.monotonic() - self._started_at_s, 1),
            "wanted": {
                name: {"role": str(pool.role), "replicas": pool.replicas.initial}
                for name, pool in self._config.pools.items()
            },
            "members": [_member_row(member) for member in self._replicas()],
            "ingress_members": [
                _ingress_row(member)
                for member in sorted(self._membership.members, key=lambda item: item.replica_id)
                if member.deployment == INGRESS
            ],
            **self._service_levels(),
            "autoscaler": self._autoscaler_status(),
            "adapters": self.adapters.rows(),
            "process_losses": await self._losses.rows(),
        }

    async def scale(self, pool: str, replicas: int | None, for_s: float | None) -> Json:
        """Override a pool's replicas; None releases it to the autoscaler.

        Returns the new state. A rejection is in the result as `rejected` and `remedy`, because Ray
        would wrap our errors in its own.
        """
        old_state = self._loop.states.get(pool)
        try:
            if replicas is None:
                await self._loop.release(pool)
            else:
                await self._loop.override(pool, replicas, for_s=for_s)
        except OperatorError as error:
            return {"rejected": error.reason, "remedy": error.remedy}
        except TimeoutError:
            remedy = "look at 'baton status'; what was asked for is done as soon as it can be"
            return {
                "rejected": "the controller is busy or cannot reach Ray Serve",
                "remedy": remedy,
            }
        fields = {"pool": pool, "replicas": replicas, "for_s": for_s}
        event = "override_released" if replicas is None else "override_set"
        log_event(_LOGGER, logging.INFO, event, fields)
        new_state = self._loop.states.get(pool)
        if new_state is None:
            reason = f"Ray Serve has not reported yet how many replicas pool {pool!r} has"
            return {"rejected": reason, "remedy": "what was asked for holds; see 'baton status'"}
        override = self._loop.overrides().get(pool)
        now_s = self._clock.now_s()
        return {
            "pool": pool,
            "had": new_state.target if old_state is None else old_state.target,
            "target": new_state.target,
            "ready": new_state.running,
            "override": None
            if override is None
            else {"replicas": override.replicas, "remaining_s": remaining_s(override, now_s)},
            "autoscaler": self._loop.plan.description,
        }

    def explain_scale(self, ticks: int) -> Json:
        """The last ticks, oldest first."""
        rows = tick_rows(self._loop.history()[-ticks:], self._clock.now_s())
        return {"autoscaler": self._loop.plan.description, "ticks": rows}

    def usage(self) -> Json:
        """Usage of each tenant, and other costs, since the deployment began."""
        totals, device_prices = self._usage.usage(), _prices(self._config)
        rows = usage_rows(totals.tallies, totals.spent, totals.pools, device_prices)
        return {
            "since_s": round(totals.duration_s, 1),
            "unpriced_pools": sorted(self._config.pools.keys() - device_prices.keys()),
            "tenants": [asdict(row) for row in rows],
        }

    def targets(self, address: str | None, node: str) -> list[TargetGroup]:
        """Every process with metrics; the controller's own are at `address`."""
        return target_groups(self._membership.members, controller=address, node=node)

    def _service_levels(self) -> Json:
        """Pools, classes and demand, as the last tick observed them."""
        observation, ticks = self._loop.last_observation, self._loop.history()
        return {
            "pools": pool_rows(observation, self._loop.states, ticks[-1] if ticks else None),
            "classes": class_rows(self._slos, self._observer, self._clock.now_s()),
            "demand": demand_row(observation),
        }

    def chat_target(self) -> ChatTarget | ChatUnavailable:
        """See `http_server.chat_target`."""
        members = self._membership.members
        nodes = [member.node_ip for member in members if member.deployment == INGRESS]
        return chat_target(self._config, nodes)

    def _replicas(self) -> list[Member]:
        pools = self._config.pools
        members = (member for member in self._membership.members if member.deployment in pools)
        return sorted(members, key=lambda member: (member.deployment, member.replica_id))

    def _autoscaler_status(self) -> Json:
        counters, ticks = self._loop.counters, self._loop.history()
        last_acting_tick = next((tick for tick in reversed(ticks) if tick.actions), None)
        now_s = self._clock.now_s()
        return {
            "policy": self._loop.plan.description,
            "paused_reason": ticks[-1].paused_reason if ticks else "no tick yet",
            "last_action": None
            if last_acting_tick is None
            else tick_rows([last_acting_tick], now_s)[0],
            "overrides": override_rows(self._loop.overrides(), now_s),
            "turns": counters.ticks,
            "failed_turns": counters.failed_ticks,
            "failed_calls": counters.failed_calls,
            "last_failure": counters.last_failure,
            "cold_start_wait_s": self._cold_start_wait_s(),
        }

    def _cold_start_wait_s(self) -> float | None:
        """How long requests wait for a first replica; None if no model scales to zero."""
        scales_to_zero = any(
            scales_from_zero(part) for part in split_by_model(self._config).values()
        )
        return self._config.admission.cold_start_timeout_s if scales_to_zero else None


def _find_losses(app: str, pools: tuple[str, ...]) -> tuple[ReplicaLoss, ...]:
    """The losses of the connected cluster; blocks for milliseconds."""
    from baton.serving.ray.context import logs_folder, node_address

    last_words = local_last_words(logs_folder(), node_address())
    return replica_losses(dead_actors(), app=app, pools=pools, last_words=last_words)


class RecentLosses:
    """Replicas whose processes ended by themselves; Ray is asked every few seconds at most."""

    def __init__(
        self,
        find: Callable[[], tuple[ReplicaLoss, ...]],
        *,
        clock: Clock,
        wall_now_s: Callable[[], float],
        timeout_s: float = _LOSSES_TIMEOUT_S,
    ) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_now_s = wall_now_s
        self._found: tuple[ReplicaLoss, ...] = ()
        self._pending: asyncio.Future[tuple[ReplicaLoss, ...]] | None = None
        self._due_at_s = float("-inf")

    async def rows(self) -> list[Json]:
        """The newest losses, newest first; those of the last answer while Ray does not answer."""
        now_s = self._clock.now_s()
        if self._pending is None and now_s >= self._due_at_s:
            self._due_at_s = now_s + _LOSSES_AGE_S
            self._pending = asyncio.ensure_future(asyncio.to_thread(self._find))
        if self._pending is not None:
            await asyncio.wait([self._pending], timeout=self._timeout_s)
            self._accept(self._pending)
        return [
            {
                "replica_id": loss.replica_id,
                "pool": loss.pool,
                "node": loss.node,
                "pid": loss.pid,
                "age_s": round(max(0.0, self._wall_now_s() - loss.ended_at_s), 1),
                "detail": loss.how,
            }
            for loss in self._found
        ]

    def _accept(self, pending: asyncio.Future[tuple[ReplicaLoss, ...]]) -> None:
        if not pending.done() or pending is not self._pending:
            return  # one question at a time: while Ray's store is away, each holds a thread
        self._pending = None
        if (error := pending.exception()) is None:
            self._found = pending.result()
        else:
            fields = {"reason": f"{type(error).__name__}: {error}"}
            log_event(_LOGGER, logging.WARNING, "losses_unknown", fields)


class HeapTrimmer:
    """Returns free heap memory to the system at intervals. A `TickListener`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_at_s = clock.now_s() + _HEAP_TRIM_INTERVAL_S

    async def on_tick(self, _inputs: TickInputs) -> None:
        """Trim the heap if it is due."""
        now_s = self._clock.now_s()
        if now_s >= self._due_at_s:
            self._due_at_s = now_s + _HEAP_TRIM_INTERVAL_S
            trim_memory()


class PointRecorder:
    """Adds a point to the charts of the console. A `TickListener`."""

    def __init__(self, points: History, report: Callable[[], Json], *, clock: Clock) -> None:
        self._points = points
        self._report = report
        self._clock = clock

    async def on_tick(self, _inputs: TickInputs) -> None:
        """Add the point of this tick."""
        self._points.add(self._report(), self._clock.now_s())


class Controller:
    """The class of the controller deployment; `application.app` decorates it."""

    async def __init__(self, config: DeploymentConfig) -> None:  # type: ignore[misc]
        from baton.serving.ray.context import app_name, node_address, replica_name

        bind_grpc_to_node(node_address())
        logs = config.observability.logs
        configure_logs(logs.format, logs.level)
        generations = Generations()
        live = await asyncio.to_thread(generations.newest, config)
        self._service = ControllerService(live.config, app=app_name(), name=replica_name())
        self._config_participant = ConfigParticipant(live, self._service.prepare_switch)
        self._http = controller_http(
            self._service, self._config_participant, app=app_name(), node=node_address()
        )
        await self._service.start()
        self._config_participant.follow(generations)
        await self._http.start()
        log_event(_LOGGER, logging.INFO, "controller_started", {"controller": replica_name()})

    async def status(self) -> bytes:
        """See `ControllerService.status`, with the configuration's generation; packed."""
        status = await full_status(self._service, self._config_participant)
        return pack({**status, "observability": self._http.status()})

    async def scale(self, pool: str, replicas: int | None, for_s: float | None = None) -> Json:
        """See `ControllerService.scale`."""
        return await self._service.scale(pool, replicas, for_s)

    async def load_adapter(self, fields: Mapping[str, object]) -> Json | None:
        """See `AdapterManager.load`; a rejection has its HTTP status."""
        request = LoadRequest(**fields)  # type: ignore[arg-type]
        return _refusal_json(await self._service.adapters.load(request))

    async def unload_adapter(self, name: str, tenant: str) -> Json | None:
        """See `AdapterManager.unload`; a rejection has its HTTP status."""
        return _refusal_json(await self._service.adapters.unload(name, tenant))

    async def usage(self) -> bytes:
        """See `ControllerService.usage`; packed."""
        return pack(self._service.usage())

    async def explain_scale(self, ticks: int) -> bytes:
        """See `ControllerService.explain_scale`; packed."""
        return pack(self._service.explain_scale(ticks))

    def check_health(self) -> None:
        """See `ControllerService.check`; Serve replaces a controller for which it raises."""
        self._service.check()

    async def config(self) -> LiveConfig:
        """The configuration in force."""
        return self._config_participant.live

    async def prepare_config(self, base_generation: int, config: DeploymentConfig) -> str:
        """See `ConfigParticipant.prepare`."""
        return await self._config_participant.prepare(base_generation, config)

    async def commit_config(self, live: LiveConfig) -> int:
        """See `ConfigParticipant.commit`."""
        return await self._config_participant.commit(live)

    async def __del__(self) -> None:
        await self._http.close()
        await self._config_participant.close()
        await self._service.close()


async def full_status(service: ControllerService, participant: ConfigParticipant) -> Json:
    """See `ControllerService.status`, with the configuration's generation."""
    return {**await service.status(), "generation": participant.live.generation}


def controller_http(
    service: ControllerService, participant: ConfigParticipant, *, app: str, node: str
) -> ControllerHttp:
    """The controller's HTTP server."""

    def collect() -> Iterable[Family]:
        generation, refused = participant.live.generation, participant.rejected
        return service.metrics.families(generation=generation, refused_configs=refused)

    return ControllerHttp(
        participant.live.config.observability,
        node=node,
        metrics=MetricsRenderer(collect),
        targets=lambda address: service.targets(address, node),
        feed=LiveFeed(
            status=lambda: full_status(service, participant),
            ticks=service.explain_scale,
            config=lambda: participant.live.config,
            call=call_ingresses(app),
            points=service.points,
            chat_target=service.chat_target,
        ),
    )


def _refusal_json(refusal: AdapterRejection | None) -> Json | None:
    return None if refusal is None else asdict(refusal)


def _ingress_row(member: Member) -> Json:
    pid = member.metadata.get("pid")
    return {"ingress": member.replica_id, "node": member.node_ip, "pid": pid}


def _member_row(member: Member) -> Json:
    row = {name: member.metadata[name] for name in _MEMBER_FIELDS if name in member.metadata}
    return {"node": member.node_ip} | row


class ClockStepGuard:
    """See the module. A `TickListener`.

    Theory of operation. Ray Serve (2.60) times its health checks by the wall clock. After a step
    back by an hour it checks no replica for an hour and replaces none that dies. A restarted Serve
    controller has no last check; the restart costs no request. Each tick compares the wall clock
    with the monotonic clock. A slewed clock needs no action; a step forward delays each health
    check once.

    The guard cannot see the clock of another node that runs Serve's controller.
    """

    def __init__(
        self,
        clock: Clock,
        wall_now_s: Callable[[], float],
        restart_serve_controller: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock = clock
        self._wall_now_s = wall_now_s
        self._restart_serve_controller = restart_serve_controller
        self._offset_s = self._offset()

    async def on_tick(self, _inputs: TickInputs) -> None:
        """Restart Serve's controller if the clock was set back since the last tick."""
        offset_s = self._offset()
        step_back_s = self._offset_s - offset_s
        if step_back_s > _MIN_CLOCK_STEP_S:
            fields = {
                "back_s": round(step_back_s, 1),
                "then": "Ray Serve's controller starts again",
            }
            log_event(_LOGGER, logging.WARNING, "clock_set_back", fields)
            await self._restart_serve_controller()
        self._offset_s = offset_s  # only now: the next tick retries after a failure

    def _offset(self) -> float:
        return self._wall_now_s() - self._clock.now_s()


class ReportAges:
    """Records when ingresses last reported. A `TickListener`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all_reported_at_s = clock.now_s()
        self.unresponsive = 0

    @property
    def age_s(self) -> float:
        """Since every ingress reported, or since the start."""
        return self._clock.now_s() - self._all_reported_at_s

    async def on_tick(self, inputs: TickInputs) -> None:
        """Record the reports of a tick."""
        self.unresponsive = inputs.unresponsive_ingresses
        if inputs.reports and not inputs.unresponsive_ingresses:
            self._all_reported_at_s = self._clock.now_s()


class ControllerMetrics:
    """The metrics of one controller."""

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        loop: ScalingLoop,
        observer: Observer,
        report_ages: ReportAges,
        clock: Clock,
    ) -> None:
        self._config = config
        self._loop = loop
        self._observer = observer
        self._report_ages = report_ages
        self._clock = clock
        self._usage = UsageMeter()

    def reconfigure(self, config: DeploymentConfig) -> None:
        """Use other prices, bounds and classes."""
        self._ingest_usage()  # usage until now has the old price
        self._config = config

    def state(self, *, generation: int = 0, refused_configs: int = 0) -> ControllerState:
        """The current values."""
        ticks = self._loop.history()
        return ControllerState(
            version=baton.__version__,
            model=self._config.model_name,
            generation=generation,
            rejected_configs=refused_configs,
            pools=tuple(self._pools()),
            observation=self._loop.last_observation,
            tick=ticks[-1] if ticks else None,
            counters=self._loop.counters,
            overridden_pools=len(self._loop.overrides()),
            report_age_s=self._report_ages.age_s,
            unresponsive_ingresses=self._report_ages.unresponsive,
            classes=tuple(self._classes()),
        )

    def families(self, *, generation: int, refused_configs: int) -> Iterable[Family]:
        """Every metric, with its current value."""
        self._ingest_usage()
        state = self.state(generation=generation, refused_configs=refused_configs)
        return controller_families(state, self._usage)

    def _pools(self) -> Iterable[PoolSize]:
        states = self._loop.states
        for name, pool in self._config.pools.items():
            state, price = states.get(name), price_per_hour(pool)
            yield PoolSize(
                name=name,
                min=pool.replicas.min,
                max=pool.replicas.max,
                desired=None if state is None else state.target,
                running=None if state is None else state.running,
                starting=None if state is None else state.starting,
                stopping=None if state is None else state.stopping,
                price_per_hour=None if price is None else price * devices_per_replica(pool),
            )

    def _classes(self) -> Iterable[ClassStatus]:
        recent, now_s = recent_class_stats(self._observer), self._clock.now_s()
        for name, slo in sorted(slo_classes(self._config).classes.items()):
            current = recent.get(name, RecentClassStats())
            yield ClassStatus(
                slo=slo,
                recent=current.counts,
                over_window=self._observer.cluster_totals.counts_in_window(slo, now_s),
            )

    def _ingest_usage(self) -> None:
        totals = self._observer.cluster_totals
        self._usage.ingest(totals.gpu_usage(), totals.pools(), _prices(self._config))


def _prices(config: DeploymentConfig) -> Mapping[str, float]:
    """Per device and hour, by pool; without unpriced pools."""
    by_pool = {name: price_per_hour(pool) for name, pool in config.pools.items()}
    return {name: price for name, price in by_pool.items() if price is not None}
