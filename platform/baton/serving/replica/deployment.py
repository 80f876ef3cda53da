"""One replica: an engine, the fleet link in front of it, and what Ray Serve wants to know."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.config.derive.options import adapter_rules, adapter_sources
from baton.config.schema.deployment import DeploymentConfig, EngineKind
from baton.control.fleet.adapter_registry import AdapterRegistry, AdapterRejection, replica_adapters
from baton.domain.errors import ComponentUnhealthy, EngineDied
from baton.domain.fleet import ReplicaFacts
from baton.domain.names.addresses import format_endpoint
from baton.engine.adapter_files import adapter_refusal
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.ports import Engine
from baton.runtime.process.gc_tuning import freeze_startup_heap
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
from baton.serving.replica.side_channel_watch import CHECK_DEADLINE_S, SideChannelWatch
from baton.serving.replica.start_reports import StartReporter
from baton.serving.shared.metadata import LINK_ADDRESS, METRICS_ADDRESS, REPLICA_ID
from baton.serving.store.adapter_store import AdapterFollower, decode_registry
from baton.serving.store.link_keys import link_options
from baton.telemetry.logs import configure_logs, log_event
from baton.telemetry.metrics.replica import replica_families

_LOGGER = logging.getLogger(__name__)


def host_options(config: DeploymentConfig, pool: str) -> HostOptions:
    """The bounds and deadlines of a pool's replicas.

    A check has the deadline of `config.derive.options.probe_options`: coordinators wait a little
    longer than that, so that they hear it when another replica gave no answer.
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
    """Where a replica's metrics and its engine's own series are; None where none are wanted."""
    observability = config.observability
    if not observability.metrics.enabled:
        return None
    token = None if observability.token_file is None else TokenFile(Path(observability.token_file))
    metrics = MetricsRenderer(lambda: replica_families(host), extra=series)
    return MetricsEndpoint(metrics, host=address, token=token)


def start_side_channel_watch(engine: Engine, facts: ReplicaFacts) -> SideChannelWatch:
    """What watches a replica's own side channel; begun where it has one."""
    name, address = facts.replica_id, facts.side_channel
    check = partial(engine.check_side_channel, name, address, CHECK_DEADLINE_S)
    watch = SideChannelWatch(name, check)
    if address:
        watch.start()
    return watch


class EngineReplica:
    """The class behind each pool's deployment; `app` decorates it."""

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
        if config.pools[pool].engine.kind is EngineKind.VLLM:
            environment = await asyncio.to_thread(engine_environment, config, pool)
            await fetch_for_engine(config, pool, environment, StartReporter(pool, host))
        site = ReplicaSite(
            replica_id=f"{pool}-{replica_name()}",
            pool=pool,
            host=host,
            reserve_ports=self._ports.reserve,
            gcs_address=get_gcs_address(),
        )
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
        freeze_startup_heap()
        fields = {"replica_id": site.replica_id, "pool": pool, "link": self._host.address}
        log_event(_LOGGER, logging.INFO, "replica_started", fields)

    def record_replica_metadata(self) -> dict[str, object]:
        """What coordinators need to reach this replica; Serve hands it to them."""
        metrics_address = None if self._metrics is None else self._metrics.address
        return {
            LINK_ADDRESS: self._require_host().address,
            METRICS_ADDRESS: metrics_address,
            REPLICA_ID: self._facts.replica_id,
            "pool": self._pool,
            "role": str(self._facts.role),  # its pool's; `status` has the present one
            "pid": os.getpid(),
        }

    async def check_health(self) -> None:
        """Raise when this replica can no longer do its work, so that Serve replaces it.

        Serve ends it at once then, so whatever still can end here does so before: it drains.

        Raises:
            EngineDied: its engine is dead.
            Broken: its engine lives, and no other engine can fetch blocks from it any more, or it
                from any other.
        """
        host = self._require_host()
        if host.failed.done():
            raise host.failed.result()
        # For good, as draining is: a replica that drains and lives on would do nothing for ever.
        if failure := host.agent_failure or self._side_channel.latch_failure():
            host.drain(deadline_s=self._config.admission.timeouts.total_s)
            if host.drained.is_set():
                raise ComponentUnhealthy(f"replica {self._facts.replica_id}", failure)

    async def set_role(self, role: str) -> dict[str, object]:
        """Be meant for something else from now on, without a restart; the last call counts.

        What runs here runs on, and coordinators send other work. Returns what `status` says of it.

        Raises:
            RoleUnsupported: there is no such role, or this engine cannot play it.
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
        """As `set_role` where this replica is meant, else None: Serve calls all of a pool or one.

        Raises:
            RoleUnsupported: there is no such role, or this engine cannot play it.
        """
        return await self.set_role(role) if self._facts.replica_id in replica_ids else None

    async def check_adapter(self, source: str, places: Sequence[str]) -> dict[str, object] | None:
        """Why an adapter could not be served here, with the status that says so; None: it could."""
        refusal = await asyncio.to_thread(self._check_adapter_files, source, places)
        return None if refusal is None else asdict(refusal)

    async def apply_adapters(self, registry: str) -> int:
        """Serve the adapters of this registry; the version that holds then."""
        return self._adapters.update(decode_registry(registry))

    def _check_adapter_files(self, source: str, places: Sequence[str]) -> AdapterRejection | None:
        engine = self._config.pools[self._pool].engine
        folder = source
        if not source.startswith("/"):
            if engine.kind is EngineKind.SIM:
                return None  # what it would load, it does not have
            from baton.engine.vllm.core.lora import resolve_local_path

            folder = resolve_local_path(source)
            if folder == source:
                return AdapterRejection(
                    status=404, why=f"No adapter found for {source!r} on the hub"
                )
            places = ("/",)
        return adapter_refusal(folder, max_rank=engine.adapters.max_rank, allowed_roots=places)

    async def _refresh_adapters(self) -> None:
        try:
            await self._adapters.poll()
        except Exception as error:  # a boundary: Ray raises what it likes, and one leg fails by it
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
        """Serve's shutdown hook: finish what runs here, then stop the engine."""
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
