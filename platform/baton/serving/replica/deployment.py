"""The replica deployment: an engine, its fleet link, and the methods that Ray Serve calls."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.config.derive.options import adapter_rules, adapter_sources
from baton.config.schema.deployment import DeploymentConfig, EngineKind
from baton.control.fleet.adapter_registry import AdapterRegistry, AdapterRejection, replica_adapters
from baton.domain.errors import ComponentUnhealthy, EngineDied, RdmaMissing
from baton.domain.fleet import ReplicaFacts
from baton.domain.names.addresses import format_endpoint
from baton.engine.adapter_files import adapter_refusal
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.ports import Engine
from baton.runtime.process.background_task import BackgroundTask
from baton.runtime.process.gc_tuning import freeze_startup_heap
from baton.runtime.process.scratch import scratch_folder
from baton.runtime.replica_host import HostOptions, ReplicaHost
from baton.runtime.roles import parse_role
from baton.serving.http.access import TokenFile
from baton.serving.http.metrics_endpoint import MetricsEndpoint, MetricsRenderer
from baton.serving.ray.grpc_port import bind_grpc_to_node
from baton.serving.replica import hub_environment
from baton.serving.replica.engines import (
    ReplicaSite,
    build_engine,
    device_count,
    engine_environment,
)
from baton.serving.replica.model_download import fetch_for_engine
from baton.serving.replica.port_reservation import PortReservation
from baton.serving.replica.start_reports import StartReporter
from baton.serving.shared.names import LINK_ADDRESS, METRICS_ADDRESS, REPLICA_ID
from baton.serving.store.adapter_store import AdapterFollower, decode_registry
from baton.serving.store.link_keys import link_options
from baton.telemetry.logs import configure_logs, log_event
from baton.telemetry.metrics.replica import replica_families

_LOGGER = logging.getLogger(__name__)
_CHECK_DEADLINE_S = 5.0
"""For a peer on the same machine, which answers in milliseconds unless overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannelTiming:
    """Interval, timeout and threshold of checks."""

    period_s: float = 5.0
    failure_threshold: int = 4
    """In a row: 20 s if it refuses connections, 40 s if it does not answer."""
    timeout_s: float = _CHECK_DEADLINE_S + 1.0
    """For a check that misses its own deadline."""


def host_options(config: DeploymentConfig, pool: str) -> HostOptions:
    """The bounds and deadlines of a pool's replicas.

    Coordinators wait a little longer for a check than its deadline here, so that they learn that
    the other replica did not answer (`config.derive.options.probe_options`).
    """
    transfer = config.transfer
    return HostOptions(
        lease_s=transfer.lease_s,
        check_timeout_s=transfer.probe.deadline_s,
        devices=device_count(config, pool),
    )


def metrics_endpoint(
    config: DeploymentConfig, host: ReplicaHost, *, address: str, series: CollectorRegistry
) -> MetricsEndpoint | None:
    """The endpoint for a replica's metrics and its engine's series; None if disabled."""
    observability = config.observability
    if not observability.metrics.enabled:
        return None
    token = None if observability.token_file is None else TokenFile(Path(observability.token_file))
    metrics = MetricsRenderer(lambda: replica_families(host), extra=series)
    return MetricsEndpoint(metrics, host=address, token=token)


def start_side_channel_watch(engine: Engine, facts: ReplicaFacts) -> SideChannelWatch:
    """The watch of a replica's own side channel; started if it has one."""
    name, address = facts.replica_id, facts.side_channel
    check = partial(engine.check_side_channel, name, address, _CHECK_DEADLINE_S)
    watch = SideChannelWatch(name, check)
    if address:
        watch.start()
    return watch


