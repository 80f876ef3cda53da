"""The controller: a small actor that scales pools and deals out quotas; no request waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial

from prometheus_client.metrics_core import Metric as Family

from baton.config.derive.options import ingress_bounds, slo_book, tenants, wakes
from baton.config.derive.per_model import each_model
from baton.config.schema.deployment import DeploymentConfig
from baton.control.accounting.usage import usage_rows
from baton.control.autoscaling.observer import Observer
from baton.control.fleet.adapter_registry import AdapterRefusal, LoadOrder
from baton.domain.errors import Broken, OperatorError
from baton.runtime.ports import Clock
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.process.gc_tuning import set_heap_aside, tidy_heap
from baton.serving.code_version import code_name
from baton.serving.controller.adapter_manager import AdapterDesk
from baton.serving.controller.clock_step_guard import ClockWatch
from baton.serving.controller.cold_start_notices import StartDesk
from baton.serving.controller.console_feed import LiveFeed, ask_ingresses
from baton.serving.controller.http_server import Observatory
from baton.serving.controller.ingress_scaler import IngressDesk
from baton.serving.controller.metrics_state import Hearing, Measured, prices
from baton.serving.controller.quota_allocator import QuotaDesk
from baton.serving.controller.scrape_targets import TargetGroup, target_groups
from baton.serving.controller.serve_fleet import ServeFleet, StoredMemory
from baton.serving.controller.usage_store import UsageMemory
from baton.serving.http.metrics_endpoint import Metrics
from baton.serving.ray.grpc_port import keep_port_private
from baton.serving.ray.membership import Member, Membership
from baton.serving.ray.packing import packed
from baton.serving.ray.serve_control import call_all
from baton.serving.scaling.loop import ScalingLoop
from baton.serving.scaling.plan import observer_options, scaling_plan
from baton.serving.scaling.ports import Looks
from baton.serving.scaling.reports import (
    class_rows,
    demand_row,
    override_rows,
    pool_rows,
    remaining_s,
    tick_rows,
)
from baton.serving.shared.names import INGRESS
from baton.serving.store import config_store as live_config
from baton.serving.store.config_participant import ConfigHolder, Switch
from baton.serving.store.config_store import Generations, LiveConfig, wall_s
from baton.telemetry.logs import configure_logs, log_event

_LOGGER = logging.getLogger(__name__)
_MEMBER_FIELDS = ("replica_id", "pool", "role", "link", "pid")
_FIRST_VIEW_S = 10.0
_TIDY_S = 60.0
Told = dict[str, object]


class ControllerBody:
    """Everything the controller owns; `start` sets it going, `close` ends it.

    It holds nothing that cannot be found again: the configuration comes with the deployment, the
    members from Serve, overrides and usage from the cluster's store. When it dies, requests are
    served on, pools stay as they are, quotas as they were dealt out last, and Serve starts another.
    """

    def __init__(self, config: DeploymentConfig, *, app: str, name: str) -> None:
        self._config = config
        self._clock = MonotonicClock()
        self._started_at_s = time.monotonic()
        self._code = code_name()
        self._seen_members = asyncio.Event()
        self._membership = Membership(
            app=app,
            deployments=(*config.pools, INGRESS),
            on_change=lambda _members: self._seen_members.set(),
        )
        fleet = ServeFleet(app, tuple(config.pools))
        self._slos = slo_book(config).classes
        plan = scaling_plan(config)
        self._observer = Observer(observer_options(plan), slos=self._slos)
        self._desk = QuotaDesk(tenants(config).values(), fleet.share_quotas)
        hearing = Hearing(self._clock)
        self.adapters = AdapterDesk(lambda: self._config, partial(call_all, app), clock=self._clock)
        self._usage = UsageMemory(self._observer.ledgers, live_config, clock=self._clock)
        self._loop = ScalingLoop(
            plan,
            fleet=fleet,
            observer=self._observer,
            memory=StoredMemory(live_config, owner=name, clock=self._clock),
            clock=self._clock,
            readers=(
                self._desk,
                hearing,
                self._usage,
                self.adapters,
                StartDesk(
                    fleet.tell_starts,
                    seen=lambda: self._loop.last_seen,
                    plan=lambda: self._loop.plan,
                    overrides=lambda: self._loop.overrides(),  # noqa: PLW0108 - it is made here
                ),
                IngressDesk(
                    ingress_bounds(config),
                    used=fleet.ingresses_used,
                    target=fleet.ingresses,
                    scale=fleet.scale_ingresses,
                    clock=self._clock,
                ),
                ClockWatch(self._clock, wall_s, fleet.begin_anew),
                Tidying(self._clock),
            ),
        )
        self.measured = Measured(
            config, loop=self._loop, observer=self._observer, hearing=hearing, clock=self._clock
        )

    async def start(self) -> None:
        """Begin to follow the members, and to take turns."""
        await self._membership.start()
        await self.adapters.holder.start()
        self._loop.start()
        set_heap_aside()

    async def close(self) -> None:
        """Stop both, and note what was used for the next one. Idempotent."""
        await self._loop.stop()
        await self.adapters.holder.close()
        await self._membership.stop()
        try:
            await self._usage.note()
        except Exception as error:  # noqa: BLE001 - a boundary: whatever Ray raises, it ends
            fields = {"why": f"{type(error).__name__}: {error}"}
            log_event(_LOGGER, logging.WARNING, "usage_not_noted", fields)

    def check(self) -> None:
        """Raise when pools are scaled and quotas dealt out no more.

        Raises:
            Broken: what has to go on for ever has ended.
        """
        if self._loop.has_ended:
            raise Broken("controller", "its scaling loop has ended")

    def switch_to(self, config: DeploymentConfig) -> Switch:
        """The way to another configuration; whatever can fail has not.

        Raises:
            ConfigInvalid: a scaling policy of the user's own cannot be used.
        """
        plan, slos, wanted = scaling_plan(config), slo_book(config).classes, tenants(config)
        plan.policy()

        async def switch() -> None:
            self._config, self._slos = config, slos
            self.measured.reconfigure(config)
            self._observer.reconfigure(options=observer_options(plan), slos=slos)
            self._desk.reconfigure(wanted.values())
            self._loop.reconfigure(plan)
            self.adapters.holder.anew()

        return switch

    async def status(self) -> Told:
        """What was asked for, which replicas there are, how classes fare, what scaling does."""
        async with asyncio.timeout(_FIRST_VIEW_S):
            await self._seen_members.wait()
        now_s, seen = self._clock.now_s(), self._loop.last_seen
        return {
            "baton": self._code,
            "model": self._config.model_name,
            "up_s": round(time.monotonic() - self._started_at_s, 1),
            "wanted": {
                name: {"role": str(pool.role), "replicas": pool.replicas.start}
                for name, pool in self._config.pools.items()
            },
            "members": [_row(member) for member in self._replicas()],
            "pools": pool_rows(seen, self._loop.states),
            "classes": class_rows(self._slos, self._observer, now_s),
            "demand": demand_row(seen),
            "autoscaler": self._scaling(),
            "adapters": self.adapters.rows(),
        }

    async def scale(self, pool: str, replicas: int | None, for_s: float | None) -> Told:
        """Set a pool's replicas by hand, or with None leave it to the autoscaler again.

        Returns what happens now; or, under `refused`, why it does not, with the `remedy`: errors of
        our own would reach the caller wrapped in Ray's.
        """
        before = self._loop.states.get(pool)
        try:
            if replicas is None:
                await self._loop.release(pool)
            else:
                await self._loop.override(pool, replicas, for_s=for_s)
        except OperatorError as error:
            return {"refused": error.why, "remedy": error.remedy}
        except TimeoutError:
            remedy = "look at 'baton status'; what was asked for is done as soon as it can be"
            return {"refused": "the controller is busy or cannot reach Ray Serve", "remedy": remedy}
        told = {"pool": pool, "replicas": replicas, "for_s": for_s}
        event = "override_released" if replicas is None else "override_set"
        log_event(_LOGGER, logging.INFO, event, told)
        after = self._loop.states.get(pool)
        if after is None:
            why = f"Ray Serve has not said yet how many replicas pool {pool!r} has"
            return {"refused": why, "remedy": "what was asked for holds; see 'baton status'"}
        override = self._loop.overrides().get(pool)
        now_s = self._clock.now_s()
        return {
            "pool": pool,
            "had": after.target if before is None else before.target,
            "target": after.target,
            "ready": after.running,
            "override": None
            if override is None
            else {"replicas": override.replicas, "remaining_s": remaining_s(override, now_s)},
            "autoscaler": self._loop.plan.text,
        }

    def explain_scale(self, ticks: int) -> Told:
        """The last ticks, oldest first."""
        rows = tick_rows(self._loop.history()[-ticks:], self._clock.now_s())
        return {"autoscaler": self._loop.plan.text, "ticks": rows}

    def usage(self) -> Told:
        """What each tenant has used since the deployment began, and what was paid for besides."""
        used, of_device = self._usage.used(), prices(self._config)
        rows = usage_rows(used.tallies, used.spent, used.pools, of_device)
        return {
            "since_s": round(used.over_s, 1),
            "unpriced_pools": sorted(self._config.pools.keys() - of_device.keys()),
            "tenants": [asdict(row) for row in rows],
        }

    def targets(self, address: str | None, node: str) -> list[TargetGroup]:
        """Every process that has metrics; this one's are at `address`, if anywhere."""
        return target_groups(self._membership.members, controller=address, node=node)

    def _replicas(self) -> list[Member]:
        pools = self._config.pools
        members = (one for one in self._membership.members if one.deployment in pools)
        return sorted(members, key=_order)

    def _scaling(self) -> Told:
        counters, ticks = self._loop.counters, self._loop.history()
        acted = next((tick for tick in reversed(ticks) if tick.actions), None)
        now_s = self._clock.now_s()
        return {
            "policy": self._loop.plan.text,
            "held": ticks[-1].held if ticks else "no tick yet",
            "last_action": None if acted is None else tick_rows([acted], now_s)[0],
            "overrides": override_rows(self._loop.overrides(), now_s),
            "turns": counters.turns,
            "failed_turns": counters.failed_turns,
            "failed_calls": counters.failed_calls,
            "last_failure": counters.last_failure,
            "cold_start_wait_s": self._cold_start_wait_s(),
        }

    def _cold_start_wait_s(self) -> float | None:
        """How long requests wait for a first replica; None where no model goes to zero."""
        zero = any(wakes(part) for part in each_model(self._config).values())
        return self._config.admission.max_cold_start_wait_s if zero else None