class EngineReplica:
    """The class of each pool's deployment; `application.app` decorates it."""

    async def __init__(self, config: DeploymentConfig, pool: str) -> None:  # type: ignore[misc]
        from baton.serving.ray.context import get_gcs_address, node_address, replica_name

        logs = config.observability.logs
        configure_logs(logs.format, logs.level)
        self._config, self._pool = config, pool
        self._model = config.pools[pool].model
        self._ports = PortReservation()
        self._host: ReplicaHost | None = None
        self._metrics: MetricsEndpoint | None = None
        host = node_address()
        bind_grpc_to_node(host)
        await asyncio.to_thread(hub_environment.apply_stored, config.cluster.model_cache.path)
        reporter = StartReporter(pool, host, replica=replica_name())
        if config.pools[pool].engine.kind is EngineKind.VLLM:
            environment = await asyncio.to_thread(engine_environment, config, pool)
            await fetch_for_engine(config, pool, environment, reporter)
        phase_folder = await asyncio.to_thread(scratch_folder, "baton-start-")
        site = ReplicaSite(
            replica_id=f"{pool}-{replica_name()}",
            pool=pool,
            host=host,
            reserve_ports=self._ports.reserve,
            gcs_address=get_gcs_address(),
            phase_file=phase_folder / "phase",
        )
        try:
            with reporter.reporting("starting the engine", site.phase_file):
                await self._start_engine(site)
        finally:
            await asyncio.to_thread(shutil.rmtree, phase_folder, ignore_errors=True)
        freeze_startup_heap()
        fields = {"replica_id": site.replica_id, "pool": pool, "link": self._require_host().address}
        log_event(_LOGGER, logging.INFO, "replica_started", fields)

    async def _start_engine(self, site: ReplicaSite) -> None:
        """Start the engine and all that depends on it."""
        config, pool, host = self._config, self._pool, site.host
        series = CollectorRegistry()
        link = await asyncio.to_thread(link_options)
        self._known_adapters = KnownAdapters(
            adapter_sources(config.models[self._model]), refresh=self._refresh_adapters
        )
        self._adapters = AdapterFollower(self._set_known_adapters)
        await self._adapters.start()
        engine = await asyncio.to_thread(
            build_engine, config, site, series=series, adapters=self._known_adapters
        )
        self._host = ReplicaHost(
            engine,
            bind=format_endpoint("tcp", host, 0),
            options=host_options(config, pool),
            link=link,
        )
        self._facts = facts = await self._host.start()
        self._side_channel = start_side_channel_watch(engine, facts)
        self._metrics = metrics_endpoint(config, self._host, address=host, series=series)
        if self._metrics is not None:
            await self._metrics.start()

    def record_replica_metadata(self) -> dict[str, object]:
        """The addresses that coordinators need; Serve gives them to followers."""
        metrics_address = None if self._metrics is None else self._metrics.address
        return {
            LINK_ADDRESS: self._require_host().address,
            METRICS_ADDRESS: metrics_address,
            REPLICA_ID: self._facts.replica_id,
            "pool": self._pool,
            "role": str(self._facts.role),  # the pool's role; `status` has the current one
            "pid": os.getpid(),
        }

    async def check_health(self) -> None:
        """Check that this replica can work; Serve replaces it otherwise.

        Serve kills the replica after a failure. So it drains before it reports a broken agent or
        side channel.

        Raises:
            EngineDied: the engine is dead.
            ComponentUnhealthy: the engine lives, but can exchange blocks with no other engine.
        """
        host = self._require_host()
        if host.failed.done():
            raise host.failed.result()
        # Final, like draining: a replica that drained and lived on would stay idle forever.
        if failure := host.agent_failure or self._side_channel.latch_failure():
            host.drain(deadline_s=self._config.admission.timeouts.total_s)
            if host.drained.is_set():
                raise ComponentUnhealthy(f"replica {self._facts.replica_id}", failure)

    async def set_role(self, role: str) -> dict[str, object]:
        """Switch to a role without a restart; the last call counts.

        Requests here finish; coordinators then send other work. Returns the new role.

        Raises:
            RoleUnsupported: the role is unknown, or this engine cannot play it.
        """
        host = self._require_host()
        changed = host.set_role(parse_role(self._facts.replica_id, role))
        if changed:
            fields = {"replica_id": self._facts.replica_id, "pool": self._pool, "role": role}
            log_event(_LOGGER, logging.INFO, "role_changed", fields)
        return {
            "replica_id": self._facts.replica_id,
            "pool": self._pool,
            "pool_role": str(self._facts.role),
            "role": role,
            "changed": changed,
            "pid": os.getpid(),
        }

    async def set_role_if_listed(
        self, replica_ids: tuple[str, ...], role: str
    ) -> dict[str, object] | None:
        """See `set_role`; None if this replica is not listed: Serve calls all replicas or one."""
        return await self.set_role(role) if self._facts.replica_id in replica_ids else None

    async def check_adapter(self, source: str, places: Sequence[str]) -> dict[str, object] | None:
        """Why this replica could not serve an adapter, with the HTTP status; None if it could."""
        refusal = await asyncio.to_thread(self._check_adapter_files, source, places)
        return None if refusal is None else asdict(refusal)

    async def apply_adapters(self, registry: str) -> int:
        """Serve the adapters of this registry; returns the version in force."""
        return self._adapters.update(decode_registry(registry))

    def _check_adapter_files(self, source: str, places: Sequence[str]) -> AdapterRejection | None:
        engine = self._config.pools[self._pool].engine
        folder = source
        if not source.startswith("/"):
            if engine.kind is EngineKind.SIM:
                return None  # the simulated engine has no files
            from baton.engine.vllm.core.lora import resolve_local_path

            folder = resolve_local_path(source)
            if folder == source:
                return AdapterRejection(
                    status=404, reason=f"No adapter found for {source!r} on the hub"
                )
            places = ("/",)
        return adapter_refusal(folder, max_rank=engine.adapters.max_rank, allowed_roots=places)

    async def _refresh_adapters(self) -> None:
        try:
            await self._adapters.poll()
        except Exception as error:  # a boundary: Ray raises many types, and only one leg fails
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _set_known_adapters(self, registry: AdapterRegistry) -> None:
        self._known_adapters.replace_added(
            replica_adapters(registry, self._model, adapter_rules(self._config))
        )

    async def status(self) -> dict[str, object]:
        """Facts and counters, for operators."""
        host = self._require_host()
        return {
            "facts": asdict(host.facts or self._facts),
            "pool_role": str(self._facts.role),
            "broken_agent": host.agent_failure,
            "live_legs": host.live_legs,
            "leases": host.leases,
            "coordinators": host.coordinators,
            "counters": asdict(host.counters),
            "link": asdict(host.link_counters),
            "cache": asdict(host.cache_counters),
        }

    async def __del__(self) -> None:
        """Serve's shutdown hook: finish requests in flight, then stop the engine."""
        host, self._host = self._host, None
        if host is None:
            return
        await self._side_channel.close()
        await self._adapters.close()
        host.drain(deadline_s=self._config.admission.timeouts.total_s)
        await host.drained.wait()
        if self._metrics is not None:
            await self._metrics.close()
        await host.close()
        self._ports.release()
        fields = {"replica_id": self._facts.replica_id, "pool": self._pool}
        log_event(_LOGGER, logging.INFO, "replica_stopped", fields)

    def _require_host(self) -> ReplicaHost:
        if self._host is None:
            raise EngineDied(self._pool, "the replica is stopping")
        return self._host


class SideChannelWatch:
    """See the module.

    Theory of operation. Coordinators detect a dead side channel by probes within seconds and use
    other pairs. But its thread in vLLM restarts only with the engine. So each replica checks its
    own side channel as a peer would, and reports a failure after several in a row; Ray Serve then
    replaces it. Several, because a busy machine may answer late. An exception of a check is one
    more failure.
    """

    def __init__(
        self,
        replica_id: str,
        check: Callable[[], Awaitable[None]],
        *,
        timing: SideChannelTiming | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._check = check
        self._timing = timing or SideChannelTiming()
        self._failures = 0
        self._last_failure = ""
        self._latched_failure = ""
        self._task = BackgroundTask("own-side-channel", self._probe_loop)

    @property
    def failure(self) -> str:
        """Why the replica must be replaced; empty while it is healthy."""
        return self._last_failure if self._failures >= self._timing.failure_threshold else ""

    def latch_failure(self) -> str:
        """`failure`, kept once it occurred, even if the side channel answers again."""
        self._latched_failure = self._latched_failure or self.failure
        return self._latched_failure

    def start(self) -> None:
        """Start to check. Idempotent."""
        self._task.start()

    async def close(self) -> None:
        """Stop checking. Idempotent."""
        await self._task.stop()

    async def probe(self) -> None:
        """Check once."""
        try:
            async with asyncio.timeout(self._timing.timeout_s):
                await self._check()
        except RdmaMissing:
            pass  # it answered; peers check the transport of blocks
        except Exception as error:  # noqa: BLE001 - a boundary: a check that breaks has failed
            self._record_failure(f"{type(error).__name__}: {error}")
            return
        self._failures = 0

    async def _probe_loop(self) -> None:
        while True:
            await asyncio.sleep(self._timing.period_s)
            await self.probe()

    def _record_failure(self, reason: str) -> None:
        self._failures += 1
        self._last_failure = (
            f"its side channel has not answered {self._failures} times in a row: {reason}"
        )
        if self._failures == self._timing.failure_threshold:
            fields = {"replica_id": self._replica_id, "reason": self._last_failure}
            log_event(_LOGGER, logging.ERROR, "side_channel_dead", fields)