class Tidying:
    """Tidies the heap once in a while. A `ReportReader`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_at_s = clock.now_s() + _TIDY_S

    async def take(self, _looks: Looks) -> None:
        """Tidy, if it is time."""
        now_s = self._clock.now_s()
        if now_s >= self._due_at_s:
            self._due_at_s = now_s + _TIDY_S
            tidy_heap()


class Controller:
    """The class behind the controller deployment; `app` decorates it."""

    async def __init__(self, config: DeploymentConfig) -> None:  # type: ignore[misc]
        from baton.serving.ray.context import app_name, node_address, replica_name

        keep_port_private(node_address())
        logs = config.observability.logs
        configure_logs(logs.format, logs.level)
        generations = Generations()
        live = await asyncio.to_thread(generations.newest, config)
        self._body = ControllerBody(live.config, app=app_name(), name=replica_name())
        self._holder = ConfigHolder(live, self._body.switch_to)
        self._seen_at = observatory(self._body, self._holder, app=app_name(), node=node_address())
        await self._body.start()
        self._holder.follow(generations)
        await self._seen_at.start()
        log_event(_LOGGER, logging.INFO, "controller_started", {"controller": replica_name()})

    async def status(self) -> bytes:
        """See `ControllerBody.status`; also which generation of the configuration holds; packed."""
        told = await status_of(self._body, self._holder)
        return packed({**told, "observability": self._seen_at.status()})

    async def scale(self, pool: str, replicas: int | None, for_s: float | None = None) -> Told:
        """See `ControllerBody.scale`."""
        return await self._body.scale(pool, replicas, for_s)

    async def load_adapter(self, order: Mapping[str, object]) -> Told | None:
        """See `AdapterDesk.load`; what is refused comes with its status."""
        asked = LoadOrder(**order)  # type: ignore[arg-type]
        return _refused(await self._body.adapters.load(asked))

    async def unload_adapter(self, name: str, tenant: str) -> Told | None:
        """See `AdapterDesk.unload`; what is refused comes with its status."""
        return _refused(await self._body.adapters.unload(name, tenant))

    async def usage(self) -> bytes:
        """See `ControllerBody.usage`; packed."""
        return packed(self._body.usage())

    async def explain_scale(self, ticks: int) -> bytes:
        """See `ControllerBody.explain_scale`; packed."""
        return packed(self._body.explain_scale(ticks))

    def check_health(self) -> None:
        """See `ControllerBody.check`; Serve replaces a controller for which it raises."""
        self._body.check()

    async def config(self) -> LiveConfig:
        """What holds now."""
        return self._holder.live

    async def prepare_config(self, on_top_of: int, config: DeploymentConfig) -> str:
        """See `ConfigHolder.prepare`."""
        return await self._holder.prepare(on_top_of, config)

    async def take_config(self, live: LiveConfig) -> int:
        """See `ConfigHolder.take`."""
        return await self._holder.take(live)

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        await self._seen_at.close()
        await self._holder.close()
        await self._body.close()


async def status_of(body: ControllerBody, holder: ConfigHolder) -> Told:
    """See `ControllerBody.status`; also which generation of the configuration holds."""
    return {**await body.status(), "generation": holder.live.generation}


def observatory(body: ControllerBody, holder: ConfigHolder, *, app: str, node: str) -> Observatory:
    """Where a controller can be looked at."""

    def collect() -> Iterable[Family]:
        generation, refused = holder.live.generation, holder.refused
        return body.measured.families(generation=generation, refused_configs=refused)

    return Observatory(
        holder.live.config.observability,
        node=node,
        metrics=Metrics(collect),
        targets=lambda address: body.targets(address, node),
        feed=LiveFeed(
            status=lambda: status_of(body, holder),
            ticks=body.explain_scale,
            config=lambda: holder.live.config,
            ask=ask_ingresses(app),
        ),
    )


def _refused(refusal: AdapterRefusal | None) -> Told | None:
    return None if refusal is None else asdict(refusal)


def _order(member: Member) -> tuple[str, str]:
    return (member.deployment, member.replica_id)


def _row(member: Member) -> Told:
    told = {name: member.metadata[name] for name in _MEMBER_FIELDS if name in member.metadata}
    return {"node": member.node_ip} | told
